#include "comm/exchange.h"

#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "base/error.h"

namespace tessera::comm {
namespace {

// [Note: tags] Gloo takes tags below 2^31. The low bits count, the high ones are of the exchange's
// name: ranks that are at different units must wait in vain for each other, with both names in the
// errors, not take each other's bytes. (1 pair of names in 1024 shares a tag; there the bytes are
// taken.)
int tag_of(const std::string& what) {
  uint32_t hash = 2166136261u;  // FNV-1a
  for (const char c : what) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return static_cast<int>((hash ^ (hash >> 16)) & 0x3ff) << Group::kTagBits;
}

}  // namespace

Exchange::Exchange(Group& group, const std::string& what, int64_t num_messages)
    : group_(group), what_(what), tag_(tag_of(what) | group.next_tags(num_messages)) {}

Exchange::~Exchange() = default;

template <typename Start>
void Exchange::post(std::vector<Message>& messages, const at::Tensor& tensor, int peer,
                    Start start) {
  messages.push_back({peer, nullptr});
  if (tensor.numel() == 0) return;
  std::vector<at::Tensor> list{tensor};
  try {
    messages.back().work = start(list);
  } catch (const std::exception& e) {
    throw_comm_error(group_, what_, peer, e);
  }
}

void Exchange::receive(const at::Tensor& into, int peer, int64_t index) {
  post(receives_, into, peer, [&](std::vector<at::Tensor>& list) {
    return group_.backend().recv(list, peer, tag_ + static_cast<int>(index));
  });
}

void Exchange::send(const at::Tensor& from, int peer, int64_t index) {
  post(sends_, from, peer, [&](std::vector<at::Tensor>& list) {
    return group_.backend().send(list, peer, tag_ + static_cast<int>(index));
  });
}

void Exchange::wait(const Message& message) {
  if (!message.work) return;
  try {
    message.work->wait(group_.timeout());
  } catch (const std::exception& e) {
    throw_comm_error(group_, what_, message.peer, e);
  }
}

void Exchange::wait_received(int64_t count) {
  for (; count > 0; --count) wait(receives_.at(received_++));
}

void Exchange::wait_all() {
  while (received_ < receives_.size()) wait_received(1);
  for (const Message& message : sends_) wait(message);
}

int peer_to(const Group& group, int distance) { return (group.rank() + distance) % group.size(); }

int peer_from(const Group& group, int distance) {
  return (group.rank() - distance + group.size()) % group.size();
}

void throw_comm_error(const Group& group, const std::string& what, int peer,
                      const std::exception& cause) {
  throw CommError(base::str(
      "rank ", group.rank(), ": ", what, peer >= 0 ? base::str(" with rank ", peer) : "",
      " failed: ", reason_of(cause), ". ", peer >= 0 ? base::str("Rank ", peer) : "A rank",
      " has ended, is later than the time limit of ", group.timeout().count() / 1000.0,
      " s, or runs other modules than this rank; see its output. Start the run again."));
}

std::string reason_of(const std::exception& cause) {
  const auto* error = dynamic_cast<const c10::Error*>(&cause);
  std::string text = error != nullptr ? error->what_without_backtrace() : cause.what();
  // Some of c10d's exceptions carry the trace of another one in their text.
  const size_t trace = text.find("\nException raised from ");
  if (trace != std::string::npos) text.resize(trace);
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ' || text.back() == '.')) {
    text.pop_back();
  }
  return text;
}

}  // namespace tessera::comm
