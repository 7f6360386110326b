// Proves that NCCL and libtorch_cuda are found, compiled against and linked (--config=cuda). Run
// where there is a GPU it prints the version of NCCL and the number of devices; without one it says
// so and exits with 2.

#include <ATen/cuda/CUDAContext.h>
#include <nccl.h>

#include <cstdio>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

int main() {
  int version = 0;
  ncclGetVersion(&version);
  const auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  const int devices = static_cast<int>(at::cuda::device_count());
  std::printf("NCCL %d, backend '%s', %d CUDA devices\n", version, options->backend.c_str(),
              devices);
  return devices > 0 ? 0 : 2;
}
