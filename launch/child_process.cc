#include "launch/child_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace tessera::launch {
namespace {

class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() { close(); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
};

std::vector<char*> c_strings(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const std::string& string : strings) result.push_back(const_cast<char*>(string.c_str()));
  result.push_back(nullptr);
  return result;
}

// What the child tells its parent when it cannot become the program.
struct Failure {
  int error;
  char step[16];
};

// Runs in the child between fork and exec. Only async-signal-safe calls: another thread of the
// parent may have held malloc's lock at the fork.
[[noreturn]] void become_program(char* const* argv, char* const* envp, const sigset_t& mask,
                                 int input_fd, int log_fd, int report_fd, pid_t parent) {
  Failure failure;
  std::memset(&failure, 0, sizeof(failure));
  const auto fail = [&](const char* step) {
    failure.error = errno;
    std::strncpy(failure.step, step, sizeof(failure.step) - 1);
    const ssize_t written = ::write(report_fd, &failure, sizeof(failure));
    _exit(written == sizeof(failure) ? 127 : 126);
  };
  if (::setpgid(0, 0) != 0) fail("setpgid");
  if (::prctl(PR_SET_PDEATHSIG, SIGTERM) != 0) fail("prctl");
  // Had the parent died before prctl, no signal would ever come.
  if (::getppid() != parent) _exit(126);
  if (::dup2(input_fd, STDIN_FILENO) < 0) fail("dup2");
  if (log_fd >= 0 && (::dup2(log_fd, STDOUT_FILENO) < 0 || ::dup2(log_fd, STDERR_FILENO) < 0)) {
    fail("dup2");
  }
  ::sigprocmask(SIG_SETMASK, &mask, nullptr);
  ::execvpe(argv[0], argv, envp);
  fail("exec");
  _exit(126);  // not reached
}

}  // namespace

ChildStart start_child(const ChildOptions& options) {
  const std::vector<char*> argv = c_strings(options.program);
  const std::vector<char*> envp = c_strings(options.environment);

  int log_fd = -1;
  if (!options.log_path.empty()) {
    // Appending, so that lines of stdout and stderr and of the rank's own children do not overwrite
    // each other.
    log_fd =
        ::open(options.log_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644);
    TESSERA_CHECK_CONFIG(log_fd >= 0, "cannot open the log file '", options.log_path,
                         "': ", std::strerror(errno));
  }
  File log_owner(log_fd);
  File input(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (input.fd() < 0) return {0, errno, "open /dev/null"};

  // exec closes the write end: end of file means that the program runs.
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return {0, errno, "pipe"};
  File read_end(ends[0]);
  File write_end(ends[1]);

  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return {0, errno, "fork"};
  if (pid == 0) {
    become_program(argv.data(), envp.data(), options.signal_mask, input.fd(), log_fd,
                   write_end.fd(), parent);
  }
  ::setpgid(pid,
            pid);  // here as well: whoever comes first; the later call fails or changes nothing
  write_end.close();

  Failure failure;
  ssize_t got = 0;
  do {
    got = ::read(read_end.fd(), &failure, sizeof(failure));
  } while (got < 0 && errno == EINTR);
  if (got == 0) return {pid, 0, ""};
  while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
  }
  if (got != sizeof(failure)) return {0, EIO, "exec"};
  return {0, failure.error, failure.step};
}

}  // namespace tessera::launch
