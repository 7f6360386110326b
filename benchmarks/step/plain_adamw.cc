#include "benchmarks/step/plain_adamw.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "base/error.h"

namespace tessera::benchmarks {

// The defaults of torch.optim.AdamW and the epsilon of clip_grad_norm_.
constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.999;
constexpr double kEps = 1e-8;
constexpr double kWeightDecay = 0.01;
constexpr double kClipEps = 1e-6;

PlainAdamW::PlainAdamW(std::vector<at::Tensor> params, double lr)
    : lr_(lr), params_(std::move(params)) {
  for (const at::Tensor& param : params_) {
    exp_avgs_.push_back(at::zeros_like(param).detach());
    exp_avg_sqs_.push_back(at::zeros_like(param).detach());
    steps_.push_back(at::zeros({}, at::kFloat));
  }
}

at::Tensor PlainAdamW::clip_grad_norm(double max_norm) {
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> all = grads();
  const at::Tensor norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(all, 2)), 2);
  at::_foreach_mul_(all, (max_norm / (norm + kClipEps)).clamp_max(1.0));
  return norm;
}

void PlainAdamW::step() {
  const at::NoGradGuard no_grad;
  at::_foreach_add_(steps_, 1);
  at::_fused_adamw_(params_, grads(), exp_avgs_, exp_avg_sqs_, /*max_exp_avg_sqs=*/{}, steps_, lr_,
                    kBeta1, kBeta2, kWeightDecay, kEps, /*amsgrad=*/false, /*maximize=*/false);
}

void PlainAdamW::zero_grad() {
  for (at::Tensor& param : params_) param.mutable_grad().reset();
}

std::vector<at::Tensor> PlainAdamW::grads() const {
  std::vector<at::Tensor> all;
  for (const at::Tensor& param : params_) {
    TESSERA_CHECK(param.grad().defined(), "A parameter of shape ", param.sizes(),
                  " has no gradient.");
    all.push_back(param.grad());
  }
  return all;
}

}  // namespace tessera::benchmarks
