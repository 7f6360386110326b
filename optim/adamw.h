#ifndef OPTIM_ADAMW_H_
#define OPTIM_ADAMW_H_

// AdamW over the owned parts of parameters. One fused call a group and step; the step does not
// depend on the strategy or the number of ranks: the bits are those of at::_fused_adamw_ on whole
// parameters (see optim/fused_lists.h), which is what PyTorch's AdamW(fused=True) runs.
//
// Costs two tensors like the value per parameter, made at its first gradient, and no collective. A
// parameter without a gradient keeps value, state and step count untouched: no decay, no momentum.

#include <vector>

#include "engine/owned_param.h"
#include "optim/optimizer_state.h"
#include "optim/param_group.h"

namespace tessera::optim {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;  // decoupled: the value is multiplied by 1 - lr * weight_decay
  DecayRule decay_rule = DecayRule::kMatrices;
};

class AdamW {
 public:
  // Errors: ConfigError for an option out of its range or two parameters of one name.
  explicit AdamW(std::vector<OwnedParam> params, AdamWOptions options = {});

  // Reads the gradients as they are: reduce and clip before.
  //
  // Errors: ConfigError while a unit is unsharded (see OwnedParam).
  void step();

  // Makes every gradient undefined.
  void zero_grad();

  // In all groups, from the next step on.
  void set_lr(double lr);
  double lr() const { return groups_[0].options.lr; }

  const std::vector<ParamGroup<AdamWOptions>>& groups() const { return groups_; }

  // "exp_avg" and "exp_avg_sq" like the value, and "step", a 0-dim float as in PyTorch. Shares
  // memory: a later step changes it.
  OptimizerState state() const { return state_by_name(params_, state_); }
  int64_t state_bytes() const { return bytes_of(state_); }

  // Replaces the state of all parameters by copies; parameters not named start anew.
  //
  // Errors: ConfigError for unknown names and wrong shapes; the state is then as before.
  void load_state(const OptimizerState& state);

 private:
  void step_group(const ParamGroup<AdamWOptions>& group);

  std::vector<OwnedParam> params_;
  std::vector<ParamGroup<AdamWOptions>> groups_;
  std::vector<ParamState> state_;  // like params_; empty before the first gradient
};

}  // namespace tessera::optim

#endif  // OPTIM_ADAMW_H_
