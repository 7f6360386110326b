#ifndef OPTIM_PARAM_GROUP_H_
#define OPTIM_PARAM_GROUP_H_

// A ParamGroup is a set of parameters that an optimizer updates with the same options. Groups are
// made by a rule that asks only for the shape of whole parameters, so all ranks and all strategies
// have the same groups in the same order, some of them perhaps empty.

#include <cstddef>
#include <string>
#include <vector>

#include "engine/owned_param.h"

namespace tessera::optim {

// Which parameters decay.
enum class DecayRule {
  kMatrices,  // those whose whole shape has two dimensions or more: not biases, not the gains of
              // norms
  kAll,
};

template <typename Options>
struct ParamGroup {
  std::string name;            // "decay" and "no_decay", or "all"
  Options options;             // of this group: weight_decay is 0 in "no_decay"
  std::vector<size_t> params;  // positions in the list the optimizer was made with
};

// Options needs the fields weight_decay and decay_rule.
template <typename Options>
std::vector<ParamGroup<Options>> make_groups(const std::vector<OwnedParam>& params,
                                             const Options& options) {
  if (options.decay_rule == DecayRule::kAll) {
    ParamGroup<Options> all{"all", options, {}};
    for (size_t i = 0; i < params.size(); ++i) all.params.push_back(i);
    return {all};
  }
  ParamGroup<Options> decay{"decay", options, {}};
  ParamGroup<Options> no_decay{"no_decay", options, {}};
  no_decay.options.weight_decay = 0.0;
  for (size_t i = 0; i < params.size(); ++i) {
    (params[i].shape().size() >= 2 ? decay : no_decay).params.push_back(i);
  }
  return {decay, no_decay};
}

// Errors: ConfigError where two parameters have one name: state is kept by name.
void check_names(const std::string& optimizer, const std::vector<OwnedParam>& params);

}  // namespace tessera::optim

#endif  // OPTIM_PARAM_GROUP_H_
