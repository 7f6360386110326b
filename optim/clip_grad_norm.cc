#include "optim/clip_grad_norm.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/stack.h>

#include <cmath>
#include <type_traits>

#include "base/error.h"
#include "base/math.h"
#include "base/simd.h"

namespace tessera::optim {
namespace {

// Elements whose squares are summed apart: the order of the sum does not depend on the number of
// threads.
constexpr int64_t kBlock = 1 << 15;

template <typename T>
inline double sum_of_squares(const T* data, int64_t size) {
  // Independent sums let the compiler use SIMD, which one chain of additions forbids.
  constexpr int64_t kSums = 32;
  double sums[kSums] = {};
  const int64_t vectors_end = size - size % kSums;
  for (int64_t i = 0; i < vectors_end; i += kSums) {
    for (int64_t j = 0; j < kSums; ++j) {
      const double x = static_cast<double>(data[i + j]);
      sums[j] += x * x;
    }
  }
  for (int64_t i = vectors_end; i < size; ++i) {
    const double x = static_cast<double>(data[i]);
    sums[i - vectors_end] += x * x;
  }
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return total;
}

TESSERA_SIMD_CLONES
double sum_of_squares_of_floats(const float* data, int64_t size) {
  return sum_of_squares(data, size);
}

template <typename T>
double block_sum(const T* data, int64_t size) {
  if constexpr (std::is_same_v<T, float>) {
    return sum_of_squares_of_floats(data, size);
  } else {
    return sum_of_squares(data, size);
  }
}

// ATen's norm with a double result first makes a double copy of a CPU tensor: 6 times slower, and
// twice the memory of the gradients.
double sum_of_squares_on_cpu(const at::Tensor& grad) {
  const at::Tensor dense = grad.contiguous();
  const int64_t size = dense.numel();
  std::vector<double> blocks(base::ceil_div(size, kBlock));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dense.scalar_type(), "grad_norm", [&] {
    const scalar_t* data = dense.const_data_ptr<scalar_t>();
    at::parallel_for(0, static_cast<int64_t>(blocks.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * kBlock;
        blocks[block] = block_sum(data + first, std::min(kBlock, size - first));
      }
    });
  });
  double total = 0.0;
  for (const double block : blocks) total += block;
  return total;
}

// One synchronisation with the device for all gradients.
double sum_of_squares_on_device(const std::vector<at::Tensor>& grads) {
  if (grads.empty()) return 0.0;
  const std::vector<at::Tensor> norms = at::_foreach_norm(grads, 2, at::kDouble);
  return at::stack(norms).square().sum().item<double>();
}

}  // namespace

double grad_norm(const std::vector<OwnedParam>& params, const SumOverRanks& sum_over_ranks) {
  const at::NoGradGuard no_grad;
  double local = 0.0;
  std::vector<at::Tensor> on_device;
  for (const OwnedParam& param : params) {
    const at::Tensor grad = param.primary_grad();
    if (!grad.defined() || grad.numel() == 0) continue;
    if (grad.is_cpu()) {
      local += sum_of_squares_on_cpu(grad);
    } else {
      on_device.push_back(grad);
    }
  }
  local += sum_of_squares_on_device(on_device);
  return std::sqrt(sum_over_ranks(local));
}

double clip_grad_norm(const std::vector<OwnedParam>& params, double max_norm,
                      const SumOverRanks& sum_over_ranks) {
  // Before the collective, but every rank has the same max_norm, so all of them throw.
  TESSERA_CHECK_CONFIG(max_norm > 0.0, "clip_grad_norm: max_norm must be positive, found ",
                       max_norm, ".");
  const double norm = grad_norm(params, sum_over_ranks);
  const double coefficient = max_norm / (norm + 1e-6);
  if (!std::isfinite(norm) || coefficient >= 1.0) return norm;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  for (const OwnedParam& param : params) {
    const at::Tensor grad = param.grad();
    if (grad.defined() && grad.numel() > 0) grads.push_back(grad);
  }
  if (!grads.empty()) at::_foreach_mul_(grads, coefficient);
  return norm;
}

}  // namespace tessera::optim
