// Goal: AdamW and SGD give the bits of ATen's fused kernels on whole parameters however these are
// cut, and leave alone what has no gradient. Method: against the kernels themselves, PyTorch's own
// results and LibTorch's optimizers.

#include <ATen/ATen.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>

#include "base/error.h"
#include "optim/adamw.h"
#include "optim/sgd.h"
#include "tests/optim/golden.h"
#include "tests/optim/owned_params_for_test.h"

namespace tessera::optim {
namespace {

constexpr int64_t kSteps = 4;

AdamWOptions adamw_options() {
  AdamWOptions options;
  options.lr = 0.01;
  options.beta2 = 0.95;
  options.weight_decay = 0.1;
  return options;
}

SGDOptions sgd_options(bool nesterov = false) {
  SGDOptions options;
  options.lr = 0.1;
  options.momentum = 0.9;
  options.nesterov = nesterov;
  options.weight_decay = 0.01;
  return options;
}

// kSteps of the kernels on a whole parameter.
at::Tensor adamw_reference(const at::Tensor& start, const AdamWOptions& o, uint64_t seed) {
  at::Tensor value = start.clone();
  at::Tensor exp_avg = at::zeros_like(value);
  at::Tensor exp_avg_sq = at::zeros_like(value);
  at::Tensor step = at::zeros({});
  for (int64_t i = 0; i < kSteps; ++i) {
    step += 1;
    at::_fused_adamw_({value}, {numbers(start.sizes().vec(), seed + i)}, {exp_avg}, {exp_avg_sq},
                      {}, {step}, o.lr, o.beta1, o.beta2, o.weight_decay, o.eps, false, false);
  }
  return value;
}

at::Tensor sgd_reference(const at::Tensor& start, const SGDOptions& o, uint64_t seed) {
  at::Tensor value = start.clone();
  at::Tensor buffer = at::empty_like(value);
  for (int64_t i = 0; i < kSteps; ++i) {
    at::_fused_sgd_({value}, {numbers(start.sizes().vec(), seed + i)}, {buffer}, o.weight_decay,
                    o.momentum, o.lr, 0.0, o.nesterov, false, i == 0);
  }
  return value;
}

// kSteps over slices of one parameter, each with its own optimizer as on a rank of its own; the
// slices put together.
template <typename Optimizer, typename Options>
at::Tensor train_in_slices(const at::Tensor& start, const Options& options,
                           const std::vector<base::Interval>& slices, uint64_t seed) {
  std::vector<at::Tensor> parts;
  for (const base::Interval slice : slices) {
    const TestParam param = shard_of("w", start, slice);
    Optimizer optimizer({param.owned}, options);
    for (int64_t i = 0; i < kSteps; ++i) {
      set_grad(param, numbers(start.sizes().vec(), seed + i));
      optimizer.step();
    }
    parts.push_back(param.tensor.detach());
  }
  return at::cat(parts).view(start.sizes());
}

TEST(AdamW, EveryCutIntoTwoSlicesGivesTheBitsOfTheWhole) {
  // 83: whole vectors and a rest at every SIMD width. With two dimensions, so that weights decay.
  const at::Tensor start = numbers({1, 83}, 1);
  const at::Tensor expected = adamw_reference(start, adamw_options(), 2);
  for (int64_t cut = 0; cut <= 83; ++cut) {
    const at::Tensor got = train_in_slices<AdamW>(start, adamw_options(), {{0, cut}, {cut, 83}}, 2);
    EXPECT_TRUE(same(got, expected)) << "cut at " << cut;
  }
}

TEST(SGD, EveryCutIntoTwoSlicesGivesTheBitsOfTheWhole) {
  const at::Tensor start = numbers({1, 83}, 1);
  for (const bool nesterov : {false, true}) {
    const at::Tensor expected = sgd_reference(start, sgd_options(nesterov), 2);
    for (int64_t cut = 0; cut <= 83; ++cut) {
      const at::Tensor got =
          train_in_slices<SGD>(start, sgd_options(nesterov), {{0, cut}, {cut, 83}}, 2);
      EXPECT_TRUE(same(got, expected)) << "cut at " << cut;
    }
  }
}

TEST(AdamW, EverySizeAndNumberOfRanksGivesTheBitsOfTheWhole) {
  for (int64_t size = 1; size <= 40; ++size) {
    const at::Tensor start = numbers({size, 1}, size);
    const at::Tensor expected = adamw_reference(start, adamw_options(), 7);
    for (int64_t ranks = 1; ranks <= 7; ++ranks) {
      std::vector<base::Interval> slices;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        slices.push_back(base::even_part(size, ranks, rank));
      }
      EXPECT_TRUE(same(train_in_slices<AdamW>(start, adamw_options(), slices, 7), expected))
          << size << " elements, " << ranks << " ranks";
    }
  }
}

// Several parameters a call, of several shapes, one of them empty on this rank.
TEST(AdamW, ManyParametersInOneGroupAreUpdatedEachByItsOwn) {
  const std::vector<std::vector<int64_t>> shapes = {{5, 7}, {64}, {3, 3, 3}, {1, 1}, {}, {40, 40}};
  std::vector<TestParam> params;
  std::vector<at::Tensor> expected;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const at::Tensor start = numbers(shapes[i], i);
    params.push_back(whole_of("p" + std::to_string(i), start));
    AdamWOptions options = adamw_options();
    if (shapes[i].size() < 2) options.weight_decay = 0.0;
    expected.push_back(adamw_reference(start, options, 100 * i));
  }
  params.push_back(shard_of("none_here", numbers({4, 4}, 3), {16, 16}));
  AdamW adamw(owned(params), adamw_options());
  for (int64_t step = 0; step < kSteps; ++step) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      set_grad(params[i], numbers(shapes[i], 100 * i + step));
    }
    set_grad(params.back(), numbers({4, 4}, 5));
    adamw.step();
  }
  for (size_t i = 0; i < shapes.size(); ++i) {
    EXPECT_TRUE(same(params[i].tensor.detach(), expected[i])) << "parameter " << i;
  }
  EXPECT_EQ(adamw.state().count("none_here"), 0u);
}

