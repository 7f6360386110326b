#include "engine/unit.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "base/error.h"

namespace tessera::engine {

using torch::autograd::Variable;

// Tells the unit that autograd has accumulated into a parameter's .grad.
struct GradHook : torch::autograd::PostAccumulateGradHook {
  GradHook(Unit* owner, size_t param) : unit(owner), index(param) {}
  void operator()(const Variable&) override { unit->on_grad(index); }
  Unit* unit;
  size_t index;
};

namespace {

// Masters of other dtypes than fp32 are the user's own choice and are left as they are.
at::ScalarType cast_of(at::ScalarType master, at::ScalarType wanted) {
  return master == at::kFloat ? wanted : master;
}

}  // namespace

Unit::Unit(std::string name, std::vector<UnitParam> params, UnitContext context)
    : name_(std::move(name)), params_(std::move(params)), context_(std::move(context)) {
  TESSERA_CHECK(!params_.empty(), "unit '", name_, "' has no parameters.");
  trainable_ = params_[0].tensor.requires_grad();
  master_dtype_ = params_[0].tensor.scalar_type();
  compute_dtype_ = cast_of(master_dtype_, context_.precision.param_dtype);
  // fp32 gradients may travel narrower; those of narrower masters are widened, never the other way
  // round.
  reduce_dtype_ = master_dtype_ == at::kFloat
                      ? context_.precision.reduce_dtype
                      : c10::promoteTypes(master_dtype_, context_.precision.reduce_dtype);
  for (const UnitParam& p : params_) numels_.push_back(p.tensor.numel());
  seen_.assign(params_.size(), 0);
}

Unit::~Unit() {
  for (size_t i = 0; i < accumulators_.size(); ++i) {
    torch::autograd::impl::set_post_acc_grad_hooks(params_[i].tensor, nullptr);
  }
}

void Unit::install_grad_hooks() {
  if (!trainable_) return;
  for (size_t i = 0; i < params_.size(); ++i) {
    accumulators_.push_back(torch::autograd::impl::grad_accumulator(param(i)));
    torch::autograd::impl::set_post_acc_grad_hooks(param(i), std::make_unique<GradHook>(this, i));
  }
}

void Unit::swap_params(const std::vector<at::Tensor>& to, bool full) {
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].tensor.set_data(to[i]);
    if (full && !accumulators_.empty() && compute_dtype_ != master_dtype_) {
      torch::autograd::impl::set_grad_accumulator(param(i), accumulators_[i]);
    }
  }
}

void Unit::unshard() {
  TESSERA_CHECK(param_state_ == ParamState::kSharded, "unshard of unit '", name_, "' in state ",
                to_string(param_state_), ".");
  check_untouched();
  do_unshard();
  param_state_ = ParamState::kGathering;
}

void Unit::check_untouched() const {
  for (size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor& owned = owned_value(i);
    TESSERA_CHECK_CONFIG(
        param(i).scalar_type() == owned.scalar_type() && param(i).numel() == owned.numel() &&
            (owned.numel() == 0 || param(i).const_data_ptr() == owned.const_data_ptr()),
        "the data of parameter '", params_[i].name,
        "' was replaced after parallelize() (by torch::load, to() or set_data), and would be lost. "
        "Load and "
        "convert the model before parallelize(), or copy values into OwnedParam::value().");
    TESSERA_CHECK_CONFIG(
        param(i).requires_grad() == trainable_, "parameter '", params_[i].name, "' was ",
        trainable_ ? "frozen" : "unfrozen",
        " after parallelize(). Set requires_grad before it, and call it again to change it.");
  }
}

void Unit::wait_unshard() {
  TESSERA_CHECK(param_state_ == ParamState::kGathering, "wait_unshard of unit '", name_,
                "' in state ", to_string(param_state_), ".");
  do_wait_unshard();
  param_state_ = ParamState::kReady;
}

void Unit::reshard() {
  if (param_state_ == ParamState::kSharded) return;
  if (param_state_ == ParamState::kGathering) wait_unshard();
  do_reshard();
  param_state_ = ParamState::kSharded;
}

void Unit::begin_backward() {
  TESSERA_CHECK(trainable_ && param_state_ == ParamState::kReady && !in_backward_,
                "begin_backward of unit '", name_, "' in state ", to_string(param_state_), ".");
  in_backward_ = true;
  seen_.assign(params_.size(), 0);
  missing_grads_ = params_.size();
  do_begin_backward();
}

void Unit::on_grad(size_t i) {
  // The hook can also be the first sign of a backward; the listener's schedule then begins it.
  // What autograd has just accumulated is of this backward: begin_backward must not take it for an
  // older gradient.
  if (!in_backward_ && listener_) {
    at::Tensor grad;
    std::swap(grad, param(i).mutable_grad());
    listener_(*this);
    param(i).mutable_grad() = std::move(grad);
  }
  TESSERA_CHECK(in_backward_, "a gradient of parameter '", params_[i].name,
                "' arrived outside a backward of unit '", name_, "'.");
  TESSERA_CHECK_CONFIG(
      param(i).grad().layout() == at::kStrided, "the gradient of parameter '", params_[i].name,
      "' is sparse: not supported. Use a dense gradient (EmbeddingOptions::sparse(false)).");
  const bool again = grad_seen(i);
  do_take_grad(i, again);
  if (!again) {
    seen_[i] = 1;
    --missing_grads_;
  }
  if (listener_) listener_(*this);
}

void Unit::reduce_grads() {
  TESSERA_CHECK(grad_state_ == GradState::kIdle && in_backward_, "reduce_grads of unit '", name_,
                "' while its gradients are being reduced, or outside a backward.");
  do_reduce_grads();
  grad_state_ = GradState::kReducing;
}

void Unit::wait_grads() {
  TESSERA_CHECK(grad_state_ == GradState::kReducing, "wait_grads of unit '", name_,
                "', whose gradients are not being reduced.");
  grad_state_ = GradState::kIdle;  // Also when the wait throws: there is nothing left to wait for.
  do_wait_grads();
}

void Unit::append_used(std::vector<uint8_t>& flags) const {
  for (size_t i = 0; i < params_.size(); ++i) flags.push_back(do_used(i) ? 1 : 0);
}

void Unit::publish(const uint8_t* used) {
  TESSERA_CHECK(
      grad_state_ == GradState::kIdle && param_state_ == ParamState::kSharded && in_backward_,
      "publish of unit '", name_, "' in state ", to_string(param_state_), ".");
  for (size_t i = 0; i < params_.size(); ++i) do_publish(i, used[i] != 0);
  in_backward_ = false;
}

void Unit::abandon_backward() {
  if (!trainable_) return;
  do_abandon_backward();
  for (size_t i = 0; i < params_.size(); ++i) param(i).mutable_grad() = at::Tensor();
  in_backward_ = false;
}

const char* to_string(Unit::ParamState state) {
  switch (state) {
    case Unit::ParamState::kSharded:
      return "kSharded";
    case Unit::ParamState::kGathering:
      return "kGathering";
    case Unit::ParamState::kReady:
      return "kReady";
  }
  return "?";
}

}  // namespace tessera::engine
