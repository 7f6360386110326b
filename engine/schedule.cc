#include "engine/schedule.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace tessera::engine {

Schedule::Schedule(comm::World world, Rules rules) : world_(std::move(world)), rules_(rules) {}

Schedule::~Schedule() {
  try {
    drop_all();
  } catch (const std::exception& e) {
    base::log_error(base::str("while parameters were put back: ", e.what()));
  }
}

Site& Schedule::add_site(std::string name, HookPoint& point) {
  TESSERA_CHECK_CONFIG(
      point.forward_hook() == nullptr, "module '", name,
      "' belongs to a model that was parallelized already. Call parallelize() once per model.");
  sites_.push_back(std::make_unique<Site>(this, std::move(name), &point, sites_.empty()));
  return *sites_.back();
}

Unit& Schedule::add_unit(Site& site, std::unique_ptr<Unit> unit) {
  site.units.push_back(unit.get());
  states_[unit.get()].site = &site;
  unit->set_grad_listener([this](Unit& u) { on_grad(u); });
  units_.push_back(std::move(unit));
  reduce_order_.clear();
  for (auto s = sites_.rbegin(); s != sites_.rend(); ++s) {
    for (Unit* u : (*s)->units) {
      if (u->trainable()) reduce_order_.push_back(u);
    }
  }
  return *units_.back();
}

bool Schedule::shards() const {
  return std::any_of(units_.begin(), units_.end(), [](const auto& u) { return u->shards(); });
}

void Schedule::set_input_cast(at::ScalarType dtype) {
  for (auto& site : sites_) site->cast_to = dtype;
}

// ---- forward

void Schedule::before_forward(Site& site) {
  if (computing_backward()) {  // Recomputed by a checkpoint: backward drops it.
    make_ready(site);
    return;
  }
  if (site.is_root) begin_step();
  make_ready(site);
  if (!in_forward_ || site.is_root) return;
  const size_t position = forward_order_.size();
  forward_order_.push_back(&site);
  as_learned_ =
      as_learned_ && position < learned_order_.size() && learned_order_[position] == &site;
  prefetch_forward();
}

void Schedule::begin_step() {
  recover();
  // What an earlier forward without a backward has left may be older than the last optimizer step.
  drop_all();
  in_forward_ = true;
  forward_order_.clear();
  as_learned_ = true;
}

void Schedule::prefetch_forward() {
  if (!rules_.prefetch || !as_learned_ || forward_order_.size() >= learned_order_.size()) return;
  ask_for(*learned_order_[forward_order_.size()]);
}

void Schedule::after_forward(Site& site, const std::vector<at::Tensor>& outputs) {
  if (computing_backward()) return;
  bool has_graph = false;
  for (const at::Tensor& output : outputs) {
    // A leaf (a parameter returned as it is) would keep the hook for ever.
    if (!at::GradMode::is_enabled() || !output.defined() || !output.requires_grad() ||
        output.is_leaf())
      continue;
    has_graph = true;
    output.register_hook(
        [weak = weak_from_this(), call = site.open_calls.back()](const at::Tensor&) {
          const std::shared_ptr<Schedule> schedule = weak.lock();
          // Gradients would stay on their rank, and parameters that were dropped after forward
          // could not be gathered.
          TESSERA_CHECK_CONFIG(schedule != nullptr,
                               "backward through a forward of a model whose Parallel is gone. Keep "
                               "what parallelize() returned until the last backward has ended.");
          schedule->enter_backward(*call);
        });
  }
  if (has_graph) site.calls.push_back(site.open_calls.back());
  if (site.is_root) {
    end_forward(has_graph);
    return;
  }
  const bool needed_first = has_graph && as_learned_ && !forward_order_.empty() &&
                            forward_order_.size() == learned_order_.size() &&
                            forward_order_.back() == &site;
  switch (rules_.drop_after_forward) {
    case Rules::Drop::kNever:
      if (!has_graph) drop(site);
      break;
    case Rules::Drop::kDefault:
      if (!needed_first) drop(site);
      break;
    case Rules::Drop::kAlways:
      drop(site);
      break;
  }
}

void Schedule::end_forward(bool has_graph) {
  in_forward_ = false;
  const bool learned_now = forward_order_ != learned_order_;
  if (learned_now) learned_order_ = forward_order_;
  if (!has_graph || rules_.drop_after_forward == Rules::Drop::kAlways) {
    drop_all();
    return;
  }
  if (rules_.drop_after_forward == Rules::Drop::kNever) return;
  // What was asked for by a wrong guess.
  for (auto& site : sites_) {
    const bool last =
        !learned_now && !forward_order_.empty() && forward_order_.back() == site.get();
    if (!site->is_root && !last) drop(*site);
  }
}

void Schedule::forward_failed(Site& site) noexcept {
  if (computing_backward())
    return;  // A recomputation that stops early, or the backward's own failure.
  // The outermost forward cleans up; when the user catches inside, the root's forward goes on.
  if (in_forward_ && !site.is_root) return;
  in_forward_ = false;
  try {
    drop_all();
  } catch (const std::exception& e) {
    base::log_error(base::str("after the forward of '", site.name, "' failed: ", e.what()));
  }
}

// ---- units of a site

void Schedule::ask_for(Site& site) {
  for (Unit* unit : site.units) {
    if (unit->param_state() == Unit::ParamState::kSharded) unit->unshard();
  }
}

void Schedule::make_ready(Site& site) {
  ask_for(site);
  for (Unit* unit : site.units) {
    if (unit->param_state() == Unit::ParamState::kGathering) unit->wait_unshard();
  }
}

void Schedule::drop(Site& site) {
  for (Unit* unit : site.units) unit->reshard();
}

void Schedule::drop_all() {
  std::exception_ptr first;
  for (const auto& unit : units_) {
    try {
      unit->reshard();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace tessera::engine
