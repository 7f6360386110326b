#include "fsdp/sharded_unit.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <utility>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/tensor_part.h"

namespace tessera::fsdp {
namespace {

using base::Interval;
using comm::part;
using engine::Bytes;

// The sum of what the ranks sent goes to this rank's gradients: added where there is one already,
// else set.
struct Reduction {
  comm::Group* group;
  std::shared_ptr<engine::BufferPool> pool;
  std::string what;
  at::Tensor full;                               // [W * S]
  at::Tensor owned;                              // [S]
  std::vector<std::pair<Interval, bool>> parts;  // of owned, per parameter: held
  bool any_held = false;
  bool all_held = true;

  void operator()() const {
    const at::NoGradGuard no_grad;
    at::Tensor scratch;
    if (const int64_t n = comm::reduce_scatter_scratch_parts(*group); n > 0) {
      scratch = pool->tensor(n * owned.numel(), full.scalar_type(), Bytes::kScratch);
    }
    // A native reduce-scatter has one dtype; and a gradient to add to must not be overwritten.
    const bool in_place = !any_held && (group->path() != comm::Group::Path::kNative ||
                                        full.scalar_type() == owned.scalar_type());
    if (in_place) {
      comm::reduce_scatter_mean(*group, full, owned, scratch, what);
      return;
    }
    const at::ScalarType dtype =
        group->path() == comm::Group::Path::kNative ? full.scalar_type() : owned.scalar_type();
    const at::Tensor mean = pool->tensor(owned.numel(), dtype, Bytes::kScratch);
    comm::reduce_scatter_mean(*group, full, mean, scratch, what);
    if (all_held) {
      at::Tensor sum = owned;
      sum.add_(mean);
      return;
    }
    for (const auto& [interval, held] : parts) {
      at::Tensor target = part(owned, interval);
      if (held) {
        target.add_(part(mean, interval));
      } else {
        target.copy_(part(mean, interval));
      }
    }
  }
};

}  // namespace

ShardedUnit::ShardedUnit(std::string name, std::vector<engine::UnitParam> params,
                         engine::UnitContext context)
    : Unit(std::move(name), std::move(params), std::move(context)),
      layout_(numels(), this->context().world.size()),
      rank_(this->context().world.rank()) {
  // Buffers of the engine outlive an InferenceMode in which the model may be wrapped.
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  for (const engine::UnitParam& p : this->params()) shapes_.push_back(p.tensor.sizes().vec());
  take_masters();
  make_storage();
  swap_params(full_params_, /*full=*/true);
  install_grad_hooks();
  swap_params(slices_, /*full=*/false);
}

ShardedUnit::~ShardedUnit() {
  this->context().ledger->add(Bytes::kOwnedParams, -static_cast<int64_t>(masters_.nbytes()));
  if (owned_grads_.defined()) {
    this->context().ledger->add(Bytes::kOwnedGrads, -static_cast<int64_t>(owned_grads_.nbytes()));
  }
}

void ShardedUnit::take_masters() {
  const engine::UnitContext& ctx = context();
  at::Tensor whole = ctx.pool->tensor(layout_.total_elements(), master_dtype(), Bytes::kScratch);
  for (const Interval gap : layout_.gaps()) part(whole, gap).zero_();
  for (size_t i = 0; i < params().size(); ++i) {
    part(whole, layout_.param(i)).copy_(param(i).detach().reshape({-1}));
  }
  comm::broadcast(ctx.world.gather(), whole,
                  "broadcast of the initial values of unit '" + name() + "'");
  masters_ = part(whole, layout_.shard(rank_)).clone();
  ctx.ledger->add(Bytes::kOwnedParams, static_cast<int64_t>(masters_.nbytes()));
  for (size_t i = 0; i < params().size(); ++i) {
    slices_.push_back(part(masters_, layout_.param_in_shard(i, rank_)).variable_data());
  }
}

void ShardedUnit::make_storage() {
  full_ = context().pool->tensor(layout_.total_elements(), compute_dtype(), Bytes::kFullParams);
  for (size_t i = 0; i < params().size(); ++i) {
    // variable_data: writes to full_ must not move the version counters that backward checks.
    full_params_.push_back(part(full_, layout_.param(i)).view(shapes_[i]).variable_data());
  }
  engine::free_storage(full_);
}

void ShardedUnit::make_owned_grads() {
  const c10::InferenceMode no_inference(false);
  owned_grads_ = at::zeros({layout_.shard_elements()}, master_dtype());
  context().ledger->add(Bytes::kOwnedGrads, static_cast<int64_t>(owned_grads_.nbytes()));
  for (size_t i = 0; i < params().size(); ++i) {
    // Not a view in autograd's eyes: zero_grad(set_to_none=false) calls detach_() on it.
    const Interval mine = layout_.param_in_shard(i, rank_);
    at::Tensor slice = at::empty({0}, master_dtype());
    slice.set_(owned_grads_.storage(), mine.begin, {mine.size()}, {1});
    grad_slices_.push_back(std::move(slice));
  }
}

std::vector<OwnedParam> ShardedUnit::owned_params() const {
  std::vector<OwnedParam> owned;
  for (size_t i = 0; i < params().size(); ++i) {
    const Interval elements = layout_.shard_in_param(i, rank_);
    owned.emplace_back(params()[i].name, shapes_[i], elements, elements, param(i));
  }
  return owned;
}

void ShardedUnit::do_unshard() {
  const int64_t bytes = layout_.total_elements() * static_cast<int64_t>(full_.element_size());
  engine::fill_storage(full_, context().pool->allocate(bytes, Bytes::kFullParams), bytes);
  comm::Group* group = &context().world.gather();
  gathered_ = group->stream().run(
      [group, full = full_, masters = masters_, slot = layout_.shard(rank_), unit = name()] {
        const at::NoGradGuard no_grad;
        part(full, slot).copy_(masters);
        comm::all_gather_in_place(*group, full, "all-gather of unit '" + unit + "'");
      });
}

void ShardedUnit::do_wait_unshard() {
  gathered_.wait();
  swap_params(full_params_, /*full=*/true);
}

void ShardedUnit::do_reshard() {
  swap_params(slices_, /*full=*/false);
  engine::free_storage(full_);
}

void ShardedUnit::do_begin_backward() {
  // [Note: gradients kept from before] While parameters are whole, a .grad of slice size is in
  // autograd's way, so it is put aside here, when backward begins, and not when the parameters
  // become whole: the user may call zero_grad between forward and backward.
  held_.assign(params().size(), 0);
  for (size_t i = 0; i < params().size(); ++i) {
    at::Tensor& grad = param(i).mutable_grad();
    if (!grad.defined()) continue;
    if (!owned_grads_.defined()) make_owned_grads();
    TESSERA_CHECK_CONFIG(grad.numel() == grad_slices_[i].numel(), "the gradient of parameter '",
                         params()[i].name, "' has ", grad.numel(),
                         " elements where this rank's part has ", grad_slices_[i].numel(),
                         ". Set gradients between steps only, and only of that size.");
    if (!grad.is_same(grad_slices_[i]) && grad.data_ptr() != grad_slices_[i].data_ptr()) {
      const at::NoGradGuard no_grad;
      grad_slices_[i].copy_(grad.reshape({-1}));
    }
    held_[i] = 1;
    grad.reset();
  }
}

void ShardedUnit::do_take_grad(size_t i, bool again) {
  const at::NoGradGuard no_grad;
  if (!full_grads_.defined()) {
    full_grads_ =
        context().pool->tensor(layout_.total_elements(), reduce_dtype(), Bytes::kFullGrads);
  }
  at::Tensor& grad = param(i).mutable_grad();
  at::Tensor target = part(full_grads_, layout_.param(i)).view(shapes_[i]);
  if (again) {
    target.add_(grad);
  } else {
    target.copy_(grad);
  }
  grad.reset();
}

void ShardedUnit::do_reduce_grads() {
  const at::NoGradGuard no_grad;
  if (!full_grads_.defined()) {
    full_grads_ =
        context().pool->tensor(layout_.total_elements(), reduce_dtype(), Bytes::kFullGrads);
  }
  if (!owned_grads_.defined()) make_owned_grads();
  for (const Interval gap : layout_.gaps()) part(full_grads_, gap).zero_();
  Reduction reduction{
      &context().world.reduce(), context().pool, "reduce-scatter of unit '" + name() + "'",
      std::move(full_grads_),    owned_grads_,   {}};
  full_grads_ = at::Tensor();
  for (size_t i = 0; i < params().size(); ++i) {
    if (!grad_seen(i)) part(reduction.full, layout_.param(i)).zero_();
    reduction.parts.emplace_back(layout_.param_in_shard(i, rank_), held_[i] != 0);
    reduction.any_held |= held_[i] != 0;
    reduction.all_held &= held_[i] != 0;
  }
  comm::Stream& stream = reduction.group->stream();
  reduced_ = stream.run(std::move(reduction));
}

void ShardedUnit::do_wait_grads() { reduced_.wait(); }

bool ShardedUnit::do_used(size_t i) const { return grad_seen(i) || held_[i] != 0; }

void ShardedUnit::do_publish(size_t i, bool used) {
  if (used) param(i).mutable_grad() = grad_slices_[i];
}

void ShardedUnit::do_abandon_backward() { full_grads_ = at::Tensor(); }

}  // namespace tessera::fsdp
