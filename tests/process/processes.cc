#include "tests/process/processes.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

extern char** environ;

namespace tessera::process {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// Every run here takes a second or two; a machine under load is given a lot more.
constexpr double kLimitSeconds = 60;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

bool is_of_a_launcher(const std::string& entry) {
  static const Strings kNames = {
      "RANK=",        "LOCAL_RANK=",  "WORLD_SIZE=",  "LOCAL_WORLD_SIZE=",
      "MASTER_ADDR=", "MASTER_PORT=", "TORCHELASTIC_"};
  return std::any_of(kNames.begin(), kNames.end(), [&](const std::string& name) {
    return entry.compare(0, name.size(), name) == 0;
  });
}

std::vector<char*> c_strings(const Strings& strings) {
  std::vector<char*> result;
  for (const std::string& string : strings) result.push_back(const_cast<char*>(string.c_str()));
  result.push_back(nullptr);
  return result;
}

int open_log(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0) throw std::runtime_error("cannot write " + path.string());
  return fd;
}

// The entries of a file of NUL-ended strings under /proc; none when the process has gone.
Strings proc_strings(pid_t pid, const char* name) {
  const std::string text = read_file(fs::path("/proc") / std::to_string(pid) / name);
  Strings strings;
  std::istringstream in(text);
  for (std::string string; std::getline(in, string, '\0');) strings.push_back(string);
  return strings;
}

bool contains(const Strings& strings, const std::string& string) {
  return std::find(strings.begin(), strings.end(), string) != strings.end();
}

}  // namespace

Child::Child(const Strings& argv, const Strings& environment, const fs::path& log_stem,
             const fs::path& working_folder)
    : out_path_(log_stem.string() + ".out"), err_path_(log_stem.string() + ".err") {
  Strings entries;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (!is_of_a_launcher(*entry)) entries.emplace_back(*entry);
  }
  // Ranks share few cores here, and the order of sums must not depend on how many there are.
  entries.emplace_back("OMP_NUM_THREADS=1");
  entries.insert(entries.end(), environment.begin(), environment.end());
  const std::vector<char*> args = c_strings(argv);
  const std::vector<char*> envs = c_strings(entries);
  const int out = open_log(out_path_);
  const int err = open_log(err_path_);
  const int in = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  pid_ = ::fork();
  if (pid_ == 0) {
    ::dup2(in, STDIN_FILENO);
    ::dup2(out, STDOUT_FILENO);
    ::dup2(err, STDERR_FILENO);
    if (::chdir(working_folder.c_str()) != 0) ::_exit(127);
    ::execve(args[0], args.data(), envs.data());
    ::_exit(127);
  }
  for (const int fd : {in, out, err}) ::close(fd);
  if (pid_ < 0) throw std::runtime_error("cannot start " + argv[0]);
}

Child::~Child() {
  if (pid_ == 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void Child::signal(int number) const {
  if (pid_ != 0) ::kill(pid_, number);
}

std::string Child::out() const { return read_file(out_path_); }
std::string Child::err() const { return read_file(err_path_); }

Outcome Child::wait(double limit_seconds) {
  Outcome outcome;
  const Clock::time_point start = Clock::now();
  int status = 0;
  const bool ended =
      becomes_true([&] { return ::waitpid(pid_, &status, WNOHANG) == pid_; }, limit_seconds);
  outcome.seconds = seconds_since(start);
  if (!ended) {
    outcome.was_late = true;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, &status, 0);
  }
  pid_ = 0;
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  outcome.out = out();
  outcome.err = err();
  return outcome;
}

Listener::Listener() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  socklen_t length = sizeof(address);
  auto* plain = reinterpret_cast<sockaddr*>(&address);
  if (fd_ < 0 || ::bind(fd_, plain, length) != 0 || ::listen(fd_, 16) != 0 ||
      ::getsockname(fd_, plain, &length) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot listen");
  }
  port_ = ntohs(address.sin_port);
}

Listener::~Listener() { ::close(fd_); }

int64_t free_port() { return Listener().port(); }

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

void write_file(const fs::path& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  if (!out.flush()) throw std::runtime_error("cannot write " + path.string());
}

