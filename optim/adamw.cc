#include "optim/adamw.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <utility>

#include "base/error.h"
#include "optim/fused_lists.h"

namespace tessera::optim {
namespace {

constexpr char kExpAvg[] = "exp_avg";
constexpr char kExpAvgSq[] = "exp_avg_sq";
constexpr char kStep[] = "step";

void check_lr(double lr) {
  TESSERA_CHECK_CONFIG(std::isfinite(lr) && lr >= 0.0, "AdamW: lr must be finite and not negative",
                       ", found ", lr, ".");
}

void check_options(const AdamWOptions& options) {
  check_lr(options.lr);
  TESSERA_CHECK_CONFIG(options.beta1 >= 0.0 && options.beta1 < 1.0,
                       "AdamW: beta1 must be in [0, 1), found ", options.beta1, ".");
  TESSERA_CHECK_CONFIG(options.beta2 >= 0.0 && options.beta2 < 1.0,
                       "AdamW: beta2 must be in [0, 1), found ", options.beta2, ".");
  TESSERA_CHECK_CONFIG(options.eps >= 0.0, "AdamW: eps must not be negative, found ", options.eps,
                       ".");
  TESSERA_CHECK_CONFIG(options.weight_decay >= 0.0, "AdamW: weight_decay must not be negative",
                       ", found ", options.weight_decay, ".");
}

ParamState new_state(const at::Tensor& value) {
  return {{kExpAvg, at::zeros_like(value).requires_grad_(false)},
          {kExpAvgSq, at::zeros_like(value).requires_grad_(false)},
          {kStep, at::zeros({}, value.options().dtype(at::kFloat).requires_grad(false))}};
}

}  // namespace

AdamW::AdamW(std::vector<OwnedParam> params, AdamWOptions options)
    : params_(std::move(params)), groups_(make_groups(params_, options)), state_(params_.size()) {
  check_options(options);
  check_names("AdamW", params_);
}

void AdamW::step() {
  const at::NoGradGuard no_grad;
  for (const ParamGroup<AdamWOptions>& group : groups_) step_group(group);
}

void AdamW::step_group(const ParamGroup<AdamWOptions>& group) {
  FusedLists lists(4);
  std::vector<at::Tensor> steps;            // of parameters
  std::vector<at::Tensor> steps_of_pieces;  // the same, once a piece
  for (const size_t index : group.params) {
    const OwnedParam& param = params_[index];
    const at::Tensor grad = param.grad();
    if (!grad.defined() || param.elements().empty()) continue;
    const at::Tensor value = param.value();
    ParamState& state = state_[index];
    if (state.empty()) state = new_state(value);
    const int64_t pieces = lists.add(param, {value, grad, state[kExpAvg], state[kExpAvgSq]});
    steps.push_back(state[kStep]);
    steps_of_pieces.insert(steps_of_pieces.end(), pieces, state[kStep]);
  }
  if (lists.empty()) return;
  at::_foreach_add_(steps, 1);
  const AdamWOptions& options = group.options;
  at::_fused_adamw_(lists.list(0), lists.list(1), lists.list(2), lists.list(3), {}, steps_of_pieces,
                    options.lr, options.beta1, options.beta2, options.weight_decay, options.eps,
                    /*amsgrad=*/false, /*maximize=*/false);
  lists.finish();
}

void AdamW::zero_grad() {
  for (const OwnedParam& param : params_) param.clear_grad();
}

void AdamW::set_lr(double lr) {
  check_lr(lr);
  for (ParamGroup<AdamWOptions>& group : groups_) group.options.lr = lr;
}

void AdamW::load_state(const OptimizerState& state) {
  state_ = checked_state(params_, state, {kExpAvg, kExpAvgSq, kStep}, kStep);
}

}  // namespace tessera::optim
