#ifndef TRAIN_UNIT_PLAN_H_
#define TRAIN_UNIT_PLAN_H_

// Decides which parameters form a unit together. The user's rule picks modules; each picked
// module's parameters, less those of picked modules inside it, form its units, and the root keeps
// the rest:
//
//   - a parameter that is used in several picked modules (tied) belongs to the root, which is whole
//     during all of them
//   - parameters that differ in dtype or requires_grad go to sibling units of the same module
//
// The plan is the same on all ranks when the model is.

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

#include "engine/module_hook.h"
#include "engine/unit.h"

namespace tessera {

// Picks the modules that become units.
using UnitRule = std::function<bool(const torch::nn::Module&)>;

// Modules of the given types (holders declared by TESSERA_MODULE, or the types they contain).
template <typename... Modules>
UnitRule units_of();

namespace train {

// Parameters of one unit-to-be, in model order.
struct PlannedUnit {
  std::string name;
  std::vector<engine::UnitParam> params;
};

struct PlannedSite {
  std::string name;  // path of the module, "" for the root
  engine::HookPoint* point = nullptr;
  std::vector<PlannedUnit> units;
};

// The root's site first, then the picked modules in model order (those that keep no parameter are
// left out).
//
// Errors: ConfigError that names the module or the parameter: the root or a picked module was not
//         declared by TESSERA_MODULE (its forward cannot be hooked); the rule picks nothing (an
//         empty rule means: only the root); a parameter is not contiguous, is not on the CPU, or
//         has a gradient already.
std::vector<PlannedSite> plan_units(torch::nn::Module& root, const UnitRule& rule);

// The same parameters in buckets of at most `bucket_bytes` of gradients (a larger parameter has one
// to itself), in the order in which backward is expected to reach them: last ones first. The first
// bucket is small, so that its reduction starts early; a parameter of half a bucket or more has one
// to itself, so that the others do not wait for it. All of them belong to the root.
std::vector<PlannedSite> plan_buckets(torch::nn::Module& root, int64_t first_bucket_bytes,
                                      int64_t bucket_bytes);

// What all ranks must agree on: one line per unit and parameter with shape, dtype and
// requires_grad, and per buffer.
std::string fingerprint(const std::vector<PlannedSite>& sites, const torch::nn::Module& root);

}  // namespace train

// ---- implementation

namespace train::detail {

// What a holder contains, less the hooks: the module's own type.
template <typename Module, typename = void>
struct ImplOf {
  using type = Module;
};
template <typename Impl>
struct ImplOf<engine::Hooked<Impl>> {
  using type = Impl;
};
template <typename Holder>
struct ImplOf<Holder, std::void_t<typename Holder::ContainedType>> {
  using type = typename ImplOf<typename Holder::ContainedType>::type;
};

}  // namespace train::detail

template <typename... Modules>
UnitRule units_of() {
  return [](const torch::nn::Module& module) {
    return (
        (dynamic_cast<const typename train::detail::ImplOf<Modules>::type*>(&module) != nullptr) ||
        ...);
  };
}

}  // namespace tessera

#endif  // TRAIN_UNIT_PLAN_H_
