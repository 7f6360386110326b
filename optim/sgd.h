#ifndef OPTIM_SGD_H_
#define OPTIM_SGD_H_

// Stochastic gradient descent with momentum over the owned parts of parameters. One fused call a
// group and step; the bits are those of at::_fused_sgd_ on whole parameters in every strategy (see
// optim/fused_lists.h):
//
//   g = grad + weight_decay * value
//   m = momentum * m + g
//   value -= lr * (nesterov ? g + momentum * m : m)
//
// Costs one tensor like the value per parameter with momentum, made at its first gradient, none
// without, and no collective. A parameter without a gradient keeps value and state untouched: no
// decay, no momentum.

#include <vector>

#include "engine/owned_param.h"
#include "optim/optimizer_state.h"
#include "optim/param_group.h"

namespace tessera::optim {

struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0.0;
  bool nesterov = false;
  double weight_decay = 0.0;  // added to the gradient
  DecayRule decay_rule = DecayRule::kMatrices;
};

class SGD {
 public:
  // Errors: ConfigError for an option out of its range or two parameters of one name.
  explicit SGD(std::vector<OwnedParam> params, SGDOptions options = {});

  // Reads the gradients as they are: reduce and clip before.
  //
  // Errors: ConfigError while a unit is unsharded (see OwnedParam).
  void step();

  // Makes every gradient undefined.
  void zero_grad();

  // In all groups, from the next step on.
  void set_lr(double lr);
  double lr() const { return groups_[0].options.lr; }

  const std::vector<ParamGroup<SGDOptions>>& groups() const { return groups_; }

  // "momentum_buffer" like the value; nothing without momentum. Shares memory: a later step changes
  // it.
  OptimizerState state() const { return state_by_name(params_, state_); }
  int64_t state_bytes() const { return bytes_of(state_); }

  // Replaces the state of all parameters by copies; parameters not named start anew.
  //
  // Errors: ConfigError for unknown names and wrong shapes; the state is then as before.
  void load_state(const OptimizerState& state);

 private:
  void step_group(const ParamGroup<SGDOptions>& group);

  std::vector<OwnedParam> params_;
  std::vector<ParamGroup<SGDOptions>> groups_;
  std::vector<ParamState> state_;  // like params_; empty before the first gradient
};

}  // namespace tessera::optim

#endif  // OPTIM_SGD_H_
