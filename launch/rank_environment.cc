#include "launch/rank_environment.h"

#include <algorithm>
#include <utility>

namespace tessera::launch {

std::vector<std::string> make_environment(const std::vector<std::string>& inherited,
                                          const RankEnvironment& rank) {
  const std::string index = std::to_string(rank.rank);
  const std::string size = std::to_string(rank.world_size);
  std::vector<std::pair<std::string, std::string>> set = {
      {"RANK", index},
      {"LOCAL_RANK", index},
      {"WORLD_SIZE", size},
      {"LOCAL_WORLD_SIZE", size},
      {"GROUP_RANK", "0"},  // torchrun's word for the machine
      {"GROUP_WORLD_SIZE", "1"},
      {"ROLE_NAME", "default"},
      {"ROLE_RANK", index},
      {"ROLE_WORLD_SIZE", size},
      {"MASTER_ADDR", rank.master_addr},
      {"MASTER_PORT", std::to_string(rank.master_port)},
      {"TORCHELASTIC_RUN_ID", rank.run_id},
      {"TORCHELASTIC_RESTART_COUNT", "0"},
      {"TORCHELASTIC_MAX_RESTARTS", "0"},
  };
  // With an agent's store rank 0 would not serve one itself; there is no agent here. The error file
  // is the outer job's.
  const std::vector<std::string> dropped = {"TORCHELASTIC_USE_AGENT_STORE",
                                            "TORCHELASTIC_ERROR_FILE"};

  std::vector<std::string> result;
  bool threads_given = false;
  for (const std::string& entry : inherited) {
    const std::string name = entry.substr(0, entry.find('='));
    threads_given = threads_given || name == "OMP_NUM_THREADS";
    const bool replaced =
        std::any_of(set.begin(), set.end(), [&](const auto& pair) { return pair.first == name; });
    const bool drop = std::find(dropped.begin(), dropped.end(), name) != dropped.end();
    if (!replaced && !drop) result.push_back(entry);
  }
  if (!threads_given) set.emplace_back("OMP_NUM_THREADS", std::to_string(rank.compute_threads));
  for (const auto& [name, value] : set) result.push_back(name + "=" + value);
  return result;
}

}  // namespace tessera::launch
