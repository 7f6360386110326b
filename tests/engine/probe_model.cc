#include "tests/engine/probe_model.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tessera::engine {
namespace {

at::Tensor start_value(std::vector<int64_t> shape, int seed) {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  return (at::sin(at::arange(numel, at::kDouble) * (1.1 + 0.3 * seed) + seed) * 0.6)
      .to(at::kFloat)
      .view(shape);
}

void expect_part(const OwnedParam& param, const at::Tensor& got, const Tensors& whole,
                 const std::string& what, double tolerance) {
  SCOPED_TRACE(what + " of " + param.name());
  const auto found = whole.find(param.name());
  ASSERT_NE(found, whole.end());
  ASSERT_EQ(got.defined(), found->second.defined());
  if (!got.defined()) return;
  const base::Interval part = param.elements();
  const at::Tensor expected = found->second.detach().flatten().slice(0, part.begin, part.end);
  ASSERT_EQ(got.numel(), expected.numel());
  if (expected.numel() == 0) return;
  const double difference = (got - expected).abs().max().item<double>();
  EXPECT_LE(difference, tolerance * found->second.abs().max().item<double>());
}

}  // namespace

ProbeBlockImpl::ProbeBlockImpl(int64_t width, int64_t hidden, int seed)
    : w1_(register_parameter("w1", start_value({hidden, width}, seed))),
      b1_(register_parameter("b1", start_value({hidden}, seed + 1))),
      w2_(register_parameter("w2", start_value({width, hidden}, seed + 2))),
      extra_(register_parameter("extra", start_value({width}, seed + 3))) {}

at::Tensor ProbeBlockImpl::forward(at::Tensor x) {
  const at::Tensor hidden = at::tanh(at::linear(x, w1_, b1_));
  if (inside) inside();
  const at::Tensor y = at::linear(hidden, w2_);
  return use_extra ? y + x * extra_ : y;
}

ProbeModelImpl::ProbeModelImpl() : scale_(register_parameter("scale", start_value({kWidth}, 9))) {
  const int64_t hidden[] = {11, 7, 13};
  for (int i = 0; i < 3; ++i) {
    blocks.push_back(
        register_module("block" + std::to_string(i), ProbeBlock(kWidth, hidden[i], 10 * i)));
  }
}

at::Tensor ProbeModelImpl::forward(at::Tensor x) {
  for (ProbeBlock& block : blocks) x = block(x);
  if (at_end) at_end();
  return x * scale_;
}

at::Tensor input_of(int step, int rank) {
  return start_value({3, ProbeModelImpl::kWidth}, 100 + 10 * step + rank);
}

at::Tensor loss_of(const at::Tensor& output) { return output.square().mean(); }

Tensors gradients_of(const std::function<void(ProbeModel&)>& run) {
  ProbeModel model;
  run(model);
  Tensors grads;
  for (const auto& param : model->named_parameters()) grads[param.key()] = param.value().grad();
  return grads;
}

Tensors mean_over_ranks(int ranks, const std::function<void(ProbeModel&, int)>& run) {
  Tensors sum;
  for (int rank = 0; rank < ranks; ++rank) {
    for (const auto& [name, grad] : gradients_of([&](ProbeModel& model) { run(model, rank); })) {
      at::Tensor& total = sum[name];
      if (grad.defined()) total = total.defined() ? total + grad : grad;
    }
  }
  for (auto& [name, total] : sum) {
    if (total.defined() && ranks > 1) total = total / ranks;
  }
  return sum;
}

Tensors values_of(ProbeModel& model) {
  Tensors values;
  for (const auto& param : model->named_parameters()) {
    values[param.key()] = param.value().detach().clone();
  }
  return values;
}

Policy policy_of(Strategy strategy) {
  Policy policy;
  policy.strategy = strategy;
  policy.units = units_of<ProbeBlock>();
  // A few parameters a bucket.
  policy.bucket_bytes = 300;
  policy.first_bucket_bytes = 100;
  return policy;
}

void expect_at_rest(const Parallel& parallel) {
  for (const auto& unit : parallel.units()) {
    EXPECT_EQ(unit->param_state(), Unit::ParamState::kSharded) << unit->name();
    EXPECT_EQ(unit->grad_state(), Unit::GradState::kIdle) << unit->name();
    EXPECT_FALSE(unit->in_backward()) << unit->name();
  }
}

void expect_grads(const Parallel& parallel, const Tensors& whole, const std::string& what,
                  double tolerance) {
  ASSERT_EQ(parallel.owned_params().size(), whole.size());
  for (const OwnedParam& param : parallel.owned_params()) {
    expect_part(param, param.grad(), whole, "the gradient, " + what + ",", tolerance);
  }
}

void expect_values(const Parallel& parallel, const Tensors& whole, const std::string& what,
                   double tolerance) {
  ASSERT_EQ(parallel.owned_params().size(), whole.size());
  for (const OwnedParam& param : parallel.owned_params()) {
    expect_part(param, param.value().detach(), whole, "the value, " + what + ",", tolerance);
  }
}

void step_and_clear(const Parallel& parallel) {
  const at::NoGradGuard no_grad;
  for (const OwnedParam& param : parallel.owned_params()) {
    if (param.grad().defined()) param.value().sub_(param.grad() * 0.1);
    param.clear_grad();
  }
}

void step_and_clear(ProbeModel& model) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& param : model->parameters()) {
    if (param.grad().defined()) param.sub_(param.grad() * 0.1);
    param.mutable_grad() = at::Tensor();
  }
}

void clear_grads(const Parallel& parallel) {
  for (const OwnedParam& param : parallel.owned_params()) param.clear_grad();
}

}  // namespace tessera::engine
