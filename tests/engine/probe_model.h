#ifndef TESTS_ENGINE_PROBE_MODEL_H_
#define TESTS_ENGINE_PROBE_MODEL_H_

// A model of three blocks that a test can look out of and steer: from inside a block's forward it
// sees the units' states, throws, or leaves a parameter unused. And what LibTorch alone computes
// with it, as the truth.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engine/module_hook.h"
#include "train/parallelize.h"

namespace tessera::engine {

// tanh(x W^T + b), + x * extra where use_extra says so. Widths are prime or odd.
class ProbeBlockImpl : public torch::nn::Module {
 public:
  explicit ProbeBlockImpl(int64_t width, int64_t hidden, int seed);
  at::Tensor forward(at::Tensor x);

  std::function<void()> inside;  // called in the middle of forward
  bool use_extra = true;

 private:
  at::Tensor w1_, b1_, w2_, extra_;
};
TESSERA_MODULE(ProbeBlock);

// Input and output are [rows, kWidth], so that it can be applied to its own output. Start values
// are fixed, without a generator, so that ranks may make it at the same time.
class ProbeModelImpl : public torch::nn::Module {
 public:
  static constexpr int64_t kWidth = 5;

  ProbeModelImpl();
  at::Tensor forward(at::Tensor x);

  std::vector<ProbeBlock> blocks;
  std::function<void()> at_end;  // called before the root's forward returns

 private:
  at::Tensor scale_;
};
TESSERA_MODULE(ProbeModel);

// Gradients and values, by parameter name; undefined where there is none.
using Tensors = std::map<std::string, at::Tensor>;

// Differs by step and rank.
at::Tensor input_of(int step, int rank);
// A scalar that depends on every element.
at::Tensor loss_of(const at::Tensor& output);

// The gradients that `run` leaves in a fresh model of one process.
Tensors gradients_of(const std::function<void(ProbeModel&)>& run);
// The mean over ranks of gradients_of(run with that rank), summed in rank order; undefined where
// all are.
Tensors mean_over_ranks(int ranks, const std::function<void(ProbeModel&, int rank)>& run);

Tensors values_of(ProbeModel& model);

Policy policy_of(Strategy strategy);

// Every unit is sharded and idle, and outside a backward.
void expect_at_rest(const Parallel& parallel);

// EXPECTs that what this rank owns is its part of `whole`: to the bit, or within `tolerance` of the
// largest element where that is above 0.
void expect_grads(const Parallel& parallel, const Tensors& whole, const std::string& what,
                  double tolerance = 0.0);
void expect_values(const Parallel& parallel, const Tensors& whole, const std::string& what,
                   double tolerance = 0.0);

// value -= 0.1 * grad where there is one, and no gradient afterwards; with a parallel model and
// alone.
void step_and_clear(const Parallel& parallel);
void step_and_clear(ProbeModel& model);
void clear_grads(const Parallel& parallel);

}  // namespace tessera::engine

#endif  // TESTS_ENGINE_PROBE_MODEL_H_
