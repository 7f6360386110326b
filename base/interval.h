#ifndef BASE_INTERVAL_H_
#define BASE_INTERVAL_H_

// A half-open range [begin, end) of element positions. Empty when begin == end.

#include <algorithm>
#include <cstdint>

namespace tessera::base {

struct Interval {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  bool empty() const { return end <= begin; }
  bool operator==(const Interval& other) const { return begin == other.begin && end == other.end; }
};

// The positions in both; where there are none, an empty interval that lies inside or at an end of
// `a`.
inline Interval intersect(Interval a, Interval b) {
  const int64_t begin = std::min(std::max(a.begin, b.begin), a.end);
  const int64_t end = std::max(begin, std::min(a.end, b.end));
  return {begin, end};
}

inline Interval shift(Interval a, int64_t by) { return {a.begin + by, a.end + by}; }

}  // namespace tessera::base

#endif  // BASE_INTERVAL_H_
