#include "comm/gloo.h"

#include <cstdlib>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

namespace tessera::comm {
namespace {

// [Note: flight recorder] Every Gloo collective goes into c10d's flight recorder, one object per
// process that is made with the first one. In LibTorch 2.11 it looks groups up in a map without its
// lock, and two groups that are used by two threads (our gather and reduce streams) can corrupt the
// map and then spin for ever. So the recorder of Gloo is made with no entries, which turns it off;
// unless the user sets its variables. The recorder of NCCL is another object, made later.
class RecorderOff {
 public:
  RecorderOff() : set_(std::getenv(kName) == nullptr && std::getenv(kOtherName) == nullptr) {
    if (set_) ::setenv(kName, "0", /*overwrite=*/1);
  }
  ~RecorderOff() {
    if (set_) ::unsetenv(kName);
  }
  RecorderOff(const RecorderOff&) = delete;
  RecorderOff& operator=(const RecorderOff&) = delete;

 private:
  static constexpr const char* kName = "TORCH_FR_BUFFER_SIZE";
  static constexpr const char* kOtherName = "TORCH_NCCL_TRACE_BUFFER_SIZE";
  const bool set_;
};

// The group's first collective.
c10::intrusive_ptr<c10d::Work> start_barrier(c10d::Backend& group) {
  static std::mutex mutex;
  static bool recorder_made = false;
  const std::lock_guard<std::mutex> lock(mutex);
  if (recorder_made) return group.barrier();
  const RecorderOff off;
  recorder_made = true;
  return group.barrier();
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo(c10::intrusive_ptr<c10d::Store> store, int rank,
                                            int size, std::chrono::milliseconds timeout) {
  using c10d::ProcessGroupGloo;
  auto options = ProcessGroupGloo::Options::create(timeout);
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  options->devices.push_back(interface != nullptr && *interface != '\0'
                                 ? ProcessGroupGloo::createDeviceForInterface(interface)
                                 : ProcessGroupGloo::createDefaultDevice());
  options->threads = 1;  // A group is used by one thread at a time.
  auto group =
      c10::make_intrusive<ProcessGroupGloo>(std::move(store), rank, size, std::move(options));
  // A rank that leaves at once must not close its sockets while others still connect to it.
  start_barrier(*group)->wait(timeout);
  return group;
}

}  // namespace tessera::comm
