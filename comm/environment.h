#ifndef COMM_ENVIRONMENT_H_
#define COMM_ENVIRONMENT_H_

// Who this process is among the ranks of a run, as the environment that started it says. Each kind
// of environment is one row of a table in environment.cc; the first row that recognises the
// variables reads them. No torch.

#include <functional>
#include <optional>
#include <string>

namespace tessera::comm {

struct Environment {
  std::string source;  // name of the row: "torchrun", "one process"
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  std::string master_host;  // empty when size == 1 and none is set
  int master_port = 0;
  // The launcher itself serves the TCPStore: rank 0 connects as a client too.
  bool store_is_served = false;
  std::string run_id = "none";
  int restart = 0;  // how often the launcher has restarted the ranks of this run
};

// Looks a variable up; nullopt when it is not set.
using Lookup = std::function<std::optional<std::string>(const std::string&)>;

// Errors: ConfigError that names the variable, what it holds and what was expected.
Environment detect_environment(const Lookup& lookup);

// The same from the variables of this process.
Environment detect_environment();

}  // namespace tessera::comm

#endif  // COMM_ENVIRONMENT_H_
