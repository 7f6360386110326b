// Goal: the truth is true. Method: the oracle against one backward over all rows of a step, and
// against LibTorch's own optimizers.

#include "tests/harness/alone.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <memory>

namespace tessera::harness {
namespace {

constexpr uint64_t kSeed = 7;

AloneOptions options(int64_t ranks, int64_t micro_batches, SumOrder order) {
  AloneOptions result;
  result.ranks = ranks;
  result.micro_batches = micro_batches;
  result.order = order;
  return result;
}

// The mean of the losses of all ranks and micro-batches, in one graph.
at::Tensor mean_loss(ToyModel& model, int64_t step, int64_t ranks, int64_t micro_batches) {
  at::Tensor sum = at::zeros({});
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (int64_t micro_batch = 0; micro_batch < micro_batches; ++micro_batch) {
      sum = sum + model.loss(model.batch(step, micro_batch, rank));
    }
  }
  return sum / (ranks * micro_batches);
}

TEST(Alone, GradientsAreThoseOfTheMeanOverAllRows) {
  for (const ModelCase& model_case : model_cases()) {
    for (const SumOrder order : {SumOrder::kMicroBatchFirst, SumOrder::kRankFirst}) {
      const auto model = model_case.make(kSeed);
      mean_loss(*model, 0, 3, 2).backward();
      const auto other = model_case.make(kSeed);
      Alone alone(*other, options(3, 2, order));
      const NamedTensors grads = alone.run(0).grads;
      for (const auto& [name, param] : model->parameters()) {
        SCOPED_TRACE(model_case.name + " " + name);
        const auto found = grads.find(name);
        const bool defined = found != grads.end() && found->second.defined();
        ASSERT_EQ(param.grad().defined(), defined);
        if (!defined) continue;
        // Six summands of at most G, in another order and scaled at another time: fewer than 16
        // roundings of numbers of at most G = 6 * the largest summand; summands stay below 4 in all
        // models (asserted).
        ASSERT_LT(found->second.abs().max().item<double>(), 4.0);
        const double difference = (param.grad() - found->second).abs().max().item<double>();
        EXPECT_LE(difference, 16 * 24 * 0x1p-24);
      }
    }
  }
}

TEST(Alone, WithOneRankAndOneMicroBatchIsOneBackward) {
  for (const ModelCase& model_case : model_cases()) {
    const auto model = model_case.make(kSeed);
    model->loss(model->batch(0, 0, 0)).backward();
    const auto other = model_case.make(kSeed);
    NamedTensors grads = Alone(*other, options(1, 1, SumOrder::kRankFirst)).run(0).grads;
    for (const auto& [name, param] : model->parameters()) {
      SCOPED_TRACE(model_case.name + " " + name);
      ASSERT_EQ(param.grad().defined(), grads[name].defined());
      if (param.grad().defined()) {
        EXPECT_TRUE(at::equal(param.grad(), grads[name]));
      }
    }
  }
}

TEST(Alone, OrdersDifferByRoundingOnly) {
  const auto a = model_case("mlp").make(kSeed);
  const auto b = model_case("mlp").make(kSeed);
  const NamedTensors x = Alone(*a, options(3, 3, SumOrder::kMicroBatchFirst)).run(0).grads;
  const NamedTensors y = Alone(*b, options(3, 3, SumOrder::kRankFirst)).run(0).grads;
  bool differ = false;
  for (const auto& [name, grad] : x) {
    // The bound of alone.h with W = M = 3 and gradients of a rank and micro-batch of at most 4.
    EXPECT_LE((grad - y.at(name)).abs().max().item<double>(), 2 * 11 * 0x1p-24 * 3 * 4) << name;
    differ = differ || !at::equal(grad, y.at(name));
  }
  EXPECT_TRUE(differ) << "the order of sums is not tested by these numbers";
}

// LibTorch's optimizers round in other places: single precision, values below 4, 3 steps with fewer
// than 16 roundings of numbers below 4 each, and an AdamW update of up to lr whose relative error
// is below 2^-18 as long as gradients differ in their last bits only.
constexpr double kUpdateBound = 3 * (16 * 0x1p-22 + 0.05 * 0x1p-18);

double difference_from_libtorch(Update update) {
  const auto model = model_case("mlp").make(kSeed);
  AloneOptions o = options(1, 1, SumOrder::kRankFirst);
  o.update = update;
  o.max_norm = 0.05;
  o.weight_decay = 0.0;
  Alone alone(*model, o);
  const auto other = model_case("mlp").make(kSeed);
  std::vector<at::Tensor> params;
  for (const auto& [name, param] : other->parameters()) params.push_back(param);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (update == Update::kSgd) {
    optimizer = std::make_unique<torch::optim::SGD>(
        params, torch::optim::SGDOptions(o.lr).momentum(o.momentum));
  } else {
    optimizer = std::make_unique<torch::optim::AdamW>(
        params, torch::optim::AdamWOptions(o.lr).weight_decay(0.0));
  }
  for (int64_t step = 0; step < 3; ++step) {
    EXPECT_GT(alone.run(step).norm, o.max_norm);
    optimizer->zero_grad();
    other->loss(other->batch(step, 0, 0)).backward();
    torch::nn::utils::clip_grad_norm_(params, o.max_norm);
    optimizer->step();
  }
  double largest = 0.0;
  NamedTensors trained = alone.params();
  for (const auto& [name, param] : other->parameters()) {
    EXPECT_LT(param.abs().max().item<double>(), 4.0) << name;
    largest = std::max(largest, (param - trained[name]).abs().max().item<double>());
  }
  return largest;
}

TEST(Alone, UpdatesAndClipsAsLibTorch) {
  EXPECT_LE(difference_from_libtorch(Update::kSgd), kUpdateBound);
  EXPECT_LE(difference_from_libtorch(Update::kAdamW), kUpdateBound);
}

TEST(Alone, InBf16KeepsMastersAndGradientsInFp32) {
  const auto model = model_case("mlp").make(kSeed);
  const auto in_fp32 = model_case("mlp").make(kSeed);
  AloneOptions o = options(2, 2, SumOrder::kRankFirst);
  const NamedTensors exact = Alone(*in_fp32, o).run(0).grads;
  o.bf16 = true;
  const NamedTensors grads = Alone(*model, o).run(0).grads;
  bool differ = false;
  for (const auto& [name, param] : model->parameters()) {
    EXPECT_EQ(param.scalar_type(), at::kFloat) << name;
    EXPECT_EQ(grads.at(name).scalar_type(), at::kFloat) << name;
    differ = differ || !at::equal(grads.at(name), exact.at(name));
  }
  EXPECT_TRUE(differ) << "the forward did not run in bf16";
}

TEST(ToyModels, ASeedFixesTheStartAndBatchesAreFixedByTheirPlace) {
  for (const ModelCase& model_case : model_cases()) {
    const auto a = model_case.make(kSeed);
    const auto b = model_case.make(kSeed);
    const auto c = model_case.make(kSeed + 1);
    bool seeds_differ = false;
    for (size_t i = 0; i < a->parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(a->parameters()[i].second, b->parameters()[i].second));
      seeds_differ =
          seeds_differ || !at::equal(a->parameters()[i].second, c->parameters()[i].second);
    }
    EXPECT_TRUE(seeds_differ);
    EXPECT_TRUE(at::equal(a->batch(1, 2, 3).input, b->batch(1, 2, 3).input));
    EXPECT_FALSE(at::equal(a->batch(1, 2, 3).input, a->batch(1, 2, 2).input));
    EXPECT_FALSE(at::equal(a->batch(1, 2, 3).input, a->batch(1, 1, 3).input));
    EXPECT_FALSE(at::equal(a->batch(1, 2, 3).input, a->batch(0, 2, 3).input));
  }
}

TEST(ToyModels, TiedParametersAreListedOnce) {
  const auto tied = model_case("tied").make(kSeed);
  EXPECT_EQ(tied->root()->named_parameters().size(), tied->parameters().size() + 1);
}

}  // namespace
}  // namespace tessera::harness
