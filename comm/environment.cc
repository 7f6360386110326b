#include "comm/environment.h"

#include <cerrno>
#include <climits>
#include <cstdlib>

#include "base/error.h"

namespace tessera::comm {
namespace {

struct Row {
  const char* name;
  bool (*recognises)(const Lookup&);
  Environment (*read)(const Lookup&);
};

bool is_torchrun(const Lookup& lookup) {
  return lookup("RANK").has_value() || lookup("WORLD_SIZE").has_value();
}
Environment read_torchrun(const Lookup& lookup);

bool is_one_process(const Lookup&) { return true; }
Environment read_one_process(const Lookup&) { return {}; }

// In order of precedence. The last row always recognises.
constexpr Row kRows[] = {
    {"torchrun", is_torchrun, read_torchrun},
    {"one process", is_one_process, read_one_process},
};

int integer(const Lookup& lookup, const std::string& name, int low, int high,
            std::optional<int> otherwise = std::nullopt) {
  const std::optional<std::string> text = lookup(name);
  if (!text) {
    TESSERA_CHECK_CONFIG(
        otherwise.has_value(), "environment variable ", name,
        " is not set, though RANK or WORLD_SIZE is. A launcher sets RANK, WORLD_SIZE, MASTER_ADDR "
        "and MASTER_PORT together: start the ranks with `tessera launch` or torchrun, or unset "
        "RANK and WORLD_SIZE to run one process alone.");
    return *otherwise;
  }
  char* end = nullptr;
  errno = 0;
  const long value = std::strtol(text->c_str(), &end, 10);
  TESSERA_CHECK_CONFIG(
      errno == 0 && !text->empty() && *end == '\0' && value >= low && value <= high,
      "environment variable ", name, "='", *text, "': expected a whole number from ", low, " to ",
      high, ".");
  return static_cast<int>(value);
}

Environment read_torchrun(const Lookup& lookup) {
  Environment env;
  env.size = integer(lookup, "WORLD_SIZE", 1, INT_MAX);
  env.rank = integer(lookup, "RANK", 0, INT_MAX);
  TESSERA_CHECK_CONFIG(env.rank < env.size, "environment variable RANK=", env.rank,
                       ": expected less than WORLD_SIZE=", env.size, ".");
  env.local_rank = integer(lookup, "LOCAL_RANK", 0, INT_MAX, env.rank);
  env.local_size = integer(lookup, "LOCAL_WORLD_SIZE", 1, INT_MAX, env.size);
  env.restart = integer(lookup, "TORCHELASTIC_RESTART_COUNT", 0, INT_MAX, 0);
  env.run_id = lookup("TORCHELASTIC_RUN_ID").value_or("none");
  env.store_is_served = lookup("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  if (env.size == 1) return env;  // Nobody to meet.
  const std::optional<std::string> host = lookup("MASTER_ADDR");
  TESSERA_CHECK_CONFIG(
      host && !host->empty(), "environment variable WORLD_SIZE=", env.size,
      " but MASTER_ADDR is not set: expected the host of rank 0, where the ranks meet. Start the "
      "ranks with `tessera launch` or torchrun, or set MASTER_ADDR and MASTER_PORT.");
  env.master_host = *host;
  env.master_port = integer(lookup, "MASTER_PORT", 1, 65535);
  return env;
}

}  // namespace

Environment detect_environment(const Lookup& lookup) {
  for (const Row& row : kRows) {
    if (!row.recognises(lookup)) continue;
    Environment env = row.read(lookup);
    env.source = row.name;
    return env;
  }
  throw InternalError("no row of the environment table recognises this process");
}

Environment detect_environment() {
  return detect_environment([](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return std::string(value);
  });
}

}  // namespace tessera::comm
