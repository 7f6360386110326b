#include "train/parallelize.h"

#include <utility>

#include "base/error.h"
#include "comm/agreement.h"
#include "comm/collectives.h"
#include "ddp/replicated_unit.h"
#include "engine/schedule.h"
#include "fsdp/sharded_unit.h"
#include "optim/clip_grad_norm.h"

namespace tessera {

struct Parallel::State {
  std::shared_ptr<torch::nn::Module> model;  // the schedule's hooks hang in it
  comm::World world;
  engine::UnitContext context;
  std::shared_ptr<engine::Schedule> schedule;
  std::vector<OwnedParam> owned;
};

namespace {

void check_policy(const Policy& policy) {
  TESSERA_CHECK_CONFIG(policy.bucket_bytes > 0 && policy.first_bucket_bytes > 0, "bucket sizes of ",
                       policy.first_bucket_bytes, " and ", policy.bucket_bytes,
                       " bytes: expected more than 0.");
  for (const at::ScalarType dtype : {policy.precision.param_dtype, policy.precision.reduce_dtype}) {
    TESSERA_CHECK_CONFIG(dtype == at::kFloat || dtype == at::kBFloat16, "precision policy with ",
                         dtype, ": expected float32 or bfloat16.");
  }
}

engine::Rules rules_of(const Policy& policy) {
  using Drop = engine::Rules::Drop;
  engine::Rules rules = train::row_of(policy.strategy).rules;
  if (rules.drop_after_forward != Drop::kNever && policy.reshard_after_forward.has_value()) {
    rules.drop_after_forward = *policy.reshard_after_forward ? Drop::kAlways : Drop::kNever;
  }
  rules.prefetch = rules.prefetch && policy.prefetch;
  return rules;
}

// What of the policy decides which collectives a step has, and of which sizes.
std::string fingerprint(const Policy& policy) {
  const engine::Rules rules = rules_of(policy);
  return base::str("strategy ", train::row_of(policy.strategy).name, "\nparam_dtype ",
                   policy.precision.param_dtype, "\nreduce_dtype ", policy.precision.reduce_dtype,
                   "\nreshard_after_forward rule ", static_cast<int>(rules.drop_after_forward),
                   "\nprefetch ", rules.prefetch, "\n");
}

// Buffers are replicated in every strategy.
void broadcast_buffers(torch::nn::Module& model, const comm::World& world) {
  const at::NoGradGuard no_grad;
  for (const auto& buffer : model.named_buffers()) {
    if (!buffer.value().defined()) continue;
    at::Tensor flat = buffer.value().contiguous().view({-1});
    comm::broadcast(world.gather(), flat, "broadcast of buffer '" + buffer.key() + "'");
    buffer.value().copy_(flat.view(buffer.value().sizes()));
  }
}

// Gradients are read: of which all ranks have the same.
void check_window(engine::Schedule& schedule) {
  schedule.recover();
  TESSERA_CHECK_CONFIG(!schedule.window_is_open(),
                       "gradients are read in an open window: the last backward was under "
                       "sync_gradients(false), so they are not the mean over ranks yet. Give the "
                       "last micro-batch of a step sync_gradients(true).");
}

}  // namespace

Parallel parallelize(std::shared_ptr<torch::nn::Module> model, const comm::World& world,
                     const Policy& policy) {
  const bool shards = train::row_of(policy.strategy).shards_params;
  std::vector<train::PlannedSite> sites;
  // Replicated, units are buckets of the root; but inputs are cast where they are when sharded.
  std::vector<train::PlannedSite> cast_only;
  comm::all_or_none(world, [&] {
    check_policy(policy);
    TESSERA_CHECK_CONFIG(model != nullptr, "parallelize() of an empty module holder.");
    sites = shards ? train::plan_units(*model, policy.units)
                   : train::plan_buckets(*model, policy.first_bucket_bytes, policy.bucket_bytes);
    if (!shards && policy.units && policy.precision.cast_forward_inputs) {
      cast_only = train::plan_units(*model, policy.units);
      cast_only.erase(cast_only.begin());
    }
  });
  comm::check_same(world, "the model and the policy",
                   fingerprint(policy) + train::fingerprint(sites, *model));
  broadcast_buffers(*model, world);

  auto ledger = std::make_shared<engine::ByteLedger>();
  const engine::UnitContext context{world, policy.precision, ledger,
                                    engine::BufferPool::create(ledger)};
  auto schedule = std::make_shared<engine::Schedule>(world, rules_of(policy));
  std::vector<OwnedParam> owned;
  for (train::PlannedSite& planned : sites) {
    engine::Site& site = schedule->add_site(planned.name, *planned.point);
    for (train::PlannedUnit& unit : planned.units) {
      std::unique_ptr<engine::Unit> made;
      if (shards) {
        made = std::make_unique<fsdp::ShardedUnit>(unit.name, std::move(unit.params), context);
      } else {
        made = std::make_unique<ddp::ReplicatedUnit>(unit.name, std::move(unit.params), context);
      }
      for (OwnedParam& param : made->owned_params()) owned.push_back(std::move(param));
      schedule->add_unit(site, std::move(made));
      context.pool->trim();  // Units differ in size: what one needed would not serve the next.
    }
  }
  for (const train::PlannedSite& extra : cast_only) schedule->add_site(extra.name, *extra.point);
  if (policy.precision.cast_forward_inputs) schedule->set_input_cast(policy.precision.param_dtype);
  return Parallel(std::make_unique<Parallel::State>(
      Parallel::State{std::move(model), world, context, std::move(schedule), std::move(owned)}));
}

Parallel::Parallel(std::unique_ptr<State> state) : state_(std::move(state)) {}
Parallel::~Parallel() = default;
Parallel::Parallel(Parallel&&) noexcept = default;
Parallel& Parallel::operator=(Parallel&&) noexcept = default;

const std::vector<OwnedParam>& Parallel::owned_params() const { return state_->owned; }

Parallel::SyncScope::SyncScope(std::shared_ptr<engine::Schedule> schedule, bool last)
    : schedule_(std::move(schedule)), before_(schedule_->last_micro_batch()) {
  schedule_->set_last_micro_batch(last);
}

Parallel::SyncScope::~SyncScope() { schedule_->set_last_micro_batch(before_); }

Parallel::SyncScope Parallel::sync_gradients(bool is_last_micro_batch) {
  return SyncScope(state_->schedule, is_last_micro_batch);
}

double Parallel::clip_grad_norm(double max_norm) {
  check_window(*state_->schedule);
  return optim::clip_grad_norm(state_->owned, max_norm, [this](double sum) {
    return comm::sum_over_ranks(state_->world, sum);
  });
}

double Parallel::grad_norm() const {
  check_window(*state_->schedule);
  return optim::grad_norm(state_->owned,
                          [this](double sum) { return comm::sum_over_ranks(state_->world, sum); });
}

engine::ByteLedger& Parallel::ledger() { return *state_->context.ledger; }

int64_t Parallel::num_parameters() const {
  int64_t count = 0;
  for (const OwnedParam& param : state_->owned) {
    int64_t numel = 1;
    for (const int64_t size : param.shape()) numel *= size;
    count += numel;
  }
  return count;
}

const std::vector<std::unique_ptr<engine::Unit>>& Parallel::units() const {
  return state_->schedule->units();
}

}  // namespace tessera
