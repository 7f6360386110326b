#include "comm/gloo.h"

#include <cstdlib>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

namespace tessera::comm {

c10::intrusive_ptr<c10d::Backend> make_gloo(c10::intrusive_ptr<c10d::Store> store, int rank,
                                            int size, std::chrono::milliseconds timeout) {
  using c10d::ProcessGroupGloo;
  auto options = ProcessGroupGloo::Options::create(timeout);
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  options->devices.push_back(interface != nullptr && *interface != '\0'
                                 ? ProcessGroupGloo::createDeviceForInterface(interface)
                                 : ProcessGroupGloo::createDefaultDevice());
  options->threads = 1;  // A group is used by one thread at a time.
  return c10::make_intrusive<ProcessGroupGloo>(std::move(store), rank, size, std::move(options));
}

}  // namespace tessera::comm
