#ifndef OPTIM_FUSED_LISTS_H_
#define OPTIM_FUSED_LISTS_H_

// FusedLists gathers the tensors of many parameters for one call of a fused optimizer kernel, so
// that a sharded step gives the bits of an unsharded one.
//
// ATen's fused CPU kernels update whole SIMD vectors with one code and the rest, fewer elements
// than a vector has, with another that rounds differently in the last bit (and differently within
// the rest, as the compiler unrolled it). An element at the end of a slice may lie in the middle of
// the whole parameter, so its bits would depend on the number of ranks. Here each element goes
// through the code it would go through in the whole parameter:
//
//   whole parameter   |------------- vectors --------------|- rest -|
//   slice                    [---- in place ---|- padded --|- rest ]
//
//   in place   whole vectors, a view of the slice
//   padded     what is left before the rest begins: copied into a vector, and back after the call
//   rest       a view where the slice has all of it; else copied to its place in a tensor as long
//              as the whole rest
//
// A slice that needs no cut is passed as it is: always in replicated modes, and wherever a slice of
// the parameter holds whole vectors. A cut costs copies of less than two vectors per tensor. On
// other devices each element has its own thread of one code, and nothing is cut.

#include <ATen/core/Tensor.h>

#include <vector>

#include "base/interval.h"
#include "engine/owned_param.h"

namespace tessera::optim {

class FusedLists {
 public:
  // `count`: tensors of a parameter, in the order they are passed to add(): the value, the
  // gradient, the state.
  explicit FusedLists(size_t count) : lists_(count) {}

  // All tensors are 1-D, contiguous and elements().size() > 0 long. Returns in how many pieces they
  // were cut, the same for all of them: whoever passes one more list to the kernel (step counts)
  // repeats its entry as often.
  int64_t add(const OwnedParam& param, const std::vector<at::Tensor>& tensors);

  // The index-th tensors of all pieces.
  const std::vector<at::Tensor>& list(size_t index) const { return lists_[index]; }
  bool empty() const { return lists_[0].empty(); }

  // To be called after the kernel: brings padded pieces back and bumps the versions of the values.
  void finish();

 private:
  struct Padded {
    at::Tensor source;  // a view of a padded piece
    at::Tensor target;  // the same elements in the slice
  };

  void add_view(const std::vector<at::Tensor>& tensors, base::Interval part);
  // `part` at `offset` in new tensors of `size` elements.
  void add_padded(const std::vector<at::Tensor>& tensors, base::Interval part, int64_t size,
                  int64_t offset);

  std::vector<std::vector<at::Tensor>> lists_;
  std::vector<at::Tensor> values_;
  std::vector<Padded> padded_;
};

}  // namespace tessera::optim

#endif  // OPTIM_FUSED_LISTS_H_
