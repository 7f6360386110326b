#ifndef ENGINE_OWNED_PARAM_H_
#define ENGINE_OWNED_PARAM_H_

// An OwnedParam is the part of one parameter that this rank updates. Optimizers, clipping and
// checkpoints see only this, are written once, and cannot know the strategy:
//
//   sharded      a slice of the parameter, maybe empty; primary() == elements()
//   replicated   the whole parameter, elements() == [0, numel); primary() is this rank's even part
//                of it
//
// Over all ranks the primaries partition the parameter: whoever sums or saves uses only the primary
// part, so that nothing is counted or written twice.
//
// A value type: a handle on the user's parameter, cheap to copy, valid as long as the model. To be
// used between steps, when every unit is sharded.

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "base/interval.h"

namespace tessera {

class OwnedParam {
 public:
  OwnedParam(std::string name, std::vector<int64_t> shape, base::Interval elements,
             base::Interval primary, at::Tensor param)
      : name_(std::move(name)),
        shape_(std::move(shape)),
        elements_(elements),
        primary_(primary),
        param_(std::move(param)),
        home_(param_.storage().unsafeGetStorageImpl()) {}

  // As in model->named_parameters(); a tied parameter has the first of its names.
  const std::string& name() const { return name_; }
  // Of the whole parameter; value() itself is 1-D, so rules by rank (weight decay) must ask this.
  const std::vector<int64_t>& shape() const { return shape_; }
  // [begin, end) of the flattened parameter that this rank updates.
  base::Interval elements() const { return elements_; }
  // The part of elements() that this rank answers for.
  base::Interval primary() const { return primary_; }

  // Shapes:  1-D, elements().size() long, in the master precision; shares the parameter's memory.
  // Ensures: writing it in place bumps the parameter's version, so that a backward over values that
  //          were overwritten throws as it does in PyTorch.
  // Errors:  ConfigError while the unit is unsharded (between a forward with a graph and the end of
  //          its backward).
  at::Tensor value() const;

  // Shapes: like value(), or undefined when the parameter has no gradient.
  at::Tensor grad() const;

  // Makes the gradient undefined; a tensor that grad() returned before is not changed.
  void clear_grad() const;

  // value() and grad() cut down to primary(); grad undefined as above.
  at::Tensor primary_value() const;
  at::Tensor primary_grad() const;

 private:
  std::string name_;
  std::vector<int64_t> shape_;
  base::Interval elements_;
  base::Interval primary_;
  at::Tensor param_;
  const void* home_;  // the storage of param_ between steps: while it is whole, it has another
};

}  // namespace tessera

#endif  // ENGINE_OWNED_PARAM_H_
