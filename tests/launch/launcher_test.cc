// Goal: ranks start with the right environment, and however a run ends nothing of it stays behind.
// Method: shell commands as ranks; what one leaves is found by the pid that it wrote to a file.

#include "launch/launcher.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/stopwatch.h"

namespace tessera::launch {
namespace {

namespace fs = std::filesystem;

class Launcher : public testing::Test {
 protected:
  Launcher() {
    std::string pattern = (fs::path(testing::TempDir()) / "launcher_XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~Launcher() override { fs::remove_all(folder_); }

  // Runs `script` in a shell on every rank, in a folder of this test. `$out` names a file of the
  // rank's own.
  LaunchOptions shell(int64_t ranks, const std::string& script) const {
    LaunchOptions options;
    options.nproc_per_node = ranks;
    options.program = {
        "sh", "-c", "cd " + folder_.string() + "; out=out_$RANK; echo $$ > pid_$RANK; " + script};
    return options;
  }

  std::string read(const std::string& name) const {
    std::ifstream in(folder_ / name);
    std::ostringstream text;
    text << in.rdbuf();
    return text.str();
  }

  std::map<std::string, std::string> environment_of(int64_t rank) const {
    std::map<std::string, std::string> result;
    std::istringstream lines(read("out_" + std::to_string(rank)));
    for (std::string line; std::getline(lines, line);) {
      const size_t at = line.find('=');
      if (at != std::string::npos) result[line.substr(0, at)] = line.substr(at + 1);
    }
    return result;
  }

  pid_t pid_in(const std::string& name) const { return std::stoi("0" + read(name)); }

  fs::path folder_;
};

// A zombie counts as gone only for processes that are not ours to reap.
bool is_gone(pid_t pid) {
  if (::kill(pid, 0) != 0) return errno == ESRCH;
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string number, name, state;
  stat >> number >> name >> state;
  return !stat || state == "Z";
}

bool becomes_true(const std::function<bool()>& condition) {
  base::Stopwatch watch;
  while (watch.seconds() < 20) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

void expect_no_children() {
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD) << "a rank or a zombie is left";
}

int64_t listen_somewhere(int fd) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(::listen(fd, 1), 0);
  EXPECT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length), 0);
  return ntohs(address.sin_port);
}

std::string config_error(const LaunchOptions& options) {
  try {
    launch(options);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST_F(Launcher, GivesEachRankTorchrunsVariables) {
  ::unsetenv("OMP_NUM_THREADS");
  ::setenv("RANK", "77", 1);  // of an outer launcher
  ::setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
  ASSERT_EQ(launch(shell(3, "env > $out")), 0);
  ::unsetenv("RANK");
  ::unsetenv("TORCHELASTIC_USE_AGENT_STORE");

  const auto first = environment_of(0);
  const int64_t port = std::stoll(first.at("MASTER_PORT"));
  EXPECT_GE(port, 1);
  EXPECT_LE(port, 65535);
  EXPECT_FALSE(first.at("TORCHELASTIC_RUN_ID").empty());
  const int64_t threads = std::max<int64_t>(1, std::thread::hardware_concurrency() / 3);
  for (int64_t rank = 0; rank < 3; ++rank) {
    auto env = environment_of(rank);
    const std::string index = std::to_string(rank);
    for (const char* name : {"RANK", "LOCAL_RANK", "ROLE_RANK"}) EXPECT_EQ(env[name], index);
    for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"}) {
      EXPECT_EQ(env[name], "3") << name;
    }
    EXPECT_EQ(env["GROUP_RANK"], "0");
    EXPECT_EQ(env["GROUP_WORLD_SIZE"], "1");
    EXPECT_EQ(env["MASTER_ADDR"], "127.0.0.1");
    EXPECT_EQ(env["MASTER_PORT"], first.at("MASTER_PORT"));
    EXPECT_EQ(env["TORCHELASTIC_RUN_ID"], first.at("TORCHELASTIC_RUN_ID"));
    EXPECT_EQ(env["TORCHELASTIC_RESTART_COUNT"], "0");
    EXPECT_EQ(env["TORCHELASTIC_MAX_RESTARTS"], "0");
    EXPECT_EQ(env["OMP_NUM_THREADS"], std::to_string(threads));
    EXPECT_EQ(env.count("TORCHELASTIC_USE_AGENT_STORE"), 0u);
    EXPECT_EQ(env["PATH"], ::getenv("PATH"));
  }
  expect_no_children();
}

TEST_F(Launcher, KeepsTheUsersThreadCountAndRunId) {
  ::setenv("OMP_NUM_THREADS", "5", 1);
  LaunchOptions options = shell(1, "env > $out");
  options.run_id = "nightly-12";
  EXPECT_EQ(launch(options), 0);
  ::unsetenv("OMP_NUM_THREADS");
  EXPECT_EQ(environment_of(0)["OMP_NUM_THREADS"], "5");
  EXPECT_EQ(environment_of(0)["TORCHELASTIC_RUN_ID"], "nightly-12");
}

TEST_F(Launcher, WritesOneLogPerRankWithBothStreams) {
  LaunchOptions options = shell(2, "echo said by $RANK; echo warned by $RANK >&2");
  options.log_dir = (folder_ / "deep" / "logs").string();
  EXPECT_EQ(launch(options), 0);
  EXPECT_EQ(read("deep/logs/rank_00000.log"), "said by 0\nwarned by 0\n");
  EXPECT_EQ(read("deep/logs/rank_00001.log"), "said by 1\nwarned by 1\n");
}

TEST_F(Launcher, EndsTheOthersWhenOneFailsAndReturnsItsCode) {
  testing::internal::CaptureStderr();
  base::Stopwatch watch;
  // `sleep` is a child of the shell: the whole group has to end, not only the shell.
  EXPECT_EQ(
      launch(shell(4,
                   "if [ $RANK = 1 ]; then "
                   "  while [ ! -s sleep_0 -o ! -s sleep_2 -o ! -s sleep_3 ]; do sleep 0.01; done; "
                   "  exit 7; "
                   "fi; "
                   "sleep 60 & echo $! > sleep_$RANK; wait")),
      7);
  EXPECT_LT(watch.seconds(), 8.0) << "SIGTERM ends a shell at once; the grace period is 10 s";
  const std::string message = testing::internal::GetCapturedStderr();
  EXPECT_NE(message.find("rank 1 (pid " + std::to_string(pid_in("pid_1")) +
                         ") exited with code 7; ending the other 3 ranks"),
            std::string::npos)
      << message;
  for (const char* name : {"pid_0", "pid_2", "pid_3", "sleep_0", "sleep_2", "sleep_3"}) {
    ASSERT_GT(pid_in(name), 0) << name;
    EXPECT_TRUE(is_gone(pid_in(name))) << name;
  }
  expect_no_children();
}

TEST_F(Launcher, ReportsADeathBySignalAs128PlusItsNumber) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(launch(shell(2, "if [ $RANK = 0 ]; then kill -KILL $$; fi; sleep 60")), 137);
  const std::string message = testing::internal::GetCapturedStderr();
  EXPECT_NE(message.find("was killed by signal 9 (SIGKILL); ending the other rank\n"),
            std::string::npos)
      << message;
  expect_no_children();
}

TEST_F(Launcher, NamesTheCauseAndNotThePeerThatNoticedItFirst) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(launch(shell(3, "case $RANK in 0) exit 3;; 1) sleep 0.1; exit 9;; esac; sleep 60")), 9);
  const std::string message = testing::internal::GetCapturedStderr();
  EXPECT_NE(message.find("rank 1 (pid"), std::string::npos) << message;
}

