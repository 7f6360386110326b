#ifndef DDP_REPLICATED_UNIT_H_
#define DDP_REPLICATED_UNIT_H_

// A ReplicatedUnit is a bucket: parameters that every rank holds whole, whose gradients are
// averaged together.
//
//   unshard        makes compute-dtype copies of the masters and puts them in the parameters'
//                  place; nothing to do where the dtypes are the same
//   reshard        puts the masters back; the copies are gone
//   reduce_grads   the bucket of gradients is averaged over ranks in place
//
// A parameter's .grad is a part of the bucket: what autograd made is copied in once, in the first
// micro-batch of a window, and later ones are added in place.
//
// Bytes:       m*N masters and m*N gradients (from the first backward on); + c*N copies in forward
//              and backward where compute has another dtype; + m*N*(W-1)/W received gradients
//              while reducing.
//              (W: ranks; N: elements; m, c: bytes per element of masters and compute.)
// Collectives: one all-reduce of m*N per window.
// Source:      PyTorch Distributed (Li et al., 2020, sec. 3.2): buckets under the rest of backward.

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "comm/stream.h"
#include "engine/layout.h"
#include "engine/unit.h"

namespace tessera::ddp {

class ReplicatedUnit : public engine::Unit {
 public:
  // Afterwards the parameters have rank 0's values.
  //
  // Collective: yes (a broadcast of rank 0's values).
  ReplicatedUnit(std::string name, std::vector<engine::UnitParam> params,
                 engine::UnitContext context);
  ~ReplicatedUnit() override;

  bool shards() const override { return false; }
  std::vector<OwnedParam> owned_params() const override;

 private:
  void do_unshard() override;
  void do_wait_unshard() override {}
  void do_reshard() override;
  void do_reduce_grads() override;
  void do_wait_grads() override;
  void do_begin_backward() override;
  void do_take_grad(size_t i, bool again) override;
  bool do_used(size_t i) const override;
  void do_publish(size_t i, bool used) override;
  void do_abandon_backward() override {}
  const at::Tensor& owned_value(size_t i) const override { return masters_[i]; }

  bool casts() const { return compute_dtype() != master_dtype(); }
  bool in_bucket(size_t i) const;
  void make_bucket();

  engine::Layout layout_;                 // of one shard: the bucket
  std::vector<at::Tensor> masters_;       // the parameters' own memory
  at::Tensor copies_;                     // [N], compute dtype; its Storage is emptied and filled
  std::vector<at::Tensor> copy_params_;   // views of copies_, per parameter
  at::Tensor bucket_;                     // [N], master dtype
  std::vector<at::Tensor> bucket_grads_;  // on bucket_'s storage, shaped like the parameters
  comm::Event reduced_;
};

}  // namespace tessera::ddp

#endif  // DDP_REPLICATED_UNIT_H_
