#ifndef COMM_GROUP_H_
#define COMM_GROUP_H_

// A Group is a c10d backend with what a collective on it needs beside it: a name for messages, a
// time limit, and the tag of the next exchange. Not an interface over c10d: collectives use
// backend() itself.
//
// All ranks issue the collectives of one group in one order. A rank uses a group from one thread at
// a time; collectives that overlap with compute go through stream().

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "comm/stream.h"

namespace c10d {
class Backend;
}

namespace tessera::comm {

class Group {
 public:
  // How a collective travels: kNone in a world of one, kDirect by sends and receives between the
  // ranks (Gloo; broadcast and barrier excepted), kNative by the backend's own collectives (NCCL,
  // the fake group).
  enum class Path { kNone, kDirect, kNative };

  // Without communication: the only rank of a world of one.
  explicit Group(std::string name);
  Group(std::string name, c10::intrusive_ptr<c10d::Backend> backend, Path path,
        std::chrono::milliseconds timeout);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  Path path() const { return path_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  // Requires: path() != kNone.
  c10d::Backend& backend() const { return *backend_; }

  // Where the group's overlapped collectives run, one after the other: a worker thread on kDirect,
  // else inline.
  Stream& stream() { return stream_; }

  // The first of `count` tags that no exchange under way uses. Tags keep the messages of successive
  // collectives apart; all ranks count alike because they issue alike. See [Note: tags].
  //
  // Requires: count < 2^kTagBits.
  int next_tags(int64_t count);
  static constexpr int kTagBits = 20;

 private:
  std::string name_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  Path path_ = Path::kNone;
  int rank_ = 0;
  int size_ = 1;
  std::chrono::milliseconds timeout_{0};
  int64_t next_tag_ = 0;
  Stream stream_;  // last: its thread ends before what it uses goes
};

}  // namespace tessera::comm

#endif  // COMM_GROUP_H_
