#include "launch/launcher.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "base/stopwatch.h"
#include "launch/child_process.h"
#include "launch/free_port.h"
#include "launch/rank_environment.h"

extern char** environ;

namespace tessera::launch {
namespace {

// How long a rank that blames its peers (kPeerFailureCode) waits to be named: the cause, which
// ended before it, may be seen only after it, since the kernel closes a process's connections
// before it reports the end.
constexpr double kBlameSeconds = 0.5;
// While ranks are being ended, their own children end without telling the launcher, so it looks
// this often.
constexpr double kLookSeconds = 0.05;
// After SIGKILL only a process stuck inside the kernel can live on; the launcher does not wait for
// it for ever.
constexpr double kKillSeconds = 10;

constexpr int kNotExecutableCode = 126;  // as shells do
constexpr int kNotFoundCode = 127;

// More on one machine is a typing error.
constexpr int64_t kMaxRanks = 1024;

void check_options(const LaunchOptions& options) {
  TESSERA_CHECK_CONFIG(options.nproc_per_node >= 1 && options.nproc_per_node <= kMaxRanks,
                       "expected at least 1 rank (--nproc-per-node) and at most ", kMaxRanks,
                       ", found ", options.nproc_per_node);
  TESSERA_CHECK_CONFIG(!options.program.empty() && !options.program[0].empty(),
                       "no program to launch was named");
  TESSERA_CHECK_CONFIG(std::isfinite(options.grace_seconds) && options.grace_seconds >= 0,
                       "expected a grace period of 0 seconds or more (--grace-seconds), found ",
                       options.grace_seconds);
  TESSERA_CHECK_CONFIG(
      options.master_port >= 0 && options.master_port <= 65535,
      "expected a port from 1 to 65535, or 0 for a free one (--master-port), found ",
      options.master_port);
  TESSERA_CHECK_CONFIG(options.master_port == 0 || port_is_free(options.master_port), "port ",
                       options.master_addr, ":", options.master_port,
                       " is taken by another program. Choose another --master-port, or leave it "
                       "out to have a free one picked.");
  if (!options.log_dir.empty()) {
    std::error_code error;
    std::filesystem::create_directories(options.log_dir, error);
    TESSERA_CHECK_CONFIG(!error, "cannot make the log folder '", options.log_dir,
                         "': ", error.message());
  }
}

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name == nullptr ? base::str("signal ", signal) : base::str("SIG", name);
}

// "the other rank" or "the other 3 ranks".
std::string others(int64_t count) {
  return count == 1 ? "the other rank" : base::str("the other ", count, " ranks");
}

// Takes over this process's signals for its lifetime: those of interest are blocked and fetched by
// wait().
class SignalScope {
 public:
  SignalScope() {
    sigemptyset(&watched_);
    sigaddset(&watched_, SIGCHLD);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
      // Ignored ones stay ignored, here and in the ranks: nohup and a shell's `&` rely on it.
      struct sigaction action;
      ::sigaction(signal, nullptr, &action);
      if (action.sa_handler != SIG_IGN) sigaddset(&watched_, signal);
    }
    // Were SIGCHLD ignored, the kernel would reap the ranks and their exit codes would be lost.
    struct sigaction plain;
    std::memset(&plain, 0, sizeof(plain));
    plain.sa_handler = SIG_DFL;
    ::sigaction(SIGCHLD, &plain, &old_child_action_);
    ::pthread_sigmask(SIG_BLOCK, &watched_, &old_mask_);
    // A rank's own children come to us when the rank ends, not to the machine's init: so they can
    // be waited for.
    ::prctl(PR_GET_CHILD_SUBREAPER, &old_subreaper_);
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  }
  ~SignalScope() {
    while (wait(0) !=
           0) {  // those of the ranks' end; unblocked they would hit whoever called launch()
    }
    ::prctl(PR_SET_CHILD_SUBREAPER, old_subreaper_);
    ::sigaction(SIGCHLD, &old_child_action_, nullptr);
    ::pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
  }
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;

  const sigset_t& mask_before() const { return old_mask_; }

  // The next signal, or 0 after that many seconds without one; no value waits for ever.
  int wait(std::optional<double> seconds) const {
    if (!seconds) {
      const int signal = ::sigwaitinfo(&watched_, nullptr);
      return signal < 0 ? 0 : signal;
    }
    timespec timeout;
    timeout.tv_sec = static_cast<time_t>(*seconds);
    timeout.tv_nsec = static_cast<long>((*seconds - std::floor(*seconds)) * 1e9);
    const int signal = ::sigtimedwait(&watched_, nullptr, &timeout);
    return signal < 0 ? 0 : signal;
  }

