#ifndef LAUNCH_RANK_ENVIRONMENT_H_
#define LAUNCH_RANK_ENVIRONMENT_H_

// The environment variables by which a rank learns who it is: torchrun's, so that a program started
// here or by torchrun sees no difference.

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::launch {

struct RankEnvironment {
  int64_t rank = 0;
  int64_t world_size = 1;  // all of it on this machine: local rank and size are the same
  std::string master_addr;
  int64_t master_port = 0;
  std::string run_id;
  int64_t compute_threads = 1;  // OMP_NUM_THREADS, where the user has not set it
};

// `inherited` ("NAME=value" entries) with the rank's variables set, and those of an outer torchrun,
// which would describe another job, taken out.
std::vector<std::string> make_environment(const std::vector<std::string>& inherited,
                                          const RankEnvironment& rank);

}  // namespace tessera::launch

#endif  // LAUNCH_RANK_ENVIRONMENT_H_
