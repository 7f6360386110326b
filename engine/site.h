#ifndef ENGINE_SITE_H_
#define ENGINE_SITE_H_

// A Site is a module whose forward is hooked, with the units that live there: what
// engine/schedule.h moves around.

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/module_hook.h"
#include "engine/unit.h"

namespace tessera::engine {

class Schedule;
class Site;

// See [Note: end of a site]. Held by the hooks in the graph: it goes when the graph does.
struct Call {
  Site* site;
  bool has_aliases = false;  // of inputs
  bool spent = false;        // a backward that did not retain its graph has run: none will again
  // In the backward `graph_task`:
  int graph_task = -1;
  bool ended = false;

  void come_to(int task) {
    if (graph_task != task) ended = false;
    graph_task = task;
  }
  bool ended_in(int task) const { return graph_task == task && ended; }
};

class Site : public ForwardHook {
 public:
  Site(Schedule* schedule, std::string site_name, HookPoint* hook_point, bool root)
      : owner(schedule), name(std::move(site_name)), point(hook_point), is_root(root) {
    point->set_forward_hook(this);
  }
  ~Site() override { point->set_forward_hook(nullptr); }

  void before_forward() override;
  at::Tensor input(const at::Tensor& argument) override;
  void after_forward(const std::vector<at::Tensor>& outputs) override;
  void check_whole(const char* call) const override;
  void forward_failed() noexcept override;

  // Calls that a backward may still come to.
  std::vector<std::shared_ptr<Call>> live_calls() {
    std::vector<std::shared_ptr<Call>> live;
    for (const std::weak_ptr<Call>& weak : calls) {
      std::shared_ptr<Call> call = weak.lock();
      if (call != nullptr && !call->spent) live.push_back(std::move(call));
    }
    calls.assign(live.begin(), live.end());
    return live;
  }

  Schedule* owner;
  std::string name;
  HookPoint* point;
  bool is_root;
  std::vector<Unit*> units;
  std::optional<at::ScalarType> cast_to;          // floating-point inputs
  std::vector<std::shared_ptr<Call>> open_calls;  // forwards that run
  std::vector<std::weak_ptr<Call>> calls;
  bool entered = false;  // by the backward that runs
};

}  // namespace tessera::engine

#endif  // ENGINE_SITE_H_