TEST_F(Launcher, NamesAPeerFailureWhenNothingElseFailed) {
  EXPECT_EQ(launch(shell(2, "if [ $RANK = 1 ]; then exit 3; fi; sleep 60")), kPeerFailureCode);
}

TEST_F(Launcher, KillsRanksThatIgnoreSigtermAfterTheGracePeriod) {
  LaunchOptions options =
      shell(3,
            "trap '' TERM; if [ $RANK = 2 ]; then while [ ! -s ready_0 -o ! -s ready_1 ]; do sleep "
            "0.05; done; exit 5; fi; echo 1 > ready_$RANK; sleep 60; sleep 60");
  options.grace_seconds = 0.5;
  testing::internal::CaptureStderr();
  base::Stopwatch watch;
  EXPECT_EQ(launch(options), 5);
  EXPECT_GE(watch.seconds(), 0.5);
  EXPECT_LT(watch.seconds(), 20.0);
  const std::string message = testing::internal::GetCapturedStderr();
  EXPECT_NE(message.find("did not end within 0.5 s; killing"), std::string::npos) << message;
  EXPECT_TRUE(is_gone(pid_in("pid_0")));
  EXPECT_TRUE(is_gone(pid_in("pid_1")));
  expect_no_children();
}

TEST_F(Launcher, EndsWhatASuccessfulRankLeftBehind) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(launch(shell(1, "sleep 60 & echo $! > sleep_0")), 0);
  const std::string message = testing::internal::GetCapturedStderr();
  EXPECT_NE(message.find("left processes behind"), std::string::npos) << message;
  EXPECT_TRUE(is_gone(pid_in("sleep_0")));
  expect_no_children();
}

TEST_F(Launcher, SaysOnceThatAProgramIsMissing) {
  LaunchOptions options;
  options.nproc_per_node = 4;
  options.program = {"no-such-program-here", "--flag"};
  testing::internal::CaptureStderr();
  EXPECT_EQ(launch(options), 127);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "error: launch: program 'no-such-program-here' was not found in PATH; write ./NAME "
            "for one in this folder\n");
  expect_no_children();
}

TEST_F(Launcher, SaysThatAFileCannotBeExecuted) {
  std::ofstream(folder_ / "data.txt") << "not a program";
  LaunchOptions options;
  options.nproc_per_node = 2;
  options.program = {(folder_ / "data.txt").string()};
  testing::internal::CaptureStderr();
  EXPECT_EQ(launch(options), 126);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("Permission denied"), std::string::npos);
}