bool becomes_true(const std::function<bool()>& condition, double limit_seconds) {
  const Clock::time_point start = Clock::now();
  while (!condition()) {
    if (seconds_since(start) > limit_seconds) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

std::string error_line(const std::string& err) {
  const size_t begin = err.find("tessera: error: ");
  if (begin == std::string::npos) return "";
  return err.substr(begin, err.find('\n', begin) - begin);
}

bool ends_with_a_stop(const std::string& line) { return !line.empty() && line.back() == '.'; }

Processes::Processes() : program_(fs::absolute("apps/tessera").string()) {
  std::string pattern = (fs::path(testing::TempDir()) / "process_XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no folder " + pattern);
  folder_ = pattern;
  marker_ = "--job.description=" + folder_.filename().string();
  // Two documents of letters in an order that has something to learn.
  for (int document = 0; document < 2; ++document) {
    std::string text;
    for (int i = 0; i < 6000; ++i) text += static_cast<char>('a' + (i * i + i / 7 + document) % 23);
    write_file(folder_ / ("text" + std::to_string(document)), text);
  }
  Child prepare({program_, "prepare", "--output", data(), (folder_ / "text0").string(),
                 (folder_ / "text1").string()},
                {}, folder_ / "prepare");
  const Outcome outcome = prepare.wait(kLimitSeconds);
  if (outcome.code != 0) throw std::runtime_error("tessera prepare: " + outcome.err);
}

Processes::~Processes() {
  for (const pid_t pid : processes()) ::kill(pid, SIGKILL);
  std::error_code ignored;  // of a folder in which a killed process still writes
  fs::remove_all(folder_, ignored);
}

Strings Processes::train_command(const Strings& options) const {
  Strings argv = {program_,
                  "train",
                  marker_,
                  "--training.dataset_path=" + data(),
                  "--job.dump_folder=" + dump_folder(),
                  "--training.seq_len=16",
                  "--training.local_batch_size=2",
                  "--training.steps=4",
                  "--metrics.log_freq=1"};
  argv.insert(argv.end(), options.begin(), options.end());
  return argv;
}

Strings Processes::launch_command(int64_t ranks, const Strings& options,
                                  const Strings& launch_options) const {
  Strings argv = {program_, "launch", "--nproc-per-node", std::to_string(ranks)};
  argv.insert(argv.end(), launch_options.begin(), launch_options.end());
  argv.emplace_back("--");
  const Strings training = train_command(options);
  argv.insert(argv.end(), training.begin(), training.end());
  return argv;
}

Strings Processes::rank_environment(int64_t rank, int64_t world_size, int64_t port) {
  return {"RANK=" + std::to_string(rank), "WORLD_SIZE=" + std::to_string(world_size),
          "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + std::to_string(port)};
}

std::unique_ptr<Child> Processes::start(const Strings& argv, const Strings& environment,
                                        const fs::path& working_folder) {
  return std::make_unique<Child>(
      argv, environment, folder_ / ("log" + std::to_string(num_started_++)), working_folder);
}

Outcome Processes::run(const Strings& argv, const Strings& environment) {
  Outcome outcome = start(argv, environment)->wait(kLimitSeconds);
  EXPECT_FALSE(outcome.was_late) << outcome.out << outcome.err;
  expect_no_process_left();
  return outcome;
}

std::vector<nlohmann::json> Processes::metrics() const {
  std::ifstream in(fs::path(dump_folder()) / "metrics.jsonl");
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

void Processes::forget_metrics() const { fs::remove_all(dump_folder()); }

int64_t Processes::reported_steps() const {
  const std::string text = read_file(fs::path(dump_folder()) / "metrics.jsonl");
  return std::count(text.begin(), text.end(), '\n');
}

std::vector<pid_t> Processes::processes() const {
  std::vector<pid_t> pids;
  for (const fs::directory_entry& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const pid_t pid = static_cast<pid_t>(std::stol(name));
    if (contains(proc_strings(pid, "cmdline"), marker_)) pids.push_back(pid);
  }
  return pids;
}

pid_t Processes::process_of_rank(int64_t rank) const {
  for (const pid_t pid : processes()) {
    if (contains(proc_strings(pid, "environ"), "RANK=" + std::to_string(rank))) return pid;
  }
  return 0;
}

void Processes::expect_no_process_left() const {
  for (const pid_t pid : processes()) {
    std::string command;
    for (const std::string& argument : proc_strings(pid, "cmdline")) command += argument + " ";
    ADD_FAILURE() << "process " << pid << " is left: " << command;
  }
}

}  // namespace tessera::process
