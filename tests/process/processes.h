#ifndef TESTS_PROCESS_PROCESSES_H_
#define TESTS_PROCESS_PROCESSES_H_

// The `tessera` program as its user has it: started as processes, in one test's own folder, with a
// limit on their time. Each test has a marker, an argument of all its processes, by which it finds
// those that were left behind.

#include <gtest/gtest.h>
#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tessera::process {

using Strings = std::vector<std::string>;

struct Outcome {
  int code = -1;  // 128 + n for signal n
  std::string out;
  std::string err;
  double seconds = 0;     // from the call of wait()
  bool was_late = false;  // did not end within the limit, and was killed
};

// One running process. Killed when the object goes.
class Child {
 public:
  // `environment`: "NAME=value", over this process's own without the variables of any launcher.
  // Errors: std::runtime_error when it cannot be started.
  Child(const Strings& argv, const Strings& environment, const std::filesystem::path& log_stem,
        const std::filesystem::path& working_folder = ".");
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const;
  Outcome wait(double limit_seconds);
  // What it has printed so far.
  std::string out() const;
  std::string err() const;

 private:
  pid_t pid_ = 0;  // 0: ended and fetched
  std::filesystem::path out_path_;
  std::filesystem::path err_path_;
};

// A listening socket on a port of its own, on all addresses of IPv4.
class Listener {
 public:
  Listener();
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  int64_t port() const { return port_; }

 private:
  int fd_ = -1;
  int64_t port_ = 0;
};

// A port that nobody listened on a moment ago.
int64_t free_port();

std::string read_file(const std::filesystem::path& path);
void write_file(const std::filesystem::path& path, const std::string& text);

// Looks every 10 ms; false when it did not become true in time.
bool becomes_true(const std::function<bool()>& condition, double limit_seconds);

class Processes : public testing::Test {
 protected:
  // Makes the folder and, with `tessera prepare`, the data set data().
  Processes();
  // Kills what carries the marker.
  ~Processes() override;

  const std::filesystem::path& folder() const { return folder_; }
  std::string data() const { return (folder_ / "data").string(); }
  std::string dump_folder() const { return (folder_ / "dump").string(); }

  // argv of a small training, with `options` over its own.
  Strings train_command(const Strings& options) const;
  // argv of `tessera launch` of that training.
  Strings launch_command(int64_t ranks, const Strings& options,
                         const Strings& launch_options = {}) const;
  // The environment by which a rank that no launcher starts meets the others.
  static Strings rank_environment(int64_t rank, int64_t world_size, int64_t port);

  // Names its logs by itself.
  std::unique_ptr<Child> start(const Strings& argv, const Strings& environment = {},
                               const std::filesystem::path& working_folder = ".");
  // Starts, waits, and expects that it ended in time and that no process is left.
  Outcome run(const Strings& argv, const Strings& environment = {});

  // The lines of metrics.jsonl, parsed; none when the file is not there.
  // Errors: nlohmann::json's own.
  std::vector<nlohmann::json> metrics() const;
  void forget_metrics() const;
  int64_t reported_steps() const;

  // Living processes with the marker among their arguments, zombies left out.
  std::vector<pid_t> processes() const;
  // The process of the training itself whose RANK it is; 0 when there is none.
  pid_t process_of_rank(int64_t rank) const;
  void expect_no_process_left() const;

 private:
  std::filesystem::path folder_;
  std::string program_;
  std::string marker_;
  int64_t num_started_ = 0;
};

#define EXPECT_SAYS(text, part)                   \
  EXPECT_NE((text).find(part), std::string::npos) \
      << "expected: " << (part) << "\nthe text: " << (text)

// The line of the error, from "tessera: error:" to its end; "" when there is none.
std::string error_line(const std::string& err);

// A message that a library's stack trace was appended to goes on in the next line, and its first
// has no end.
bool ends_with_a_stop(const std::string& line);

}  // namespace tessera::process

#endif  // TESTS_PROCESS_PROCESSES_H_
