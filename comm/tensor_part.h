#ifndef COMM_TENSOR_PART_H_
#define COMM_TENSOR_PART_H_

// The stretch of a flat tensor that an interval names.

#include <ATen/core/Tensor.h>

#include "base/interval.h"

namespace tessera::comm {

// Shapes: flat: 1-D; returns a view of interval.size() elements.
inline at::Tensor part(const at::Tensor& flat, base::Interval interval) {
  return flat.narrow(0, interval.begin, interval.size());
}

}  // namespace tessera::comm

#endif  // COMM_TENSOR_PART_H_
