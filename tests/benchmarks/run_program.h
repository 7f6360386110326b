#ifndef TESTS_BENCHMARKS_RUN_PROGRAM_H_
#define TESTS_BENCHMARKS_RUN_PROGRAM_H_

// Runs a program as a user would, for tests of the benchmark programs.

#include <nlohmann/json.hpp>
#include <string>

namespace tessera::benchmarks {

struct Outcome {
  int status = 0;      // what the shell returned
  std::string output;  // standard output and standard error
};

// Runs the shell command in the directory of the test, where the programs lie under their path in
// the repository.
//
// Errors: std::runtime_error when no shell can be started.
Outcome run_program(const std::string& command);

// The last line of the text that begins with a brace, parsed.
//
// Errors: std::runtime_error when there is none; nlohmann::json::exception when it is not JSON.
nlohmann::json last_json(const std::string& text);

}  // namespace tessera::benchmarks

#endif  // TESTS_BENCHMARKS_RUN_PROGRAM_H_
