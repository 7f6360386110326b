#ifndef OPTIM_CLIP_GRAD_NORM_H_
#define OPTIM_CLIP_GRAD_NORM_H_

// Clips gradients to a global 2-norm, over all parameters and all ranks.
//
// Squares are summed in double over primary parts, so replicated elements count once and the norm
// does not depend on how parameters are cut over ranks: another cut changes the last bits of a
// double, which the single-precision coefficient almost never shows. It costs one read of the
// gradients and one collective of one number.

#include <functional>
#include <vector>

#include "engine/owned_param.h"

namespace tessera::optim {

// Returns the sum of its argument over all ranks that share the parameters, the same bits on each
// of them. With one rank: the argument.
//
// Collective: on the host group, since the sum is needed on the host.
using SumOverRanks = std::function<double(double)>;

// The 2-norm of the gradients of whole parameters; parameters without a gradient count as zeros.
// The same on every rank.
//
// Collective: calls sum_over_ranks once, also where this rank owns nothing.
double grad_norm(const std::vector<OwnedParam>& params, const SumOverRanks& sum_over_ranks);

// Multiplies the gradients in place by min(1, max_norm / (norm + 1e-6)), as PyTorch does, and
// returns the norm before that. All of grad() is clipped, also what is not primary. A norm that is
// not finite leaves the gradients as they are, on every rank alike: the caller decides whether to
// skip the step.
//
// Collective: as grad_norm().
// Errors:     ConfigError unless max_norm is positive.
double clip_grad_norm(const std::vector<OwnedParam>& params, double max_norm,
                      const SumOverRanks& sum_over_ranks);

}  // namespace tessera::optim

#endif  // OPTIM_CLIP_GRAD_NORM_H_
