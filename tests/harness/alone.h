#ifndef TESTS_HARNESS_ALONE_H_
#define TESTS_HARNESS_ALONE_H_

// The truth of the equivalence suite: training in one thread with LibTorch alone, without a line of
// Tessera's engine, clipping or optimizers. It plays all ranks one after the other.
//
// The gradient of a step over W ranks and M micro-batches is
//
//   mean over ranks of ( sum over micro-batches of ( gradient of loss / M ) )
//
// Single precision is not associative, so the order of the sums is part of the truth. Ranks are
// summed in rank order, ((g0 + g1) + g2) + g3, and the sum is divided by W; which sum is inside
// depends on the strategy:
//
//   kMicroBatchFirst   replicated: a rank sums its micro-batches, then ranks are summed once
//   kRankFirst         sharded: ranks are summed for each micro-batch, then micro-batches
//
// In its own order a strategy must agree to the bit. In the other order, with gradients of size at
// most G per rank and micro-batch, both sums have W * M - 1 additions and at most M divisions by W,
// each with a relative error of at most u = 2^-24 on partial sums of at most M * G after the
// division: they differ by at most 2 * (W * M - 1 + M) * u * M * G.

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "tests/harness/toy_models.h"

namespace tessera::harness {

enum class SumOrder { kMicroBatchFirst, kRankFirst };
enum class Update { kSgd, kAdamW };

// By parameter name, in the shape of the whole parameter.
using NamedTensors = std::map<std::string, at::Tensor>;

struct AloneOptions {
  int64_t ranks = 1;
  int64_t micro_batches = 1;
  SumOrder order = SumOrder::kMicroBatchFirst;
  bool bf16 = false;      // forward and backward in bf16, everything else in fp32
  double max_norm = 0.0;  // 0: no clipping
  Update update = Update::kSgd;
  double lr = 0.05;
  double momentum = 0.9;      // of SGD
  double weight_decay = 0.1;  // of parameters with two dimensions or more
};

class Alone {
 public:
  // Trains `model`, which must outlive this.
  Alone(ToyModel& model, const AloneOptions& options);

  struct Step {
    NamedTensors grads;  // clipped; undefined where no rank and no micro-batch had a gradient
    double norm = 0.0;   // before clipping; 0 without clipping
  };

  // Runs step `step` (which fixes the batches), gradients and update.
  Step run(int64_t step);

  // Copies of the parameters as they are now.
  NamedTensors params();

 private:
  NamedTensors gradients(int64_t step);
  NamedTensors gradients_of(const Batch& batch);
  NamedTensors sum_micro_batch_first(int64_t step);
  NamedTensors sum_rank_first(int64_t step);
  double clip(NamedTensors& grads);
  void update(const std::string& name, at::Tensor param, const at::Tensor& grad);

  ToyModel& model_;
  AloneOptions options_;
  // Of the optimizers, by parameter name, from the first gradient on: exp_avg and exp_avg_sq, or
  // the momentum buffer.
  std::map<std::string, std::vector<at::Tensor>> state_;
  std::map<std::string, at::Tensor> step_counts_;
};

}  // namespace tessera::harness

#endif  // TESTS_HARNESS_ALONE_H_
