#ifndef COMM_STREAM_H_
#define COMM_STREAM_H_

// A Stream runs closures one after the other beside the thread that computes: a copy-in, a
// collective, a sum. On CPU it is a worker thread (kWorker), or nothing at all (kInline: run()
// returns when the closure has; for worlds that do not communicate, and as the synchronous
// reference). The closure must hold every tensor it uses, by value.
//
// Stream: run() returns at once under kWorker; the host waits only in Event::wait() and in the
//         destructor.

#include <exception>
#include <functional>
#include <memory>
#include <string>

namespace tessera::comm {

// Marks the end of one closure. Copyable; an event that was never run is done.
class Event {
 public:
  Event() = default;
  bool done() const;
  // Returns when the closure has ended.
  // Errors: what the closure threw; or, when a closure before it on the stream threw, the same
  //         error.
  void wait() const;

  struct State;

 private:
  friend class Stream;
  std::shared_ptr<State> state_;
};

class Stream {
 public:
  enum class Kind { kInline, kWorker };

  Stream(std::string name, Kind kind);
  // Waits for the closure that is running and drops those that wait.
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // After a closure threw, the stream is broken: its group cannot be used again, and later closures
  // are not run but give the same error.
  Event run(std::function<void()> closure);

 private:
  struct Worker;
  std::unique_ptr<Worker> worker_;  // null for kInline
  std::exception_ptr broken_;       // kInline only
};

}  // namespace tessera::comm

#endif  // COMM_STREAM_H_
