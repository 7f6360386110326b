#ifndef COMM_RANK_MEAN_H_
#define COMM_RANK_MEAN_H_

// The sum of what the ranks sent, which is ours on Path::kDirect. See [Note: direct exchange] in
// comm/collectives.h.

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::comm {

// out = (parts[0] + parts[1] + ...) / parts.size(), added in that order in out's dtype (half types:
// in fp32). `out` may be one of the parts.
//
// Shapes: all 1-D, contiguous, of equal size; at least two parts, of one dtype.
void mean_in_rank_order(const at::Tensor& out, const std::vector<at::Tensor>& parts);

}  // namespace tessera::comm

#endif  // COMM_RANK_MEAN_H_
