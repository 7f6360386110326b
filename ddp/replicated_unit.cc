#include "ddp/replicated_unit.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <utility>

#include "base/error.h"
#include "base/math.h"
#include "comm/collectives.h"
#include "comm/tensor_part.h"

namespace tessera::ddp {
namespace {

using base::Interval;
using comm::part;
using engine::Bytes;

}  // namespace

ReplicatedUnit::ReplicatedUnit(std::string name, std::vector<engine::UnitParam> params,
                               engine::UnitContext context)
    : Unit(std::move(name), std::move(params), std::move(context)),
      layout_(numels(), /*shards=*/1) {
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  const engine::UnitContext& ctx = this->context();
  for (const engine::UnitParam& p : this->params()) {
    comm::broadcast(ctx.world.gather(), p.tensor.detach().view({-1}),
                    "broadcast of the initial value of parameter '" + p.name + "'");
    ctx.ledger->add(Bytes::kOwnedParams, static_cast<int64_t>(p.tensor.nbytes()));
    masters_.push_back(p.tensor.variable_data());
  }
  if (!casts()) {
    install_grad_hooks();
    return;
  }
  copies_ = ctx.pool->tensor(layout_.total_elements(), compute_dtype(), Bytes::kFullParams);
  for (size_t i = 0; i < this->params().size(); ++i) {
    // variable_data: writes to copies_ must not move the version counters that backward checks.
    copy_params_.push_back(part(copies_, layout_.param(i)).view(param(i).sizes()).variable_data());
  }
  swap_params(copy_params_, /*full=*/true);
  install_grad_hooks();
  swap_params(masters_, /*full=*/false);
  engine::free_storage(copies_);
}

ReplicatedUnit::~ReplicatedUnit() {
  for (const at::Tensor& master : masters_) {
    context().ledger->add(Bytes::kOwnedParams, -static_cast<int64_t>(master.nbytes()));
  }
  if (bucket_.defined()) {
    context().ledger->add(Bytes::kOwnedGrads, -static_cast<int64_t>(bucket_.nbytes()));
  }
}

std::vector<OwnedParam> ReplicatedUnit::owned_params() const {
  const comm::World& world = context().world;
  std::vector<OwnedParam> owned;
  for (const engine::UnitParam& p : params()) {
    owned.emplace_back(p.name, p.tensor.sizes().vec(), Interval{0, p.tensor.numel()},
                       base::even_part(p.tensor.numel(), world.size(), world.rank()), p.tensor);
  }
  return owned;
}

void ReplicatedUnit::do_unshard() {
  if (!casts()) return;
  const at::NoGradGuard no_grad;
  const int64_t bytes = layout_.total_elements() * static_cast<int64_t>(copies_.element_size());
  engine::fill_storage(copies_, context().pool->allocate(bytes, Bytes::kFullParams), bytes);
  for (size_t i = 0; i < params().size(); ++i) copy_params_[i].copy_(masters_[i]);
  swap_params(copy_params_, /*full=*/true);
}

void ReplicatedUnit::do_reshard() {
  if (!casts()) return;
  swap_params(masters_, /*full=*/false);
  engine::free_storage(copies_);
}

void ReplicatedUnit::make_bucket() {
  const c10::InferenceMode no_inference(false);
  bucket_ = at::zeros({layout_.total_elements()}, master_dtype());
  context().ledger->add(Bytes::kOwnedGrads, static_cast<int64_t>(bucket_.nbytes()));
  for (size_t i = 0; i < params().size(); ++i) {
    // Not a view in autograd's eyes: zero_grad(set_to_none=false) calls detach_() on it.
    at::Tensor grad = at::empty({0}, master_dtype());
    grad.set_(bucket_.storage(), layout_.param(i).begin, param(i).sizes(), param(i).strides());
    bucket_grads_.push_back(std::move(grad));
  }
}

bool ReplicatedUnit::in_bucket(size_t i) const {
  const at::Tensor& grad = param(i).grad();
  return grad.defined() && bucket_.defined() && grad.data_ptr() == bucket_grads_[i].data_ptr() &&
         grad.scalar_type() == master_dtype();
}

void ReplicatedUnit::do_begin_backward() {
  if (!bucket_.defined()) make_bucket();
}

void ReplicatedUnit::do_take_grad(size_t i, bool) {
  if (in_bucket(i)) return;  // Autograd has added to it in place.
  const at::NoGradGuard no_grad;
  bucket_grads_[i].copy_(param(i).grad());
  param(i).mutable_grad() = bucket_grads_[i];
}

void ReplicatedUnit::do_reduce_grads() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < params().size(); ++i) {
    if (in_bucket(i)) continue;
    // Unused on this rank in the whole window, or set by the user.
    if (param(i).grad().defined()) {
      do_take_grad(i, false);
    } else {
      bucket_grads_[i].zero_();
    }
  }
  comm::Group* group = &context().world.reduce();
  reduced_ = group->stream().run(
      [group, pool = context().pool, bucket = bucket_, unit = name(), dtype = reduce_dtype()] {
        const at::NoGradGuard no_grad_inside;
        // The bucket itself is in master dtype; a narrower reduction travels as a copy.
        at::Tensor sent = bucket;
        if (dtype != bucket.scalar_type()) {
          sent = pool->tensor(bucket.numel(), dtype, Bytes::kFullGrads);
          sent.copy_(bucket);
        }
        at::Tensor scratch;
        if (const int64_t n = comm::all_reduce_scratch_elements(*group, sent.numel()); n > 0) {
          scratch = pool->tensor(n, dtype, Bytes::kScratch);
        }
        comm::all_reduce_mean(*group, sent, scratch, "all-reduce of bucket '" + unit + "'");
        if (!sent.is_same(bucket)) at::Tensor(bucket).copy_(sent);
      });
}

void ReplicatedUnit::do_wait_grads() { reduced_.wait(); }

bool ReplicatedUnit::do_used(size_t i) const { return param(i).grad().defined(); }

void ReplicatedUnit::do_publish(size_t i, bool used) {
  if (used) param(i).mutable_grad() = bucket_grads_[i];
}

}  // namespace tessera::ddp
