#include "engine/site.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>

#include "base/error.h"
#include "engine/schedule.h"

namespace tessera::engine {

void Site::before_forward() {
  open_calls.push_back(std::make_shared<Call>(Call{this}));
  try {
    owner->before_forward(*this);
  } catch (...) {
    open_calls.pop_back();
    throw;
  }
}

void Site::after_forward(const std::vector<at::Tensor>& outputs) {
  owner->after_forward(*this, outputs);
  open_calls.pop_back();
}

void Site::check_whole(const char* call) const {
  TESSERA_CHECK_CONFIG(!owner->shards(), call, " of ", is_root ? "the model" : "'" + name + "'",
                       ", whose parameters are sharded: this rank has slices of them. Save each "
                       "rank's OwnedParam::primary_value() with its name and interval.");
}

void Site::forward_failed() noexcept {
  open_calls.pop_back();
  owner->forward_failed(*this);
}

at::Tensor Site::input(const at::Tensor& argument) {
  if (!argument.defined()) return argument;
  at::Tensor input = argument;
  if (cast_to && input.is_floating_point()) input = input.to(*cast_to);
  if (!at::GradMode::is_enabled() || !input.requires_grad() || owner->computing_backward())
    return input;
  if (input.is_same(argument)) input = at::alias(argument);
  const std::shared_ptr<Call>& call = open_calls.back();
  call->has_aliases = true;
  input.register_hook([weak = owner->weak_from_this(), call](const at::Tensor&) {
    if (const std::shared_ptr<Schedule> schedule = weak.lock()) schedule->on_input_grad(*call);
  });
  return input;
}

}  // namespace tessera::engine