 private:
  sigset_t watched_;
  sigset_t old_mask_;
  struct sigaction old_child_action_;
  int old_subreaper_ = 0;
};

struct Rank {
  int64_t index = 0;
  pid_t pid = 0;
  bool running = true;     // the rank itself
  bool group_left = true;  // any process of its group
  int wait_status = 0;     // once it does not run

  int code() const {
    return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
  }
};

class Launcher {
 public:
  explicit Launcher(const LaunchOptions& options) : options_(options) {}

  int run() {
    start_all();
    while (true) {
      reap();
      judge();
      if (std::none_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.group_left; })) {
        return exit_code_;
      }
      if (stopping_ && !kill_in_time()) return exit_code_;
      const int signal = signals_.wait(patience());
      if (signal != 0 && signal != SIGCHLD) pass_on(signal);
    }
  }

 private:
  void start_all();
  void start_failed(const ChildStart& start);
  void reap();
  void judge();
  void name_the_cause(const Rank& rank);
  void pass_on(int signal);
  void stop(int signal);
  bool kill_in_time();
  std::optional<double> patience() const;
  int64_t num_running() const {
    return std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.running; });
  }
  void signal_groups(int signal) const {
    for (const Rank& rank : ranks_) {
      if (rank.group_left) ::kill(-rank.pid, signal);
    }
  }
  std::string log_path(int64_t rank) const;

  const LaunchOptions& options_;
  SignalScope signals_;
  std::vector<Rank> ranks_;
  std::vector<size_t> failed_;  // positions in ranks_, in the order in which their end was seen
  base::Stopwatch since_failure_;
  base::Stopwatch since_stop_;
  bool stopping_ = false;
  int stop_signal_ = 0;
  bool killed_ = false;
  int exit_code_ = 0;
};

std::string Launcher::log_path(int64_t rank) const {
  if (options_.log_dir.empty()) return "";
  char name[32];
  std::snprintf(name, sizeof(name), "rank_%05lld.log", static_cast<long long>(rank));
  return (std::filesystem::path(options_.log_dir) / name).string();
}

void Launcher::start_all() {
  RankEnvironment rank;
  rank.world_size = options_.nproc_per_node;
  rank.master_addr = options_.master_addr;
  rank.master_port = options_.master_port == 0 ? pick_free_port() : options_.master_port;
  rank.run_id = options_.run_id;
  if (rank.run_id.empty()) {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    rank.run_id = base::str("tessera-", ::getpid(), "-",
                            std::chrono::duration_cast<std::chrono::microseconds>(now).count());
  }
  const int64_t cores = std::thread::hardware_concurrency();  // that this process may use
  rank.compute_threads = std::max<int64_t>(1, cores / options_.nproc_per_node);

  std::vector<std::string> inherited;
  for (char** entry = environ; *entry != nullptr; ++entry) inherited.emplace_back(*entry);
  for (rank.rank = 0; rank.rank < rank.world_size; ++rank.rank) {
    ChildOptions child;
    child.program = options_.program;
    child.environment = make_environment(inherited, rank);
    child.log_path = log_path(rank.rank);
    child.signal_mask = signals_.mask_before();
    ChildStart start;
    try {
      start = start_child(child);
    } catch (const ConfigError& error) {
      base::log_error(base::str("launch: ", error.what()));
      exit_code_ = kNotExecutableCode;
      stop(SIGTERM);
      return;
    }
    if (start.pid == 0) return start_failed(start);
    Rank started;
    started.index = rank.rank;
    started.pid = start.pid;
    ranks_.push_back(started);
  }
}

// The others would fail as well, so none is tried and the message comes once.
void Launcher::start_failed(const ChildStart& start) {
  const std::string& program = options_.program[0];
  if (start.step == "exec" && start.error == ENOENT) {
    const bool is_path = program.find('/') != std::string::npos;
    base::log_error(base::str("launch: program '", program, "' was not found",
                              is_path ? "" : " in PATH; write ./NAME for one in this folder"));
    exit_code_ = kNotFoundCode;
  } else {
    base::log_error(base::str("launch: cannot start program '", program, "' as rank ",
                              ranks_.size(), " (", start.step,
                              " failed): ", std::strerror(start.error)));
    exit_code_ = kNotExecutableCode;
  }
  stop(SIGTERM);
}

