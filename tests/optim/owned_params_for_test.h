#ifndef TESTS_OPTIM_OWNED_PARAMS_FOR_TEST_H_
#define TESTS_OPTIM_OWNED_PARAMS_FOR_TEST_H_

// Parameters cut over ranks without an engine, for tests of what sees only OwnedParam.

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "base/math.h"
#include "engine/owned_param.h"

namespace tessera::optim {

inline int64_t numel_of(const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  return numel;
}

// A parameter and its tensor, which an OwnedParam hides.
struct TestParam {
  OwnedParam owned;
  at::Tensor tensor;
};

// The elements [begin, end) of `whole` as a sharded parameter holds them: 1-D, primary.
inline TestParam shard_of(const std::string& name, const at::Tensor& whole, base::Interval part) {
  at::Tensor tensor = whole.flatten().slice(0, part.begin, part.end).clone().requires_grad_(true);
  return {OwnedParam(name, whole.sizes().vec(), part, part, tensor), tensor};
}

// The whole of `whole` as a replicated parameter holds it, of which rank answers for an even part.
inline TestParam replica_of(const std::string& name, const at::Tensor& whole, int64_t ranks,
                            int64_t rank) {
  at::Tensor tensor = whole.clone().requires_grad_(true);
  return {OwnedParam(name, whole.sizes().vec(), {0, whole.numel()},
                     base::even_part(whole.numel(), ranks, rank), tensor),
          tensor};
}

inline TestParam whole_of(const std::string& name, const at::Tensor& whole) {
  return replica_of(name, whole, 1, 0);
}

// Gives the parameter its part of a gradient of the whole.
inline void set_grad(const TestParam& param, const at::Tensor& whole_grad) {
  const base::Interval part = param.owned.elements();
  param.tensor.mutable_grad() =
      whole_grad.flatten().slice(0, part.begin, part.end).clone().view(param.tensor.sizes());
}

inline std::vector<OwnedParam> owned(const std::vector<TestParam>& params) {
  std::vector<OwnedParam> result;
  for (const TestParam& param : params) result.push_back(param.owned);
  return result;
}

// Numbers that a seed fixes, independent of torch's global generator.
inline at::Tensor numbers(const std::vector<int64_t>& shape, uint64_t seed) {
  at::Tensor result = at::empty(shape);
  float* data = result.data_ptr<float>();
  uint64_t state = seed * 2654435761u + 12345u;
  for (int64_t i = 0; i < result.numel(); ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    data[i] = static_cast<float>(static_cast<int64_t>(state >> 40) - (1 << 23)) / (1 << 22);
  }
  return result;
}

// Equal shapes and values.
inline bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || at::equal(a, b));
}

}  // namespace tessera::optim

#endif  // TESTS_OPTIM_OWNED_PARAMS_FOR_TEST_H_
