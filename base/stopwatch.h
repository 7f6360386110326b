#ifndef BASE_STOPWATCH_H_
#define BASE_STOPWATCH_H_

// Wall time since construction or the last restart(), on a clock that never goes back.

#include <chrono>

namespace tessera::base {

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  void restart() { start_ = Clock::now(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

}  // namespace tessera::base

#endif  // BASE_STOPWATCH_H_