at::Tensor golden_value() {
  at::Tensor value = at::empty({37});
  for (int64_t i = 0; i < 37; ++i) value[i] = static_cast<float>((i * 7) % 16 - 7.5) / 8;
  return value;
}

at::Tensor golden_grad(int64_t step) {
  at::Tensor grad = at::empty({37});
  for (int64_t i = 0; i < 37; ++i) {
    grad[i] = static_cast<float>((i * 5 + step * 11) % 32 - 15.5) / 16;
  }
  return grad;
}

template <typename Optimizer, typename Options>
double golden_difference(const Options& options, const float (&golden)[37]) {
  const TestParam param = whole_of("w", golden_value());
  Optimizer optimizer({param.owned}, options);
  for (int64_t step = 0; step < 5; ++step) {
    set_grad(param, golden_grad(step));
    optimizer.step();
  }
  const at::Tensor expected = at::from_blob(const_cast<float*>(golden), {37});
  return (param.tensor.detach() - expected).abs().max().item<double>();
}

// The numbers come from another machine, whose SIMD width decides which elements are rounded as
// vectors: they are below 2 in size, so one rounding is at most 2^-24, and the two kinds of code
// differ in at most 8 roundings of a step that reach the value (the update's own terms are smaller
// than the value). 5 steps.
constexpr double kGoldenBound = 5 * 8 * 0x1p-24;

TEST(AdamW, AgreesWithPyTorchFused) {
  AdamWOptions options = adamw_options();
  options.decay_rule = DecayRule::kAll;
  EXPECT_LE(golden_difference<AdamW>(options, golden::kAdamW), kGoldenBound);
}

TEST(SGD, AgreesWithPyTorchFused) {
  SGDOptions options = sgd_options();
  options.decay_rule = DecayRule::kAll;
  EXPECT_LE(golden_difference<SGD>(options, golden::kSgd), kGoldenBound);
  options.momentum = 0.0;
  EXPECT_LE(golden_difference<SGD>(options, golden::kSgdPlain), kGoldenBound);
  options = sgd_options(true);
  options.weight_decay = 0.0;
  EXPECT_LE(golden_difference<SGD>(options, golden::kSgdNesterov), kGoldenBound);
}

