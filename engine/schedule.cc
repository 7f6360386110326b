#include "engine/schedule.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "comm/agreement.h"

namespace tessera::engine {

class Schedule::Site : public ForwardHook {
 public:
  Site(Schedule* schedule, std::string site_name, HookPoint* hook_point, bool root)
      : owner(schedule), name(std::move(site_name)), point(hook_point), is_root(root) {
    point->set_forward_hook(this);
  }
  ~Site() override { point->set_forward_hook(nullptr); }

  void before_forward() override { owner->before_forward(*this); }
  at::Tensor input(const at::Tensor& argument) override {
    if (!cast_to || !argument.defined() || !argument.is_floating_point()) return argument;
    return argument.to(*cast_to);
  }
  void after_forward(const std::vector<at::Tensor>& outputs) override {
    owner->after_forward(*this, outputs);
  }
  void forward_failed() noexcept override { owner->forward_failed(*this); }

  Schedule* owner;
  std::string name;
  HookPoint* point;
  bool is_root;
  std::vector<Unit*> units;
  std::optional<at::ScalarType> cast_to;  // floating-point inputs
  int64_t forwards = 0;                   // with a graph, whose backward has not ended
  bool entered = false;                   // by the backward that runs
};

Schedule::Schedule(comm::World world, Rules rules) : world_(std::move(world)), rules_(rules) {}

Schedule::~Schedule() = default;

Schedule::Site& Schedule::add_site(std::string name, HookPoint& point) {
  TESSERA_CHECK_CONFIG(point.forward_hook() == nullptr, "module '", name,
                       "' belongs to a model that was parallelized already. Call parallelize() once per model.");
  sites_.push_back(std::make_unique<Site>(this, std::move(name), &point, sites_.empty()));
  return *sites_.back();
}

Unit& Schedule::add_unit(Site& site, std::unique_ptr<Unit> unit) {
  site.units.push_back(unit.get());
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
  as_learned_ = as_learned_ && position < learned_order_.size() && learned_order_[position] == &site;
  prefetch_forward(site);
}

void Schedule::begin_step() {
  recover();
  // What an earlier forward without a backward has left may be older than the last optimizer step.
  drop_all();
  in_forward_ = true;
  forward_order_.clear();
  as_learned_ = true;
}

void Schedule::prefetch_forward(const Site&) {
  if (!rules_.prefetch || !as_learned_ || forward_order_.size() >= learned_order_.size()) return;
  ask_for(*learned_order_[forward_order_.size()]);
}

void Schedule::after_forward(Site& site, const std::vector<at::Tensor>& outputs) {
  if (computing_backward()) return;
  bool has_graph = false;
  if (at::GradMode::is_enabled()) {
    for (const at::Tensor& output : outputs) {
      if (!output.defined() || !output.requires_grad()) continue;
      has_graph = true;
      output.register_hook([weak = weak_from_this(), s = &site](const at::Tensor&) {
        // A graph may outlive the parallelized model; then nothing is left to do.
        if (const std::shared_ptr<Schedule> schedule = weak.lock()) schedule->enter_backward(*s);
      });
    }
  }
  if (has_graph) ++site.forwards;
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
    const bool last = !learned_now && !forward_order_.empty() && forward_order_.back() == site.get();
    if (!site->is_root && !last) drop(*site);
  }
}

void Schedule::forward_failed(Site& site) noexcept {
  // The outermost forward cleans up; when the user catches inside, the root's forward goes on.
  if (in_forward_ && !site.is_root) return;
  in_forward_ = false;
  try {
    drop_all();
  } catch (const std::exception& e) {
    base::log_error(base::str("after the forward of '", site.name, "' failed: ", e.what()));
  }
}

// ---- backward

bool Schedule::computing_backward() const {
  return graph_task_ != -1 && torch::autograd::get_current_graph_task_id() == graph_task_;
}

void Schedule::start_backward() {
  if (computing_backward()) return;
  recover();
  graph_task_ = torch::autograd::get_current_graph_task_id();
  backward_position_ = forward_order_.size();
  reduce_cursor_ = 0;
  completed_.clear();
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const std::shared_ptr<Schedule> schedule = weak.lock()) schedule->end_backward();
  });
}

void Schedule::enter_backward(Site& site) {
  start_backward();
  make_ready(site);
  if (!site.entered) {
    site.entered = true;
    for (Unit* unit : site.units) {
      if (unit->trainable() && !unit->in_backward()) unit->begin_backward();
    }
  }
  prefetch_backward(site);
}

void Schedule::prefetch_backward(const Site& site) {
  if (site.is_root) {
    // Backward leaves the root's last operations for the site that ran last.
    if (rules_.prefetch && backward_position_ > 0) ask_for(*forward_order_[backward_position_ - 1]);
    return;
  }
  size_t position = std::min(backward_position_, forward_order_.size());
  while (position > 0 && forward_order_[position - 1] != &site) --position;
  if (position == 0) return;  // Of another forward: no guess.
  backward_position_ = position - 1;
  if (rules_.prefetch && backward_position_ > 0) ask_for(*forward_order_[backward_position_ - 1]);
}

