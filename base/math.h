#ifndef BASE_MATH_H_
#define BASE_MATH_H_

// Integer arithmetic on counts. All counts are 64-bit.

#include <cstdint>

#include "base/interval.h"

namespace tessera::base {

// The smallest n with n * divisor >= value. Requires value >= 0 and divisor > 0.
inline int64_t ceil_div(int64_t value, int64_t divisor) {
  return value / divisor + (value % divisor != 0 ? 1 : 0);
}

// The smallest multiple of `multiple` that is >= value.
inline int64_t round_up(int64_t value, int64_t multiple) {
  return ceil_div(value, multiple) * multiple;
}

// The index-th of `parts` contiguous parts of [0, size): equal, the first size % parts of them one
// longer.
inline Interval even_part(int64_t size, int64_t parts, int64_t index) {
  const int64_t base = size / parts;
  const int64_t longer = size % parts;
  const int64_t begin = index * base + (index < longer ? index : longer);
  return {begin, begin + base + (index < longer ? 1 : 0)};
}

}  // namespace tessera::base

#endif  // BASE_MATH_H_
