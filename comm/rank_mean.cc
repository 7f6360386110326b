#include "comm/rank_mean.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/simd.h"

namespace tessera::comm {
namespace {

// Sums are taken in pieces that stay in the first cache, so that each operand is read from memory
// once and the result written once; ATen's operations would pass over it W + 1 times.
constexpr int64_t kPieceElements = 4096;

TESSERA_SIMD_CLONES
void add(float* sum, const float* a, const float* b, int64_t size) {
  for (int64_t i = 0; i < size; ++i) sum[i] = a[i] + b[i];
}

TESSERA_SIMD_CLONES
void divide(float* out, const float* sum, float divisor, int64_t size) {
  for (int64_t i = 0; i < size; ++i) out[i] = sum[i] / divisor;
}

void mean_of_floats(float* out, const std::vector<const float*>& parts, int64_t size) {
  float sum[kPieceElements];
  for (int64_t begin = 0; begin < size; begin += kPieceElements) {
    const int64_t piece = std::min(kPieceElements, size - begin);
    add(sum, parts[0] + begin, parts[1] + begin, piece);
    for (size_t p = 2; p < parts.size(); ++p) add(sum, sum, parts[p] + begin, piece);
    divide(out + begin, sum, static_cast<float>(parts.size()), piece);
  }
}

}  // namespace

void mean_in_rank_order(const at::Tensor& out, const std::vector<at::Tensor>& parts) {
  const bool all_float = out.scalar_type() == at::kFloat && parts[0].scalar_type() == at::kFloat;
  if (all_float && out.is_cpu()) {
    std::vector<const float*> data;
    for (const at::Tensor& part : parts) data.push_back(part.const_data_ptr<float>());
    mean_of_floats(out.data_ptr<float>(), data, out.numel());
    return;
  }
  const at::ScalarType dtype = at::toOpMathType(out.scalar_type());
  at::Tensor sum = at::empty(out.sizes(), out.options().dtype(dtype));
  sum.copy_(parts[0]);
  for (size_t p = 1; p < parts.size(); ++p) sum.add_(parts[p]);
  at::Tensor target = out;
  target.copy_(sum.div_(static_cast<double>(parts.size())));
}

}  // namespace tessera::comm
