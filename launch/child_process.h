#ifndef LAUNCH_CHILD_PROCESS_H_
#define LAUNCH_CHILD_PROCESS_H_

// Starts one program as a child, in its own process group, tied to the life of this process.

#include <signal.h>
#include <sys/types.h>

#include <string>
#include <vector>

namespace tessera::launch {

struct ChildOptions {
  std::vector<std::string> program;      // argv; program[0] is looked up in PATH
  std::vector<std::string> environment;  // "NAME=value", all of it
  std::string log_path;                  // stdout and stderr go there; "" leaves them as they are
  sigset_t signal_mask;                  // of the child
};

struct ChildStart {
  pid_t pid = 0;     // of the running program; 0 when it did not start
  int error = 0;     // the errno that says why
  std::string step;  // what failed: "fork", "exec", ...
};

// Returns when the child has become the program, or cannot; a child that cannot is already reaped.
//
// Ensures: the child leads a process group of its own; its stdin is /dev/null (a terminal would
//          stop a background group that reads from it); it gets SIGTERM when the calling thread
//          ends, however it ends.
// Errors:  ConfigError when the log file cannot be opened.
ChildStart start_child(const ChildOptions& options);

}  // namespace tessera::launch

#endif  // LAUNCH_CHILD_PROCESS_H_
