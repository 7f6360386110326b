#ifndef LAUNCH_LAUNCHER_H_
#define LAUNCH_LAUNCHER_H_

// Starts N ranks of a program on this machine, watches them, and ends them together.
//
//   start      each rank is a process group of its own, with torchrun's environment variables (see
//              rank_environment.h)
//   a failure  when a rank exits non-zero or by a signal, one line on stderr names it; the others
//              get SIGTERM, and after the grace period SIGKILL. The launcher's exit code is that
//              rank's, 128 + n for signal n. Ranks that exit with kPeerFailureCode say that another
//              one is the cause: the first that says something else is named.
//   a signal   SIGINT, SIGTERM, SIGHUP and SIGQUIT to the launcher are passed on to all ranks, then
//              grace and SIGKILL as above. The exit code is 128 + n.
//   the end    processes which a rank has left in its group are ended in the same way: nothing
//              stays behind. What a rank has moved to another group is its own affair.
//   a crash    when the launcher itself is killed, the kernel sends each rank SIGTERM.
//
// Ranks read nothing: their stdin is /dev/null.

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::launch {

// The exit code of a rank that failed only because a peer did; `tessera train` keeps to it.
constexpr int kPeerFailureCode = 3;

struct LaunchOptions {
  int64_t nproc_per_node = 1;
  std::vector<std::string> program;  // argv; program[0] is looked up in PATH

  std::string master_addr = "127.0.0.1";
  int64_t master_port = 0;  // 0: a free one is picked

  double grace_seconds = 10;  // from SIGTERM to SIGKILL
  std::string log_dir;        // rank r writes rank_0000r.log there; "": to the launcher's streams
  std::string run_id;         // keeps the keys of runs apart; "": one is made up
};

// Runs the ranks to their end and returns the exit code: 0 when all of them exited with 0, else as
// above; 127 when the program is not found and 126 when it cannot be executed, said once whatever
// N.
//
// Requires: called on the only thread that may get the signals above, in a process with no other
//           children (their exit would be fetched here and lost).
// Ensures:  no rank and no zombie is left; signal mask and dispositions are as before.
// Errors:   ConfigError, before any rank starts, for options that cannot work and for a port that
//           is taken.
int launch(const LaunchOptions& options);

}  // namespace tessera::launch

#endif  // LAUNCH_LAUNCHER_H_
