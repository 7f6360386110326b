// The half of the Schedule that runs in backward.

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "comm/agreement.h"
#include "engine/schedule.h"

namespace tessera::engine {

bool Schedule::computing_backward() const {
  return graph_task_ != -1 && torch::autograd::get_current_graph_task_id() == graph_task_;
}

void Schedule::start_backward() {
  if (computing_backward()) return;
  TESSERA_CHECK_CONFIG(running_.expired(),
                       "a backward of this model inside a backward of it (a gradient penalty, a "
                       "re-entrant checkpoint): not supported. Use one backward.");
  recover();
  graph_task_ = torch::autograd::get_current_graph_task_id();
  keeps_graph_ = torch::autograd::get_current_graph_task_keep_graph();
  backward_position_ = forward_order_.size();
  auto running = std::make_shared<int>(graph_task_);
  running_ = running;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), running] {
    if (const std::shared_ptr<Schedule> schedule = weak.lock()) schedule->end_backward();
  });
}

void Schedule::enter_backward(Call& call) {
  start_backward();
  // An input that the forward passed on: its gradient is there when the site has ended.
  if (call.ended_in(graph_task_)) return;
  call.come_to(graph_task_);
  Site& site = *call.site;
  make_ready(site);
  if (!site.entered) {
    site.entered = true;
    for (Unit* unit : site.units) {
      if (unit->trainable() && !unit->in_backward()) unit->begin_backward();
    }
  }
  prefetch_backward(site);
}

void Schedule::on_input_grad(Call& call) {
  // Without an output's gradient the site did not run in this backward.
  if (!computing_backward() || !call.site->entered || call.ended_in(graph_task_)) return;
  call.come_to(graph_task_);
  call.ended = true;
  for (const std::shared_ptr<Call>& other : call.site->live_calls()) {
    if (!other->ended_in(graph_task_)) return;  // May be part of this backward, and still to come.
  }
  for (Unit* unit : call.site->units) {
    if (unit->trainable()) complete(*unit);
  }
  if (rules_.drop_in_backward) drop(*call.site);
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
  start_backward();
  if (!unit.in_backward()) {
    // Reached without passing the output of its site (a second output, a parameter used elsewhere).
    unit.begin_backward();
    return;
  }
  TESSERA_CHECK(!states_[&unit].issued, "a gradient of unit '", unit.name(),
                "' arrived after its reduction was issued.");
  if (!unit.grads_complete()) return;
  complete(unit);
  if (!rules_.drop_in_backward) return;
  // Where the end of the site will be seen, it is waited for. See [Note: end of a site].
  Site& site = *states_[&unit].site;
  for (const std::shared_ptr<Call>& call : site.live_calls()) {
    if (call->has_aliases) return;
  }
  const bool done = std::all_of(site.units.begin(), site.units.end(), [&](const Unit* u) {
    return u->trainable() && states_[u].complete;
  });
  if (done) drop(site);
}

void Schedule::complete(Unit& unit) {
  UnitState& state = states_[&unit];
  if (state.complete) return;
  state.complete = true;
  completed_.push_back(&unit);
  if (reduces_now()) issue_in_turn();
}

void Schedule::issue_in_turn() {
  // A unit whose graph is gone is not waited for: its gradients will not come, on any rank.
  const auto is_expected = [&](Unit* unit) { return !states_[unit].site->live_calls().empty(); };
  while (reduce_cursor_ < reduce_order_.size()) {
    Unit* unit = reduce_order_[reduce_cursor_];
    const UnitState& state = states_[unit];
    if (!state.complete && is_expected(unit)) return;
    if (state.complete && !state.issued) issue(*unit);
    ++reduce_cursor_;
  }
}

void Schedule::issue(Unit& unit) {
  unit.reduce_grads();
  states_[&unit].issued = true;
}

void Schedule::end_backward() {
  const bool reduced = reduces_now();
  const std::vector<uint8_t> used = agree_on_used(reduced);
  if (reduced) {
    for (Unit* unit : reduce_order_) {
      if (unit->in_backward() && !states_[unit].issued) issue(*unit);
    }
    finish_reductions();
  }
  drop_all();
  publish(used);
  if (reduced && !reduce_order_agreed_) agree_on_order();
  // The graph itself may live on: in a loss that the user keeps.
  for (auto& site : sites_) {
    for (const std::shared_ptr<Call>& call : site->live_calls()) {
      if (call->graph_task == graph_task_ && !keeps_graph_) call->spent = true;
    }
  }
  forget_backward();
  window_is_open_ = !last_micro_batch_;
}

// Per trainable unit: whether it is in this backward, whether it is not, and per parameter whether
// it has a gradient. A gradient is set where any rank had one (zeros counted for the others), so
// that all ranks take the same step; a parameter that no rank used keeps an undefined gradient.
std::vector<uint8_t> Schedule::agree_on_used(bool reduced) {
  std::vector<uint8_t> flags;
  for (const auto& unit : units_) {
    if (!unit->trainable()) continue;
    flags.push_back(unit->in_backward() ? 1 : 0);
    flags.push_back(unit->in_backward() ? 0 : 1);
    if (unit->in_backward()) {
      unit->append_used(flags);
    } else {
      flags.insert(flags.end(), unit->params().size(), 0);
    }
  }
  if (!reduced) return flags;
  comm::any_over_ranks(world_, flags);
  size_t at = 0;
  for (const auto& unit : units_) {
    if (!unit->trainable()) continue;
    TESSERA_CHECK_CONFIG(
        flags[at] + flags[at + 1] == 1, "the backward of unit '", unit->name(),
        "' ran on some ranks and not on others. All ranks must run the same units: let each rank's "
        "loss depend on every output (add 0 * output.sum() where a batch has no targets for it).");
    at += 2 + unit->params().size();
  }
  return flags;
}

void Schedule::finish_reductions() {
  std::exception_ptr first;
  for (const auto& unit : units_) {
    if (unit->grad_state() != Unit::GradState::kReducing) continue;
    try {
      unit->wait_grads();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

void Schedule::publish(const std::vector<uint8_t>& used) {
  const uint8_t* flags = used.data();
  for (const auto& unit : units_) {
    if (!unit->trainable()) continue;
    if (unit->in_backward()) unit->publish(flags + 2);
    flags += 2 + unit->params().size();
  }
}

void Schedule::forget_backward() {
  for (auto& site : sites_) site->entered = false;
  for (auto& [unit, state] : states_) {
    state.complete = false;
    state.issued = false;
  }
  completed_.clear();
  reduce_cursor_ = 0;
  graph_task_ = -1;
  running_.reset();
}

// See [Note: order of reductions].
void Schedule::agree_on_order() {
  std::ostringstream mine;
  for (Unit* unit : completed_) {
    mine << std::find(reduce_order_.begin(), reduce_order_.end(), unit) - reduce_order_.begin()
         << ' ';
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
  if (graph_task_ == -1 || !running_.expired()) return;
  base::log_warning("the last backward did not end; the gradients of its window are dropped");
  forget_backward();
  std::exception_ptr first;
  for (const auto step : {&Schedule::finish_reductions, &Schedule::drop_all}) {
    try {
      (this->*step)();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  for (const auto& unit : units_) unit->abandon_backward();
  if (first) std::rethrow_exception(first);
}

}  // namespace tessera::engine
