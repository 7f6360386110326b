#ifndef BASE_LOG_H_
#define BASE_LOG_H_

// One line a call on stderr, written whole so that lines of several ranks do not mix:
//   [rank 3] warning: text
// Standard output is kept for what a program was asked to print.

#include <string>

namespace tessera::base {

// Sets the prefix for this process; -1 (the start value) prints none.
void set_log_rank(int rank);

void log_info(const std::string& text);
void log_warning(const std::string& text);
void log_error(const std::string& text);

}  // namespace tessera::base

#endif  // BASE_LOG_H_