// Collects every process that has ended, and finds the groups that are empty.
void Launcher::reap() {
  while (true) {
    int status = 0;
    const pid_t pid = ::waitpid(-1, &status, WNOHANG);
    if (pid < 0 && errno == EINTR) continue;
    if (pid <= 0) break;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      Rank& rank = ranks_[i];
      if (rank.pid != pid || !rank.running) continue;
      rank.running = false;
      rank.wait_status = status;
      if (rank.code() == 0) continue;
      if (failed_.empty()) since_failure_.restart();
      failed_.push_back(i);
    }
  }
  for (Rank& rank : ranks_) {
    // The kernel does not give a group's number to a new process while the group has members, so
    // the number can mean another group only if all numbers were used up between two looks.
    if (!rank.running && rank.group_left) {
      rank.group_left = ::kill(-rank.pid, 0) == 0 || errno == EPERM;
    }
  }
}

// Decides whether the run is to be stopped because of what has ended.
void Launcher::judge() {
  if (stopping_) {
    // A shell's background commands ignore SIGINT: the ranks are gone and these would use up the
    // grace period.
    if (num_running() == 0 && stop_signal_ != SIGTERM) {
      stop_signal_ = SIGTERM;
      signal_groups(SIGTERM);
    }
    return;
  }
  if (!failed_.empty()) {
    const auto cause = std::find_if(failed_.begin(), failed_.end(), [this](size_t i) {
      return ranks_[i].code() != kPeerFailureCode;
    });
    if (cause != failed_.end()) return name_the_cause(ranks_[*cause]);
    if (num_running() == 0 || since_failure_.seconds() >= kBlameSeconds) {
      return name_the_cause(ranks_[failed_[0]]);
    }
    return;
  }
  if (num_running() > 0) return;
  for (const Rank& rank : ranks_) {
    if (!rank.group_left) continue;
    base::log_warning(base::str("launch: rank ", rank.index,
                                " has ended but left processes behind; ending them"));
  }
  stop(SIGTERM);
}

void Launcher::name_the_cause(const Rank& rank) {
  std::string message = base::str("launch: rank ", rank.index, " (pid ", rank.pid, ") ");
  if (WIFSIGNALED(rank.wait_status)) {
    const int signal = WTERMSIG(rank.wait_status);
    message += base::str("was killed by signal ", signal, " (", signal_name(signal), ")");
  } else {
    message += base::str("exited with code ", rank.code());
  }
  const int64_t running = num_running();
  if (running > 0) message += "; ending " + others(running);
  if (!options_.log_dir.empty()) message += ". Its output is in " + log_path(rank.index);
  base::log_error(message);
  exit_code_ = rank.code();
  stop(SIGTERM);
}

void Launcher::pass_on(int signal) {
  if (stopping_) {  // a second Ctrl-C: ranks may take it as "faster"; the grace period stays as it
                    // is
    signal_groups(signal);
    return;
  }
  base::log_warning(base::str("launch: got ", signal_name(signal),
                              "; passing it on to the ranks, which have ", options_.grace_seconds,
                              " s to end"));
  exit_code_ = 128 + signal;
  stop(signal);
}

void Launcher::stop(int signal) {
  stopping_ = true;
  stop_signal_ = signal;
  since_stop_.restart();
  signal_groups(signal);
}

// Kills what is left once the grace period is over. False when even that does not help.
bool Launcher::kill_in_time() {
  if (!killed_ && since_stop_.seconds() >= options_.grace_seconds) {
    killed_ = true;
    for (const Rank& rank : ranks_) {
      if (!rank.group_left) continue;
      base::log_error(base::str("launch: ", rank.running ? "" : "processes left by ", "rank ",
                                rank.index, " (pid ", rank.pid, ") did not end within ",
                                options_.grace_seconds, " s; killing"));
    }
    signal_groups(SIGKILL);
  }
  if (since_stop_.seconds() < options_.grace_seconds + kKillSeconds) return true;
  for (const Rank& rank : ranks_) {
    if (!rank.group_left) continue;
    base::log_error(base::str("launch: process group ", rank.pid, " of rank ", rank.index,
                              " is still there ", kKillSeconds,
                              " s after SIGKILL (stuck in the kernel?); leaving it"));
  }
  return false;
}

std::optional<double> Launcher::patience() const {
  if (stopping_) {
    const double left = options_.grace_seconds - since_stop_.seconds();
    return killed_ ? kLookSeconds : std::clamp(left, 0.0, kLookSeconds);
  }
  if (!failed_.empty()) return std::max(0.0, kBlameSeconds - since_failure_.seconds());
  return std::nullopt;
}

}  // namespace

int launch(const LaunchOptions& options) {
  check_options(options);
  return Launcher(options).run();
}

}  // namespace tessera::launch