// The largest difference between ours and a LibTorch optimizer over 20 steps, values of at most
// about 2.
template <typename Ours, typename OurOptions, typename Theirs, typename TheirOptions>
double difference(OurOptions ours, const TheirOptions& theirs) {
  ours.decay_rule = DecayRule::kAll;
  const at::Tensor start = numbers({83}, 4);
  const TestParam param = whole_of("w", start);
  at::Tensor other = start.clone().requires_grad_(true);
  Ours optimizer({param.owned}, ours);
  Theirs reference({other}, theirs);
  for (int64_t step = 0; step < 20; ++step) {
    set_grad(param, numbers({83}, 50 + step));
    other.mutable_grad() = numbers({83}, 50 + step);
    optimizer.step();
    reference.step();
  }
  return (param.tensor.detach() - other.detach()).abs().max().item<double>();
}

// Both run in single precision and round in other places. Values stay below 4 (start 2, at most 20
// * lr away), so a rounding of the value is at most 2^-23, at most three a step (decay, update,
// sum). The update itself, lr * m / sqrt(v) below 0.02, carries at most 16 roundings of relative
// size 2^-24 from m, v, the corrections, root and quotient: 0.32 * 2^-24 a step.
TEST(AdamW, AgreesWithLibTorch) {
  const auto options =
      torch::optim::AdamWOptions(0.01).betas({0.9, 0.95}).eps(1e-8).weight_decay(0.1);
  const double bound = 20 * (3 * 0x1p-23 + 0.32 * 0x1p-24);
  EXPECT_LE((difference<AdamW, AdamWOptions, torch::optim::AdamW>(adamw_options(), options)),
            bound);
}

// The buffer stays below 20 (gradients of 2, momentum 0.9), so its rounding is at most 2^-20 a step
// and at most 2^-20 / (1 - 0.9) in the buffer at any time, of which the value takes lr = 0.1 a
// step: 2^-20; values stay below 2 + 20 * 0.1 * 20 = 42: two roundings of 2^-19.
TEST(SGD, AgreesWithLibTorch) {
  const double bound = 20 * (0x1p-20 + 2 * 0x1p-19);
  for (const bool nesterov : {false, true}) {
    const auto options =
        torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01).nesterov(nesterov);
    EXPECT_LE((difference<SGD, SGDOptions, torch::optim::SGD>(sgd_options(nesterov), options)),
              bound);
  }
}

TEST(AdamW, WithoutAGradientValueStateAndStepAreUntouched) {
  const TestParam a = whole_of("a", numbers({5, 3}, 1));
  const TestParam b = whole_of("b", numbers({5, 3}, 2));
  AdamW adamw({a.owned, b.owned}, adamw_options());
  set_grad(a, numbers({5, 3}, 3));
  adamw.step();
  EXPECT_TRUE(same(b.tensor.detach(), numbers({5, 3}, 2)));
  EXPECT_EQ(adamw.state().count("b"), 0u) << "state is made at the first gradient";
  EXPECT_EQ(adamw.state_bytes(), 2 * 15 * 4 + 4);

  set_grad(b, numbers({5, 3}, 4));
  adamw.step();
  adamw.step();
  EXPECT_EQ(adamw.state().at("a").at("step").item<float>(), 3.0f);
  EXPECT_EQ(adamw.state().at("b").at("step").item<float>(), 2.0f);

  adamw.zero_grad();
  EXPECT_FALSE(a.tensor.grad().defined());
  const at::Tensor value = a.tensor.detach().clone();
  const at::Tensor exp_avg = adamw.state().at("a").at("exp_avg").clone();
  adamw.step();
  EXPECT_TRUE(same(a.tensor.detach(), value));
  EXPECT_TRUE(same(adamw.state().at("a").at("exp_avg"), exp_avg));
  EXPECT_EQ(adamw.state().at("a").at("step").item<float>(), 3.0f);
}

