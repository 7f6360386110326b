#ifndef OPTIM_OPTIMIZER_STATE_H_
#define OPTIM_OPTIMIZER_STATE_H_

// What an optimizer remembers between steps, by parameter name, for checkpoints. Tensors are either
// like OwnedParam::value() (1-D, elements().size() long) or 0-dim and the same for the whole
// parameter (a step count). A parameter that never had a gradient, and one of which this rank owns
// nothing, is not there.

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "engine/owned_param.h"

namespace tessera::optim {

using ParamState = std::map<std::string, at::Tensor>;
using OptimizerState = std::map<std::string, ParamState>;

// The state in the order of `params`, checked and copied; an empty ParamState for a parameter that
// is not in `state`. `keys` are the names every entry must have, `scalar_key` the one of them that
// is 0-dim ("" for none).
//
// Errors: ConfigError for an unknown parameter, a missing or unknown key, or a wrong shape.
std::vector<ParamState> checked_state(const std::vector<OwnedParam>& params,
                                      const OptimizerState& state,
                                      const std::vector<std::string>& keys,
                                      const std::string& scalar_key);

// The state by name of those that have one; shares memory.
OptimizerState state_by_name(const std::vector<OwnedParam>& params,
                             const std::vector<ParamState>& state);

int64_t bytes_of(const std::vector<ParamState>& state);

}  // namespace tessera::optim

#endif  // OPTIM_OPTIMIZER_STATE_H_
