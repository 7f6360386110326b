#ifndef ENGINE_UNIT_H_
#define ENGINE_UNIT_H_

// A Unit is a set of parameters that communicate together, and knows how to move their bytes. The
// Schedule decides when. The two kinds are the whole difference between the modes:
// fsdp::ShardedUnit and ddp::ReplicatedUnit.
//
//   parameters:  kSharded --unshard--> kGathering --wait_unshard--> kReady --reshard--> kSharded
//   gradients:   kIdle --reduce_grads--> kReducing --wait_grads--> kIdle
//
// The two states do not depend on each other.
//
// In kSharded the user's parameters are what this rank owns in master precision (a slice, or the
// whole parameter where it is replicated); in kReady they are whole, in compute precision. The
// user's tensor is the same object in both: its data is swapped by set_data.
//
// Gradients in one backward: begin_backward; then each gradient is taken as autograd delivers it;
// reduce_grads, wait_grads, and publish, which sets each parameter's .grad to what this rank owns
// of the mean.
//
// A unit holds parameters of one dtype and one requires_grad. Public verbs check the states and
// leave the work to the do_ functions of the kind.
//
// Stream: verbs return at once; only the wait_ verbs, and reshard from kGathering, wait on the
//         host. One host thread calls a unit.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/world.h"
#include "engine/buffer_pool.h"
#include "engine/byte_ledger.h"
#include "engine/owned_param.h"
#include "precision/policy.h"

namespace torch::autograd {
struct Node;
}

namespace tessera::engine {

struct UnitParam {
  std::string name;   // as in model->named_parameters()
  at::Tensor tensor;  // the user's parameter
};

// What all units of a model share.
struct UnitContext {
  comm::World world;
  precision::Policy precision;
  std::shared_ptr<ByteLedger> ledger;
  std::shared_ptr<BufferPool> pool;
};

class Unit {
 public:
  enum class ParamState { kSharded, kGathering, kReady };
  enum class GradState { kIdle, kReducing };

  // Requires: params is not empty; one dtype, one requires_grad, contiguous, without gradients (the
  //           planner checks).
  Unit(std::string name, std::vector<UnitParam> params, UnitContext context);
  // Takes the hooks off the user's parameters.
  virtual ~Unit();
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  const std::string& name() const { return name_; }
  const std::vector<UnitParam>& params() const { return params_; }
  bool trainable() const { return trainable_; }
  ParamState param_state() const { return param_state_; }
  GradState grad_state() const { return grad_state_; }
  // Of the whole parameters, in order.
  const std::vector<int64_t>& numels() const { return numels_; }

  // Whether a rank keeps only a part of the parameters.
  virtual bool shards() const = 0;
  // This rank's part of every parameter, in order.
  virtual std::vector<OwnedParam> owned_params() const = 0;

  // Starts making the parameters whole.
  // Requires:   kSharded.
  // Collective: yes where sharded; all ranks, same order of units.
  // Errors:     ConfigError, before the collective, when a parameter's data was replaced
  //             (torch::load, to(), set_data) or its requires_grad changed since the unit was made.
  void unshard();
  // Requires: kGathering. Ensures: kReady. Errors: CommError of the gather.
  void wait_unshard();
  // Puts back what this rank owns; whole parameters are gone. From kGathering it waits first; in
  // kSharded it does nothing.
  void reshard();

  // Starts the mean over ranks of the gradients taken since begin_backward; a parameter without one
  // counts zeros.
  // Requires:   kIdle, trainable(), after begin_backward.
  // Collective: yes; all ranks, same order of units.
  void reduce_grads();
  // Requires: kReducing. Ensures: kIdle. Errors: CommError of the reduction.
  void wait_grads();

  // Requires: kReady, trainable(). To be called before the first gradient of a backward arrives.
  void begin_backward();
  bool in_backward() const { return in_backward_; }
  // All parameters have had their gradient in this backward.
  bool grads_complete() const { return missing_grads_ == 0; }
  // Appends, per parameter, 1 where it has a gradient on this rank: from this backward or kept from
  // before.
  void append_used(std::vector<uint8_t>& flags) const;
  // Ends the backward: where used[i] is 1, parameter i's .grad becomes this rank's part; elsewhere
  // it stays undefined.
  // Requires: kIdle, kSharded, params().size() flags: those of append_used, combined over ranks
  //           where grads were reduced.
  void publish(const uint8_t* used);
  // Ends a backward of the model that failed: all gradients are dropped, also those from before.
  // Where they were added to in place they cannot be had back; and what a zero_grad since then
  // dropped must not return.
  // Requires: kIdle, kSharded.
  void abandon_backward();

  // Called after a gradient was taken.
  void set_grad_listener(std::function<void(Unit&)> listener) { listener_ = std::move(listener); }

 protected:
  virtual void do_unshard() = 0;
  virtual void do_wait_unshard() = 0;
  virtual void do_reshard() = 0;
  virtual void do_reduce_grads() = 0;
  virtual void do_wait_grads() = 0;
  virtual void do_begin_backward() = 0;
  // param(i).grad is defined and holds this backward's gradient; `again` when it is not the first
  // one in it.
  virtual void do_take_grad(size_t i, bool again) = 0;
  virtual bool do_used(size_t i) const = 0;
  virtual void do_publish(size_t i, bool used) = 0;
  virtual void do_abandon_backward() = 0;

  // Where this rank's part of parameter i is kept: what the parameter holds in kSharded.
  virtual const at::Tensor& owned_value(size_t i) const = 0;

  const at::Tensor& param(size_t i) const { return params_[i].tensor; }
  bool grad_seen(size_t i) const { return seen_[i] != 0; }
  const UnitContext& context() const { return context_; }
  at::ScalarType master_dtype() const { return master_dtype_; }
  at::ScalarType compute_dtype() const { return compute_dtype_; }
  at::ScalarType reduce_dtype() const { return reduce_dtype_; }

  // Makes the accumulator nodes of trainable parameters and hangs the gradient hooks.
  // Requires: the parameters are whole and in compute dtype (a node remembers shape and dtype).
  void install_grad_hooks();
  // set_data on every parameter. `full`: they become whole; their accumulators are put back.
  void swap_params(const std::vector<at::Tensor>& to, bool full);

 private:
  friend struct GradHook;
  void on_grad(size_t i);
  void check_untouched() const;

  std::string name_;
  std::vector<UnitParam> params_;
  std::vector<int64_t> numels_;
  UnitContext context_;
  bool trainable_;
  at::ScalarType master_dtype_;
  at::ScalarType compute_dtype_;
  at::ScalarType reduce_dtype_;
  // [Note: accumulators] A parameter keeps only a weak pointer to its accumulator, and a set_data
  // that changes the dtype drops it; a second one would split the gradients of two uses of the
  // parameter. The unit owns the one node.
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;
  std::function<void(Unit&)> listener_;

  ParamState param_state_ = ParamState::kSharded;
  GradState grad_state_ = GradState::kIdle;
  bool in_backward_ = false;
  std::vector<uint8_t> seen_;  // per parameter: its gradient was taken in this backward
  size_t missing_grads_ = 0;
};

const char* to_string(Unit::ParamState state);

}  // namespace tessera::engine

#endif  // ENGINE_UNIT_H_