void Schedule::on_grad(Unit& unit) {
  if (!unit.in_backward()) {
    // Reached without passing the output of its site (a second output, a parameter used elsewhere).
    start_backward();
    unit.begin_backward();
    return;
  }
  if (unit.grads_complete()) on_complete(unit);
}

void Schedule::on_complete(Unit& unit) {
  if (std::find(completed_.begin(), completed_.end(), &unit) != completed_.end()) {
    TESSERA_CHECK(unit.grad_state() == Unit::GradState::kIdle, "a gradient of unit '", unit.name(),
                  "' arrived after its reduction was issued.");
    return;
  }
  completed_.push_back(&unit);
  if (reduces_now()) issue_in_turn();
  if (!rules_.drop_in_backward) return;
  for (auto& site : sites_) {
    if (std::find(site->units.begin(), site->units.end(), &unit) == site->units.end()) continue;
    const bool all = std::all_of(site->units.begin(), site->units.end(), [](const Unit* u) {
      return !u->trainable() || (u->in_backward() && u->grads_complete());
    });
    if (all) drop(*site);
  }
}

void Schedule::issue_in_turn() {
  const auto is_complete = [&](Unit* unit) {
    return std::find(completed_.begin(), completed_.end(), unit) != completed_.end();
  };
  // A unit that had no forward is not waited for: no rank will have its gradients.
  const auto is_expected = [&](Unit* unit) {
    for (auto& site : sites_) {
      if (site->forwards == 0) continue;
      if (std::find(site->units.begin(), site->units.end(), unit) != site->units.end()) return true;
    }
    return false;
  };
  while (reduce_cursor_ < reduce_order_.size()) {
    Unit* unit = reduce_order_[reduce_cursor_];
    const bool complete = is_complete(unit);
    if (!complete && is_expected(unit)) return;
    if (complete) issue(*unit);
    ++reduce_cursor_;
  }
}

void Schedule::issue(Unit& unit) {
  unit.reduce_grads();
  reducing_.push_back(&unit);
}

void Schedule::end_backward() {
  const bool reduced = reduces_now();
  if (reduced) {
    for (Unit* unit : reduce_order_) {
      const bool issued = std::find(reducing_.begin(), reducing_.end(), unit) != reducing_.end();
      if (unit->in_backward() && !issued) issue(*unit);
    }
    finish_reductions();
  }
  drop_all();
  publish(reduced);
  if (reduced && !reduce_order_agreed_) agree_on_order();
  for (auto& site : sites_) {
    if (site->entered && site->forwards > 0) --site->forwards;
    site->entered = false;
  }
  graph_task_ = -1;
}

void Schedule::finish_reductions() {
  std::vector<Unit*> units;
  units.swap(reducing_);
  std::exception_ptr first;
  for (Unit* unit : units) {
    try {
      unit->wait_grads();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

// A gradient is set where any rank had one (zeros counted for the others), so that all ranks take the same step; a
// parameter that no rank used keeps an undefined gradient.
void Schedule::publish(bool reduced) {
  std::vector<uint8_t> used;
  for (auto& unit : units_) {
    if (unit->in_backward()) unit->append_used(used);
  }
  if (reduced) comm::any_over_ranks(world_, used);
  const uint8_t* flags = used.data();
  for (auto& unit : units_) {
    if (!unit->in_backward()) continue;
    unit->publish(flags);
    flags += unit->params().size();
  }
}

// See [Note: order of reductions].
void Schedule::agree_on_order() {
  std::ostringstream mine;
  for (Unit* unit : completed_) {
    mine << std::find(reduce_order_.begin(), reduce_order_.end(), unit) - reduce_order_.begin() << ' ';
  }
  std::istringstream first(comm::texts_of_ranks(world_, mine.str())[0]);
  std::vector<Unit*> order;
  for (size_t i = 0; first >> i;) order.push_back(reduce_order_.at(i));
  for (Unit* unit : reduce_order_) {
    if (std::find(order.begin(), order.end(), unit) == order.end()) order.push_back(unit);
  }
  reduce_order_ = std::move(order);
  reduce_order_agreed_ = true;
}

void Schedule::recover() {
  if (graph_task_ == -1 || computing_backward()) return;
  base::log_warning("the last backward did not end; its gradients are dropped");
  graph_task_ = -1;
  for (auto& site : sites_) {
    site->entered = false;
    site->forwards = 0;
  }
  try {
    finish_reductions();
    drop_all();
  } catch (...) {
    for (auto& unit : units_) {
      if (unit->grad_state() == Unit::GradState::kIdle && unit->param_state() == Unit::ParamState::kSharded) unit->abandon_backward();
    }
    throw;
  }
  for (auto& unit : units_) unit->abandon_backward();
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
  for (auto& unit : units_) unit->reshard();
}

}  // namespace tessera::engine