TEST_F(Launcher, RefusesAPortThatIsTakenBeforeAnyRankStarts) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  LaunchOptions options = shell(2, "exit 0");
  options.master_port = listen_somewhere(fd);
  EXPECT_NE(config_error(options).find("port 127.0.0.1:" + std::to_string(options.master_port) +
                                       " is taken"),
            std::string::npos);
  EXPECT_FALSE(fs::exists(folder_ / "pid_0"));
  ::close(fd);
  EXPECT_EQ(launch(options), 0) << "the same port works once it is free";
}

TEST_F(Launcher, RefusesOptionsThatCannotWork) {
  LaunchOptions options = shell(0, "exit 0");
  EXPECT_NE(config_error(options).find("at least 1 rank"), std::string::npos);
  options = shell(1, "exit 0");
  options.grace_seconds = -1;
  EXPECT_NE(config_error(options).find("grace period"), std::string::npos);
  options = shell(1, "exit 0");
  options.master_port = 65536;
  EXPECT_NE(config_error(options).find("65535"), std::string::npos);
  options.program.clear();
  EXPECT_NE(config_error(options).find("no program"), std::string::npos);
  options = shell(1, "exit 0");
  std::ofstream(folder_ / "file") << "x";
  options.log_dir = (folder_ / "file" / "logs").string();
  EXPECT_NE(config_error(options).find("cannot make the log folder"), std::string::npos);
}

TEST_F(Launcher, LeavesSignalsAsTheyWere) {
  sigset_t before, after;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &before);
  EXPECT_EQ(launch(shell(2, "exit 0")), 0);
  ::pthread_sigmask(SIG_SETMASK, nullptr, &after);
  for (int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    EXPECT_EQ(sigismember(&before, signal), sigismember(&after, signal)) << signal;
  }
}

// The launcher as a process of its own, so that it can be sent signals; its exit code, or minus the
// signal that killed it.
class LauncherProcess {
 public:
  explicit LauncherProcess(const LaunchOptions& options) : pid_(::fork()) {
    if (pid_ == 0) _exit(launch(options));
  }
  void signal(int signal) { ::kill(pid_, signal); }
  int wait() {
    int status = 0;
    EXPECT_EQ(::waitpid(pid_, &status, 0), pid_);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t pid_;
};

TEST_F(Launcher, PassesSignalsOnAndLeavesNothing) {
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) {
    for (const char* name : {"pid_0", "pid_1", "ready_0", "ready_1", "got_0", "got_1"}) {
      fs::remove(folder_ / name);
    }
    LauncherProcess process(shell(2,
                                  "trap 'echo TERM > got_$RANK; exit 0' TERM; "
                                  "trap 'echo INT > got_$RANK; exit 0' INT; "
                                  "trap 'echo HUP > got_$RANK; exit 0' HUP; "
                                  "sleep 60 & echo $! > ready_$RANK; wait"));
    ASSERT_TRUE(becomes_true([&] { return !read("ready_0").empty() && !read("ready_1").empty(); }));
    base::Stopwatch watch;
    process.signal(signal);
    EXPECT_EQ(process.wait(), 128 + signal);
    EXPECT_LT(watch.seconds(), 8.0) << "the grace period of 10 s is not needed";
    const std::string expected = signal == SIGTERM  ? "TERM\n"
                                 : signal == SIGINT ? "INT\n"
                                                    : "HUP\n";
    EXPECT_EQ(read("got_0"), expected);
    EXPECT_EQ(read("got_1"), expected);
    for (const char* name : {"pid_0", "pid_1", "ready_0", "ready_1"}) {
      EXPECT_TRUE(is_gone(pid_in(name))) << name;
    }
  }
}

TEST_F(Launcher, KillsAfterTheGracePeriodOfASignalToo) {
  LaunchOptions options = shell(2, "trap '' TERM; echo 1 > ready_$RANK; sleep 60; sleep 60");
  options.grace_seconds = 0.3;
  LauncherProcess process(options);
  ASSERT_TRUE(becomes_true([&] { return !read("ready_0").empty() && !read("ready_1").empty(); }));
  process.signal(SIGTERM);
  EXPECT_EQ(process.wait(), 128 + SIGTERM);
  EXPECT_TRUE(is_gone(pid_in("pid_0")));
  EXPECT_TRUE(is_gone(pid_in("pid_1")));
}

TEST_F(Launcher, TakesItsRanksWithItWhenItIsKilled) {
  LauncherProcess process(shell(2, "echo 1 > ready_$RANK; exec sleep 60"));
  ASSERT_TRUE(becomes_true([&] { return !read("ready_0").empty() && !read("ready_1").empty(); }));
  process.signal(SIGKILL);
  EXPECT_EQ(process.wait(), -SIGKILL);
  EXPECT_TRUE(becomes_true([&] { return is_gone(pid_in("pid_0")) && is_gone(pid_in("pid_1")); }));
}

}  // namespace
}  // namespace tessera::launch
