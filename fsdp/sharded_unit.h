#ifndef FSDP_SHARDED_UNIT_H_
#define FSDP_SHARDED_UNIT_H_

// A ShardedUnit holds 1/W of the parameters that communicate together, and turns that slice into
// whole parameters and back. (W: ranks; N: elements of the unit with padding; m, c, r: bytes per
// element of masters, compute and reduction.)
//
//   unshard        fills the unit's storage, casts this rank's masters into their slot, gathers the
//                  others in place
//   wait_unshard   the user's parameters become views of the storage
//   reshard        they become this rank's slices again (1-D, maybe empty); the storage is emptied
//   reduce_grads   full gradients are averaged over ranks into this rank's slice, added to what
//                  .grad held
//
// Bytes:       m*N/W masters and m*N/W gradients always (gradients from the first backward on);
//              + c*N while gathered; + r*N full gradients and r*N*(W-1)/W received ones while
//              reducing.
// Collectives: one all-gather of c*N per unshard, one reduce-scatter of r*N per backward.
// Source:      ZeRO stage 3 (Rajbhandari et al., 2020, sec. 5); PyTorch FSDP (Zhao et al., 2023,
//              sec. 3).

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "comm/stream.h"
#include "engine/layout.h"
#include "engine/unit.h"

namespace tessera::fsdp {

class ShardedUnit : public engine::Unit {
 public:
  // Takes the parameters over: afterwards they are this rank's slices of rank 0's values.
  //
  // Collective: yes (a broadcast of rank 0's values).
  ShardedUnit(std::string name, std::vector<engine::UnitParam> params, engine::UnitContext context);
  ~ShardedUnit() override;

  const engine::Layout& layout() const { return layout_; }
  bool shards() const override { return true; }
  std::vector<OwnedParam> owned_params() const override;

 private:
  void do_unshard() override;
  void do_wait_unshard() override;
  void do_reshard() override;
  void do_reduce_grads() override;
  void do_wait_grads() override;
  void do_begin_backward() override;
  void do_take_grad(size_t i, bool again) override;
  bool do_used(size_t i) const override;
  void do_publish(size_t i, bool used) override;
  void do_abandon_backward() override;
  const at::Tensor& owned_value(size_t i) const override { return slices_[i]; }

  void take_masters();
  void make_storage();
  void make_owned_grads();

  std::vector<std::vector<int64_t>> shapes_;
  engine::Layout layout_;
  int64_t rank_;

  at::Tensor masters_;              // [S], master dtype
  std::vector<at::Tensor> slices_;  // views of masters_, per parameter
  at::Tensor full_;                 // [W * S], compute dtype; its Storage is emptied and filled
  std::vector<at::Tensor> full_params_;  // views of full_, per parameter
  comm::Event gathered_;

  // [W * S], reduce dtype; from the first gradient of a backward to the end of the reduction.
  at::Tensor full_grads_;
  at::Tensor owned_grads_;               // [S], master dtype
  std::vector<at::Tensor> grad_slices_;  // on owned_grads_'s storage; what .grad is set to
  std::vector<uint8_t> held_;            // per parameter: owned_grads_ holds a gradient to add to
  comm::Event reduced_;
};

}  // namespace tessera::fsdp

#endif  // FSDP_SHARDED_UNIT_H_
