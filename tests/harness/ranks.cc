#include "tests/harness/ranks.h"

#include <ATen/Parallel.h>

#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

namespace tessera::harness {
namespace {

// What ranks threw, in the order of time, and how many have ended.
class Outcome {
 public:
  explicit Outcome(int size) : running_(size) {}

  void failed(int rank, const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    failures_ += "rank " + std::to_string(rank) + " threw: " + text + "\n";
  }

  void ended() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--running_ == 0) all_ended_.notify_all();
  }

  void wait_for_all() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_ended_.wait(lock, [this] { return running_ == 0; });
  }

  // To be called when no rank runs any more.
  const std::string& failures() const { return failures_; }

 private:
  std::mutex mutex_;
  std::condition_variable all_ended_;
  int running_;
  std::string failures_;
};

// A rank that ends well keeps its world until all have ended: others may still be connecting theirs
// to it. One that fails drops it at once, so that ranks that wait for it fail, too.
void run_rank(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
              const std::function<void(comm::World&)>& fn, std::chrono::milliseconds timeout,
              Outcome& outcome) {
  try {
    comm::Options options;
    options.init_timeout = timeout;
    options.train_timeout = timeout;
    comm::World world = comm::connect(store, rank, size, options);
    // Noted before the world closes, so that what follows from it comes later in the list.
    try {
      fn(world);
      outcome.ended();
      outcome.wait_for_all();
      return;
    } catch (const std::exception& error) {
      outcome.failed(rank, error.what());
    } catch (...) {
      outcome.failed(rank, "something that is no std::exception");
    }
  } catch (const std::exception& error) {
    outcome.failed(rank, error.what());
  }
  outcome.ended();
}

}  // namespace

void run_ranks(int size, const std::function<void(comm::World&)>& fn,
               std::chrono::milliseconds timeout) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Outcome outcome(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      // One thread an operator: ranks share few cores, and the order of sums must not depend on how
      // many there are.
      at::set_num_threads(1);
      run_rank(store, rank, size, fn, timeout, outcome);
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (!outcome.failures().empty()) throw std::runtime_error(outcome.failures());
}

}  // namespace tessera::harness
