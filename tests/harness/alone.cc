#include "tests/harness/alone.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

namespace tessera::harness {
namespace {

// sum += more, where an undefined tensor stands for zeros that nobody added.
void add(NamedTensors& sum, const NamedTensors& more) {
  for (const auto& [name, tensor] : more) {
    if (!tensor.defined()) continue;
    at::Tensor& target = sum[name];
    target = target.defined() ? target + tensor : tensor;
  }
}

void divide(NamedTensors& tensors, int64_t by) {
  for (auto& [name, tensor] : tensors) {
    if (tensor.defined()) tensor = tensor / by;
  }
}

at::Tensor to_bf16(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_floating_point() ? tensor.to(at::kBFloat16) : tensor;
}

}  // namespace

Alone::Alone(ToyModel& model, const AloneOptions& options) : model_(model), options_(options) {
  at::set_num_threads(1);  // as the ranks it is compared with
}

Alone::Step Alone::run(int64_t step) {
  Step result;
  result.grads = gradients(step);
  const at::NoGradGuard no_grad;
  if (options_.max_norm > 0.0) result.norm = clip(result.grads);
  for (const auto& [name, param] : model_.parameters()) {
    const at::Tensor& grad = result.grads[name];
    if (grad.defined()) update(name, param, grad);
  }
  return result;
}

NamedTensors Alone::params() {
  NamedTensors result;
  for (const auto& [name, param] : model_.parameters()) result[name] = param.detach().clone();
  return result;
}

NamedTensors Alone::gradients(int64_t step) {
  return options_.order == SumOrder::kMicroBatchFirst ? sum_micro_batch_first(step)
                                                      : sum_rank_first(step);
}

NamedTensors Alone::sum_micro_batch_first(int64_t step) {
  NamedTensors sum;
  for (int64_t rank = 0; rank < options_.ranks; ++rank) {
    NamedTensors of_rank;
    for (int64_t micro_batch = 0; micro_batch < options_.micro_batches; ++micro_batch) {
      add(of_rank, gradients_of(model_.batch(step, micro_batch, rank)));
    }
    add(sum, of_rank);
  }
  divide(sum, options_.ranks);
  return sum;
}

NamedTensors Alone::sum_rank_first(int64_t step) {
  NamedTensors sum;
  for (int64_t micro_batch = 0; micro_batch < options_.micro_batches; ++micro_batch) {
    NamedTensors of_micro_batch;
    for (int64_t rank = 0; rank < options_.ranks; ++rank) {
      add(of_micro_batch, gradients_of(model_.batch(step, micro_batch, rank)));
    }
    divide(of_micro_batch, options_.ranks);
    add(sum, of_micro_batch);
  }
  return sum;
}

// In fp32 whatever the forward ran in.
NamedTensors Alone::gradients_of(const Batch& batch) {
  auto params = model_.parameters();
  NamedTensors masters;
  if (options_.bf16) {
    for (auto& [name, param] : params) {
      masters[name] = param.detach();
      param.set_data(param.detach().to(at::kBFloat16));
    }
  }
  const Batch cast = options_.bf16 ? Batch{to_bf16(batch.input), batch.target, batch.flag} : batch;
  (model_.loss(cast) / options_.micro_batches).backward();
  NamedTensors grads;
  for (auto& [name, param] : params) {
    if (param.grad().defined()) grads[name] = param.grad().to(at::kFloat);
    param.mutable_grad() = at::Tensor();
    if (options_.bf16) param.set_data(masters[name]);
  }
  return grads;
}

double Alone::clip(NamedTensors& grads) {
  double sum = 0.0;
  for (const auto& [name, grad] : grads) {
    if (grad.defined()) sum += grad.to(at::kDouble).square().sum().item<double>();
  }
  const double norm = std::sqrt(sum);
  const double coefficient = options_.max_norm / (norm + 1e-6);
  if (std::isfinite(norm) && coefficient < 1.0) {
    for (auto& [name, grad] : grads) {
      if (grad.defined()) grad = grad * coefficient;
    }
  }
  return norm;
}

void Alone::update(const std::string& name, at::Tensor param, const at::Tensor& grad) {
  const double weight_decay = param.dim() >= 2 ? options_.weight_decay : 0.0;
  std::vector<at::Tensor>& state = state_[name];
  const bool is_first = state.empty();
  if (options_.update == Update::kSgd) {
    if (is_first) state = {at::empty_like(param.detach())};
    at::_fused_sgd_({param}, {grad}, {state[0]}, weight_decay, options_.momentum, options_.lr,
                    /*dampening=*/0.0, /*nesterov=*/false, /*maximize=*/false, is_first);
    return;
  }
  if (is_first) {
    state = {at::zeros_like(param.detach()), at::zeros_like(param.detach())};
    step_counts_[name] = at::zeros({});
  }
  step_counts_[name] += 1;
  at::_fused_adamw_({param}, {grad}, {state[0]}, {state[1]}, {}, {step_counts_[name]}, options_.lr,
                    /*beta1=*/0.9, /*beta2=*/0.999, weight_decay, /*eps=*/1e-8, /*amsgrad=*/false,
                    /*maximize=*/false);
}

}  // namespace tessera::harness