TEST(SGD, WithoutAGradientValueAndStateAreUntouched) {
  const TestParam a = whole_of("a", numbers({5, 3}, 1));
  SGD sgd({a.owned}, sgd_options());
  sgd.step();
  EXPECT_TRUE(same(a.tensor.detach(), numbers({5, 3}, 1)));
  EXPECT_EQ(sgd.state_bytes(), 0);
  set_grad(a, numbers({5, 3}, 4));
  sgd.step();
  EXPECT_EQ(sgd.state_bytes(), 60);
  sgd.zero_grad();
  const at::Tensor value = a.tensor.detach().clone();
  const at::Tensor buffer = sgd.state().at("a").at("momentum_buffer").clone();
  sgd.step();
  EXPECT_TRUE(same(a.tensor.detach(), value));
  EXPECT_TRUE(same(sgd.state().at("a").at("momentum_buffer"), buffer));
}

TEST(SGD, WithoutMomentumKeepsNoState) {
  SGDOptions options = sgd_options();
  options.momentum = 0.0;
  const TestParam a = whole_of("a", numbers({5, 3}, 1));
  SGD sgd({a.owned}, options);
  set_grad(a, numbers({5, 3}, 4));
  sgd.step();
  EXPECT_EQ(sgd.state_bytes(), 0);
  EXPECT_TRUE(sgd.state().empty());
}

TEST(AdamW, AStepBetweenForwardAndBackwardThrows) {
  // 83 in slices of the middle: padded pieces, too, must count as writes.
  for (const base::Interval part : {base::Interval{0, 83}, base::Interval{0, 16}, {3, 8}}) {
    const TestParam a = shard_of("a", numbers({83}, 1), part);
    AdamW adamw({a.owned}, adamw_options());
    const at::Tensor loss = (a.tensor * a.tensor).sum();
    set_grad(a, numbers({83}, 2));
    adamw.step();
    EXPECT_THROW(loss.backward(), c10::Error);
  }
}

TEST(AdamW, OnlyMatricesDecayUnlessAskedOtherwise) {
  // A slice is 1-D, the rule asks the whole shape.
  const TestParam matrix = shard_of("matrix", numbers({4, 5}, 1), {3, 9});
  const TestParam vector = shard_of("vector", numbers({20}, 1), {3, 9});
  AdamW by_rule({matrix.owned, vector.owned}, adamw_options());
  ASSERT_EQ(by_rule.groups().size(), 2u);
  EXPECT_EQ(by_rule.groups()[0].name, "decay");
  EXPECT_EQ(by_rule.groups()[0].params, std::vector<size_t>{0});
  EXPECT_EQ(by_rule.groups()[0].options.weight_decay, 0.1);
  EXPECT_EQ(by_rule.groups()[1].name, "no_decay");
  EXPECT_EQ(by_rule.groups()[1].params, std::vector<size_t>{1});
  EXPECT_EQ(by_rule.groups()[1].options.weight_decay, 0.0);
  set_grad(matrix, at::zeros({4, 5}));
  set_grad(vector, at::zeros({20}));
  by_rule.step();
  EXPECT_FALSE(same(matrix.tensor.detach(), numbers({20}, 1).slice(0, 3, 9)));
  EXPECT_TRUE(same(vector.tensor.detach(), numbers({20}, 1).slice(0, 3, 9)));

  AdamWOptions options = adamw_options();
  options.decay_rule = DecayRule::kAll;
  AdamW all({matrix.owned, vector.owned}, options);
  ASSERT_EQ(all.groups().size(), 1u);
  EXPECT_EQ(all.groups()[0].params, (std::vector<size_t>{0, 1}));
}

TEST(AdamW, TheRateCanChangeEveryStep) {
  const TestParam a = whole_of("a", numbers({5, 3}, 1));
  AdamW adamw({a.owned}, adamw_options());
  adamw.set_lr(0.0);
  EXPECT_EQ(adamw.lr(), 0.0);
  for (const auto& group : adamw.groups()) EXPECT_EQ(group.options.lr, 0.0);
  set_grad(a, numbers({5, 3}, 2));
  adamw.step();
  EXPECT_TRUE(same(a.tensor.detach(), numbers({5, 3}, 1)));
  adamw.set_lr(0.5);
  adamw.step();
  EXPECT_FALSE(same(a.tensor.detach(), numbers({5, 3}, 1)));
  EXPECT_THROW(adamw.set_lr(-1.0), ConfigError);
}

