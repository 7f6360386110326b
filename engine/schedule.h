#ifndef ENGINE_SCHEDULE_H_
#define ENGINE_SCHEDULE_H_

// The Schedule decides when units move: it runs around the forward of hooked modules (sites), on the way of gradients
// back through their outputs, and at the end of backward. One Schedule per parallelized model.
//
// One step, sharded:
//   forward of the root    leftovers of an earlier forward are dropped; the root's own units become whole and stay
//   forward of a site      its units become whole; the next site's are asked for (by the order the first step taught);
//                          afterwards they are dropped, except the last site's, which backward needs first
//   backward into a site   its units become whole again; the site before is asked for
//   a unit's last gradient its reduction is issued when its turn comes; its site is dropped when all its units are there
//   end of backward        units with missing gradients are reduced (zeros for those), all reductions are waited for,
//                          everything is dropped, ranks agree which parameters had a gradient, .grad is set
// Replicated: the same with one site, the root.
//
// [Note: order of reductions] All ranks must issue reductions in one order, and a parameter unused on one rank makes its
// unit complete there only at the end of backward. So a complete unit waits for the units before it in an agreed order:
// at first that of the sites, backwards; after the first backward the one in which rank 0's units became complete.
//
// A wrong guess of what comes next costs time and memory, never a result. A forward or backward that throws leaves every
// unit sharded.
//
// Collective: forward and backward of the model are: all ranks run the same sites in the same order.
// Stream:     the host waits for a unit's gather when the unit is needed, and for reductions at the end of backward.

#include <memory>
#include <string>
#include <vector>

#include "engine/module_hook.h"
#include "engine/unit.h"

namespace tessera::engine {

// What a strategy asks of the schedule. See train/strategy.h for the table.
struct Rules {
  // After forward: kNever, kDefault (all but the root and the last site, which backward needs first) or kAlways.
  enum class Drop { kNever, kDefault, kAlways };
  Drop drop_after_forward = Drop::kDefault;
  // A site's units are dropped in backward as soon as all their gradients are there, else at its end.
  bool drop_in_backward = true;
  // Every micro-batch's gradients are reduced (and summed where they are owned), else only the last one's of a window.
  bool reduce_every_micro_batch = true;
  // Ask for the next unit while this one computes.
  bool prefetch = true;
};

class Schedule : public std::enable_shared_from_this<Schedule> {
 public:
  // A module whose forward is hooked, and the units that live there.
  class Site;

  Schedule(comm::World world, Rules rules);
  // Takes the hooks off the modules.
  ~Schedule();

  // The first site is the root: the module whose forward starts a step. Sites are added in the order of the model's
  // modules; `point` must outlive the schedule.
  Site& add_site(std::string name, HookPoint& point);
  Unit& add_unit(Site& site, std::unique_ptr<Unit> unit);
  // Floating-point tensors given to a site's forward are cast to `dtype` from now on.
  void set_input_cast(at::ScalarType dtype);

  // In the order they were added.
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }

  // Whether the next backward ends a window of micro-batches.
  void set_last_micro_batch(bool last) { last_micro_batch_ = last; }
  bool last_micro_batch() const { return last_micro_batch_; }

  // Drops what a backward that failed has left. Called by itself before the next forward; a no-op otherwise.
  void recover();

 private:
  void before_forward(Site& site);
  void after_forward(Site& site, const std::vector<at::Tensor>& outputs);
  void forward_failed(Site& site) noexcept;
  void begin_step();
  void end_forward(bool has_graph);
  void prefetch_forward(const Site& site);

  void start_backward();
  void enter_backward(Site& site);
  void prefetch_backward(const Site& site);
  void on_grad(Unit& unit);
  void on_complete(Unit& unit);
  void issue_in_turn();
  void issue(Unit& unit);
  void end_backward();
  void finish_reductions();
  void publish(bool reduced);
  void agree_on_order();

  bool reduces_now() const { return last_micro_batch_ || rules_.reduce_every_micro_batch; }
  bool computing_backward() const;
  void ask_for(Site& site);
  void make_ready(Site& site);
  void drop(Site& site);
  void drop_all();

  comm::World world_;
  Rules rules_;
  std::vector<std::unique_ptr<Site>> sites_;
  std::vector<std::unique_ptr<Unit>> units_;
  bool last_micro_batch_ = true;

  // Forward.
  bool in_forward_ = false;            // of the root
  std::vector<Site*> forward_order_;   // of this step, so far
  std::vector<Site*> learned_order_;   // of the last whole forward
  bool as_learned_ = false;            // this step has followed it so far

  // Backward.
  int graph_task_ = -1;                // autograd's id of the backward that runs; -1 for none
  size_t backward_position_ = 0;       // in forward_order_, of the site entered last
  std::vector<Unit*> reduce_order_;
  bool reduce_order_agreed_ = false;
  size_t reduce_cursor_ = 0;           // in reduce_order_: the next one to issue
  std::vector<Unit*> completed_;       // in this backward
  std::vector<Unit*> reducing_;        // issued and not waited for
};

}  // namespace tessera::engine

#endif  // ENGINE_SCHEDULE_H_
