#ifndef TRAIN_PARALLELIZE_H_
#define TRAIN_PARALLELIZE_H_

// parallelize() takes a model over for training on many ranks, replicated or sharded by one field
// of the Policy. The model's code and the training loop are the same in every mode:
//
//   auto world = tessera::comm::init();
//   tessera::Policy policy;
//   policy.strategy = tessera::Strategy::kFullShard;
//   policy.precision = tessera::precision::bf16();
//   policy.units = tessera::units_of<Block>();
//   auto parallel = tessera::parallelize(model, world, policy);
//
//   for each step, for each micro-batch:
//     auto sync = parallel.sync_gradients(is_last_micro_batch);
//     (loss(model, batch) / micro_batches).backward();
//   parallel.clip_grad_norm(1.0);
//   optimizer.step(); optimizer.zero_grad();

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "comm/world.h"
#include "engine/byte_ledger.h"
#include "engine/owned_param.h"
#include "precision/policy.h"
#include "train/strategy.h"
#include "train/unit_plan.h"

namespace tessera {

struct Policy {
  Strategy strategy = Strategy::kFullShard;
  precision::Policy precision = precision::fp32();

  // Sharded: the modules whose parameters are gathered together; empty: the whole model is one
  // unit.
  UnitRule units;
  // Sharded: true drops every unit after forward, also the root and the last one; false drops none
  // (more memory, one gather less); unset: all but the root and the last one, which backward needs
  // first.
  std::optional<bool> reshard_after_forward;
  // Sharded: gather the next unit while this one computes.
  bool prefetch = true;

  // Replicated: gradients are reduced in buckets of this size; the first one is smaller, so that it
  // starts early.
  int64_t bucket_bytes = 25 << 20;
  int64_t first_bucket_bytes = 1 << 20;
};

class Parallel {
 public:
  // Ends the take-over of the model: its forward is its own again. Sharded parameters stay slices.
  ~Parallel();
  Parallel(Parallel&&) noexcept;
  Parallel& operator=(Parallel&&) noexcept;

  // What this rank updates of each parameter, in one order on all ranks; tied parameters once.
  const std::vector<OwnedParam>& owned_params() const;

  // Sets, until the returned scope ends, whether the backward in it ends a window of micro-batches.
  // In between, replicated gradients stay on their rank; sharded ones are reduced and summed where
  // they are owned. Without a scope every backward ends its window.
  class [[nodiscard]] SyncScope {
   public:
    ~SyncScope();
    SyncScope(const SyncScope&) = delete;
    SyncScope& operator=(const SyncScope&) = delete;

   private:
    friend class Parallel;
    SyncScope(std::shared_ptr<engine::Schedule> schedule, bool last);
    std::shared_ptr<engine::Schedule> schedule_;
    bool before_;
  };
  SyncScope sync_gradients(bool is_last_micro_batch);

  // Scales the gradients so that their 2-norm over all parameters is at most max_norm, and returns
  // the norm before that: the same number on every rank. A norm that is not finite leaves the
  // gradients as they are.
  //
  // Collective: yes, on the host group.
  // Errors:     ConfigError after a backward that did not end its window.
  double clip_grad_norm(double max_norm);
  // Collective: yes, on the host group.
  double grad_norm() const;

  // Bytes the engine holds on this rank, by kind.
  engine::ByteLedger& ledger();
  // Of the whole model, over all ranks; tied ones once.
  int64_t num_parameters() const;
  // The units of this model, as planned.
  const std::vector<std::unique_ptr<engine::Unit>>& units() const;

  struct State;  // parallelize.cc
  explicit Parallel(std::unique_ptr<State> state);

 private:
  std::unique_ptr<State> state_;
};

// Takes the model over. Afterwards its parameters are what this rank owns of rank 0's values, and
// optimizers may be made on them or on owned_params(). Memory: one unit more than the model had,
// while it is sharded.
//
// Collective: yes, all ranks with the same model and policy.
// Errors:     ConfigError on all ranks alike (see train/unit_plan.h; ranks that disagree are
//             named).
Parallel parallelize(std::shared_ptr<torch::nn::Module> model, const comm::World& world,
                     const Policy& policy);

template <typename Impl>
Parallel parallelize(torch::nn::ModuleHolder<Impl>& model, const comm::World& world,
                     const Policy& policy) {
  return parallelize(std::shared_ptr<torch::nn::Module>(model.ptr()), world, policy);
}

}  // namespace tessera

#endif  // TRAIN_PARALLELIZE_H_
