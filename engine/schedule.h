#ifndef ENGINE_SCHEDULE_H_
#define ENGINE_SCHEDULE_H_

// The Schedule decides when units move: it runs around the forward of hooked modules (sites), on
// the way of gradients back through their outputs, and at the end of backward. One Schedule per
// parallelized model.
//
// One step, sharded:
//   forward of the root      leftovers of an earlier forward are dropped; the root's own units
//                            become whole and stay so
//   forward of a site        its units become whole; the next site's are asked for (by the order
//                            the first step taught); afterwards they are dropped, except the last
//                            site's, which backward needs first
//   backward into a site     its units become whole again; the site before is asked for
//   a unit's last gradient   its reduction is issued when its turn comes
//   end of a site            when an input has its gradient, all of the operations of the site have
//                            run: what it has not got by then will not come; it is dropped
//   end of backward          ranks agree which units and parameters had gradients; units with
//                            missing ones are reduced (zeros for those), all reductions are waited
//                            for, everything is dropped, .grad is set
//
// Replicated: the same with one site, the root.
//
// [Note: order of reductions] All ranks must issue reductions in one order, and a parameter unused
// on one rank makes its unit complete there only at the end of backward. So a complete unit waits
// for the units before it in an agreed order: at first that of the sites, backwards; after the
// first backward the one in which rank 0's units became complete. A unit whose site has no live
// graph is not waited for.
//
// [Note: end of a site] Every tensor argument of a site's forward (not one inside a container) that
// needs a gradient is replaced by an alias (or by its cast), made before the site's own operations.
// Autograd runs operations of a thread in the reverse order of their making, and accumulates into
// parameters before anything else; so when the first of the aliases has its gradient, everything
// the site made has run, and nothing will read its parameters again. Frozen parameters need this
// (they have no gradients to count), and parameters that a forward did not use (theirs do not
// come). A site none of whose arguments needs a gradient is dropped when its gradients are
// complete. One with several live forwards is dropped when all of them have ended. Else (no
// argument of that forward gets a gradient, a forward is not in this backward) at the end of
// backward.
//
// A wrong guess of what comes next costs time and memory, never a result. A forward that throws
// leaves every unit sharded. A backward that throws is cleaned up by the next forward or backward,
// since autograd tells nobody: the gradients of its window are dropped.
//
// Not supported, and said: a backward inside a backward; a site whose backward runs on some ranks
// only.
//
// Collective: forward and backward of the model are: all ranks run the same sites in the same
//             order.
// Stream:     the host waits for a unit's gather when the unit is needed, and for reductions at the
//             end of backward.

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/site.h"
#include "engine/unit.h"

namespace tessera::engine {

// What a strategy asks of the schedule. See train/strategy.h for the table.
struct Rules {
  // After forward: kNever, kDefault (all but the root and the last site, which backward needs
  // first) or kAlways.
  enum class Drop { kNever, kDefault, kAlways };
  Drop drop_after_forward = Drop::kDefault;
  // A site's units are dropped in backward at the site's end, see [Note: end of a site]; else at
  // the end of backward.
  bool drop_in_backward = true;
  // Every micro-batch's gradients are reduced (and summed where they are owned), else only the last
  // one's of a window.
  bool reduce_every_micro_batch = true;
  // Ask for the next unit while this one computes.
  bool prefetch = true;
};

class Schedule : public std::enable_shared_from_this<Schedule> {
 public:
  Schedule(comm::World world, Rules rules);
  // Takes the hooks off the modules and puts back what units own.
  ~Schedule();

  // The first site is the root: the module whose forward starts a step. Sites are added in the
  // order of the model's modules; `point` must outlive the schedule.
  Site& add_site(std::string name, HookPoint& point);
  Unit& add_unit(Site& site, std::unique_ptr<Unit> unit);
  // Floating-point tensors given to a site's forward are cast to `dtype` from now on.
  void set_input_cast(at::ScalarType dtype);

  // Some unit keeps only a part of its parameters between steps.
  bool shards() const;
  // In the order they were added.
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }

  // Whether the next backward ends a window of micro-batches.
  void set_last_micro_batch(bool last) { last_micro_batch_ = last; }
  bool last_micro_batch() const { return last_micro_batch_; }
  // The last backward did not end its window: gradients are not those of all ranks yet.
  bool window_is_open() const { return window_is_open_; }

  // Drops what a backward that failed has left. Called by itself before the next forward; a no-op
  // otherwise.
  void recover();

 private:
  friend class Site;
  struct UnitState {
    Site* site = nullptr;
    bool complete = false;  // in this backward: no gradient is to come
    bool issued = false;    // in this backward: its reduction
  };

  void before_forward(Site& site);
  void after_forward(Site& site, const std::vector<at::Tensor>& outputs);
  void forward_failed(Site& site) noexcept;
  void begin_step();
  void end_forward(bool has_graph);
  void prefetch_forward();

  void start_backward();
  void enter_backward(Call& call);
  void prefetch_backward(const Site& site);
  void on_input_grad(Call& call);
  void on_grad(Unit& unit);
  void complete(Unit& unit);
  void issue_in_turn();
  void issue(Unit& unit);
  void end_backward();
  std::vector<uint8_t> agree_on_used(bool reduced);
  void finish_reductions();
  void publish(const std::vector<uint8_t>& used);
  void agree_on_order();
  void forget_backward();

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
  std::unordered_map<const Unit*, UnitState> states_;
  bool last_micro_batch_ = true;
  bool window_is_open_ = false;

  // Forward.
  bool in_forward_ = false;           // of the root
  std::vector<Site*> forward_order_;  // of this step, so far
  std::vector<Site*> learned_order_;  // of the last whole forward
  bool as_learned_ = false;           // this step has followed it so far

  // Backward.
  int graph_task_ = -1;       // autograd's id of the backward that runs or has failed; -1 for none
  bool keeps_graph_ = false;  // that backward retains its graph
  std::weak_ptr<void> running_;   // alive while that backward has not ended
  size_t backward_position_ = 0;  // in forward_order_, of the site entered last
  std::vector<Unit*> reduce_order_;
  bool reduce_order_agreed_ = false;
  size_t reduce_cursor_ = 0;      // in reduce_order_: the next one to issue
  std::vector<Unit*> completed_;  // in this backward, in order
};

}  // namespace tessera::engine

#endif  // ENGINE_SCHEDULE_H_