TEST(AdamW, ContinuesBitEqualFromASavedState) {
  const TestParam a = whole_of("a", numbers({5, 3}, 1));
  AdamW adamw({a.owned}, adamw_options());
  set_grad(a, numbers({5, 3}, 2));
  adamw.step();
  const TestParam b = whole_of("a", a.tensor.detach());
  AdamW resumed({b.owned}, adamw_options());
  resumed.load_state(adamw.state());
  set_grad(a, numbers({5, 3}, 3));
  set_grad(b, numbers({5, 3}, 3));
  adamw.step();
  EXPECT_EQ(resumed.state().at("a").at("step").item<float>(), 1.0f) << "loaded state is a copy";
  resumed.step();
  EXPECT_TRUE(same(a.tensor.detach(), b.tensor.detach()));
  EXPECT_EQ(resumed.state().at("a").at("step").item<float>(), 2.0f);
}

TEST(AdamW, RefusesStateThatDoesNotFit) {
  const TestParam a = whole_of("a", numbers({5, 3}, 1));
  AdamW adamw({a.owned}, adamw_options());
  const at::Tensor good = at::zeros({15});
  const at::Tensor step = at::ones({});
  EXPECT_THROW(adamw.load_state({{"b", {{"exp_avg", good}, {"exp_avg_sq", good}, {"step", step}}}}),
               ConfigError);
  EXPECT_THROW(adamw.load_state({{"a", {{"exp_avg", good}, {"step", step}}}}), ConfigError);
  EXPECT_THROW(adamw.load_state({{"a", {{"exp_avg", good}, {"other", good}, {"step", step}}}}),
               ConfigError);
  EXPECT_THROW(adamw.load_state(
                   {{"a", {{"exp_avg", at::zeros({14})}, {"exp_avg_sq", good}, {"step", step}}}}),
               ConfigError);
  EXPECT_TRUE(adamw.state().empty());
  adamw.load_state({{"a", {{"exp_avg", good}, {"exp_avg_sq", good}, {"step", step}}}});
  EXPECT_EQ(adamw.state().size(), 1u);
}

TEST(Optimizers, RefuseOptionsOutOfRange) {
  const TestParam a = whole_of("a", numbers({5, 3}, 1));
  const auto adamw = [&](auto change) {
    AdamWOptions options;
    change(options);
    AdamW optimizer({a.owned}, options);
  };
  EXPECT_THROW(adamw([](AdamWOptions& o) { o.lr = -1; }), ConfigError);
  EXPECT_THROW(adamw([](AdamWOptions& o) { o.beta1 = 1; }), ConfigError);
  EXPECT_THROW(adamw([](AdamWOptions& o) { o.beta2 = -0.1; }), ConfigError);
  EXPECT_THROW(adamw([](AdamWOptions& o) { o.eps = -1; }), ConfigError);
  EXPECT_THROW(adamw([](AdamWOptions& o) { o.weight_decay = -1; }), ConfigError);
  EXPECT_NO_THROW(adamw([](AdamWOptions&) {}));
  const auto sgd = [&](auto change) {
    SGDOptions options;
    change(options);
    SGD optimizer({a.owned}, options);
  };
  EXPECT_THROW(sgd([](SGDOptions& o) { o.lr = -1; }), ConfigError);
  EXPECT_THROW(sgd([](SGDOptions& o) { o.momentum = -1; }), ConfigError);
  EXPECT_THROW(sgd([](SGDOptions& o) { o.nesterov = true; }), ConfigError);
  EXPECT_THROW(sgd([](SGDOptions& o) { o.weight_decay = -1; }), ConfigError);
  EXPECT_NO_THROW(sgd([](SGDOptions&) {}));
  EXPECT_THROW(SGD({a.owned, a.owned}), ConfigError);
}

}  // namespace
}  // namespace tessera::optim
