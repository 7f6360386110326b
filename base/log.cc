#include "base/log.h"

#include <unistd.h>

#include <atomic>

namespace tessera::base {
namespace {

std::atomic<int> log_rank{-1};

void write_line(const char* kind, const std::string& text) {
  const int rank = log_rank.load();
  std::string line;
  if (rank >= 0) line += "[rank " + std::to_string(rank) + "] ";
  line += kind;
  line += text;
  line += '\n';
  // One write() per line: the kernel does not mix lines of processes that share the terminal or
  // the file.
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t n = ::write(STDERR_FILENO, line.data() + done, line.size() - done);
    if (n <= 0) return;
    done += static_cast<size_t>(n);
  }
}

}  // namespace

void set_log_rank(int rank) { log_rank = rank; }
void log_info(const std::string& text) { write_line("", text); }
void log_warning(const std::string& text) { write_line("warning: ", text); }
void log_error(const std::string& text) { write_line("error: ", text); }

}  // namespace tessera::base
