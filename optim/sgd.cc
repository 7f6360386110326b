#include "optim/sgd.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <utility>

#include "base/error.h"
#include "optim/fused_lists.h"

namespace tessera::optim {
namespace {

constexpr char kMomentumBuffer[] = "momentum_buffer";

void check_lr(double lr) {
  TESSERA_CHECK_CONFIG(std::isfinite(lr) && lr >= 0.0, "SGD: lr must be finite and not negative",
                       ", found ", lr, ".");
}

void check_options(const SGDOptions& options) {
  check_lr(options.lr);
  TESSERA_CHECK_CONFIG(options.momentum >= 0.0, "SGD: momentum must not be negative, found ",
                       options.momentum, ".");
  TESSERA_CHECK_CONFIG(!options.nesterov || options.momentum > 0.0,
                       "SGD: nesterov needs a momentum above 0, found ", options.momentum, ".");
  TESSERA_CHECK_CONFIG(options.weight_decay >= 0.0, "SGD: weight_decay must not be negative",
                       ", found ", options.weight_decay, ".");
}

}  // namespace

SGD::SGD(std::vector<OwnedParam> params, SGDOptions options)
    : params_(std::move(params)), groups_(make_groups(params_, options)), state_(params_.size()) {
  check_options(options);
  check_names("SGD", params_);
}

void SGD::step() {
  const at::NoGradGuard no_grad;
  for (const ParamGroup<SGDOptions>& group : groups_) step_group(group);
}

void SGD::step_group(const ParamGroup<SGDOptions>& group) {
  const SGDOptions& options = group.options;
  const bool has_momentum = options.momentum > 0.0;
  FusedLists lists(has_momentum ? 3 : 2);
  for (const size_t index : group.params) {
    const OwnedParam& param = params_[index];
    const at::Tensor grad = param.grad();
    if (!grad.defined() || param.elements().empty()) continue;
    const at::Tensor value = param.value();
    if (!has_momentum) {
      lists.add(param, {value, grad});
      continue;
    }
    ParamState& state = state_[index];
    if (state.empty()) state[kMomentumBuffer] = at::zeros_like(value).requires_grad_(false);
    lists.add(param, {value, grad, state[kMomentumBuffer]});
  }
  if (lists.empty()) return;
  // Without dampening a buffer of zeros gives at its first step what is_first_step gives: m = 0 +
  // g. So parameters with their first gradient and others can share the call.
  at::_fused_sgd_(lists.list(0), lists.list(1),
                  has_momentum ? lists.list(2) : std::vector<at::Tensor>(), options.weight_decay,
                  options.momentum, options.lr, /*dampening=*/0.0, options.nesterov,
                  /*maximize=*/false, /*is_first_step=*/false);
  lists.finish();
}

void SGD::zero_grad() {
  for (const OwnedParam& param : params_) param.clear_grad();
}

void SGD::set_lr(double lr) {
  check_lr(lr);
  for (ParamGroup<SGDOptions>& group : groups_) group.options.lr = lr;
}

void SGD::load_state(const OptimizerState& state) {
  const bool has_momentum = groups_[0].options.momentum > 0.0;
  state_ = checked_state(
      params_, state,
      has_momentum ? std::vector<std::string>{kMomentumBuffer} : std::vector<std::string>{}, "");
}

}  // namespace tessera::optim
