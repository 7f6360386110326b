// Goal: every parameter of any model ends up in exactly one unit, the right one, and a model that
// cannot be planned is refused by name. Method: small models, expected plans by hand.

#include "train/unit_plan.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "base/error.h"
#include "tests/base/thrown.h"

namespace tessera::train {
namespace {

using torch::nn::Linear;
using torch::nn::LinearOptions;

// A block with one matrix [out, in] and, inside it, maybe another block.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t in, int64_t out = 2)
      : weight(register_parameter("weight", at::zeros({out, in}))) {}
  at::Tensor forward(at::Tensor x) { return x; }
  at::Tensor weight;
};
TESSERA_MODULE(Block);

struct PlainImpl : torch::nn::Module {
  PlainImpl() : weight(register_parameter("weight", at::zeros({3}))) {}
  at::Tensor forward(at::Tensor x) { return x; }
  at::Tensor weight;
};
TORCH_MODULE(Plain);

// Filled by the tests.
struct RootImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) { return x; }
};
TESSERA_MODULE(Root);

struct PlainRootImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) { return x; }
};
TORCH_MODULE(PlainRoot);

// "site[unit: parameter parameter; unit: ...] ..."
std::string shown(const std::vector<PlannedSite>& sites) {
  std::string text;
  for (const PlannedSite& site : sites) {
    text += (text.empty() ? "" : " ") + site.name + "[";
    for (size_t u = 0; u < site.units.size(); ++u) {
      text += (u == 0 ? "" : "; ") + site.units[u].name + ":";
      for (const auto& param : site.units[u].params) text += " " + param.name;
    }
    text += "]";
  }
  return text;
}

std::string error_of(torch::nn::Module& root, const UnitRule& rule) {
  return thrown<ConfigError>([&] { plan_units(root, rule); });
}

TEST(UnitPlanTest, EachPickedModuleIsAUnitAndTheRootKeepsTheRest) {
  Root root;
  root->register_parameter("scale", at::zeros({2}));
  root->register_module("a", Block(3));
  root->register_module("plain", Plain());
  root->register_module("b", Block(4));
  const auto sites = plan_units(*root, units_of<Block>());
  EXPECT_EQ(shown(sites), "[root: scale plain.weight] a[a: a.weight] b[b: b.weight]");
  for (const PlannedSite& site : sites) EXPECT_NE(site.point, nullptr);
  EXPECT_EQ(shown(plan_units(*root, nullptr)), "[root: scale a.weight plain.weight b.weight]");
}

TEST(UnitPlanTest, APickedModuleInsideAnotherTakesItsOwnParameters) {
  Root root;
  Block outer(3);
  Root wrapper;
  wrapper->register_module("inner", Block(5));
  wrapper->register_parameter("bias", at::zeros({1}));
  outer->register_module("wrapper", wrapper);
  root->register_module("outer", outer);
  root->register_module("outer2", Block(1));  // a name that begins like another
  EXPECT_EQ(shown(plan_units(*root, units_of<Block>())),
            "[] outer[outer: outer.weight outer.wrapper.bias] "
            "outer.wrapper.inner[outer.wrapper.inner: outer.wrapper.inner.weight] "
            "outer2[outer2: outer2.weight]");
}

TEST(UnitPlanTest, RulesMayNameHoldersOrImplementations) {
  Root root;
  root->register_module("a", Block(3));
  const std::string expected = "[] a[a: a.weight]";
  EXPECT_EQ(shown(plan_units(*root, units_of<Block>())), expected);
  EXPECT_EQ(shown(plan_units(*root, units_of<BlockImpl>())), expected);
  EXPECT_EQ(shown(plan_units(*root, (units_of<Plain, Block>()))), expected);
}

TEST(UnitPlanTest, ATiedParameterOfTwoUnitsBelongsToTheRootAndOfOneUnitStaysThere) {
  Root root;
  Block a(3), b(3);
  root->register_module("a", a);
  root->register_module("b", b);
  b->register_parameter("shared", a->weight);
  EXPECT_EQ(shown(plan_units(*root, units_of<Block>())), "[root: a.weight] b[b: b.weight]")
      << "a keeps no parameter and is left out";
  Root within;
  Block c(3);
  within->register_module("c", c);
  c->register_parameter("again", c->weight);
  EXPECT_EQ(shown(plan_units(*within, units_of<Block>())), "[] c[c: c.weight]");
}

TEST(UnitPlanTest, AModuleRegisteredTwiceIsOneUnit) {
  Root root;
  Block a(3);
  root->register_module("a", a);
  root->register_module("again", a);
  // Its parameter is used at two places: whole during both.
  EXPECT_EQ(shown(plan_units(*root, units_of<Block>())), "[root: a.weight]");
}

TEST(UnitPlanTest, FrozenParametersAndOtherDtypesGoToSiblings) {
  Root root;
  Block a(3);
  a->register_parameter("frozen", at::zeros({2}), /*requires_grad=*/false);
  a->register_parameter("double", at::zeros({2}, at::kDouble));
  a->register_parameter("last", at::zeros({2}));
  root->register_module("a", a);
  EXPECT_EQ(shown(plan_units(*root, units_of<Block>())),
            "[] a[a: a.weight a.last; a#1: a.frozen; a#2: a.double]");
}

TEST(UnitPlanTest, ParametersWithoutDimensionsOrElementsArePlannedLikeOthers) {
  Root root;
  root->register_parameter("scalar", at::zeros({}));
  root->register_parameter("empty", at::zeros({0, 3}));
  EXPECT_EQ(shown(plan_units(*root, nullptr)), "[root: scalar empty]");
}

TEST(UnitPlanTest, ModulesThatCannotBeHookedAreRefusedByNameAndType) {
  Root root;
  root->register_module("plain", Plain());
  root->register_module("a", Block(3));
  const std::string plain = error_of(*root, units_of<Plain>());
  EXPECT_TRUE(contains(plain, "module 'plain' (type ")) << plain;
  EXPECT_TRUE(contains(plain, "TESSERA_MODULE(Name)")) << plain;

  PlainRoot plain_root;
  plain_root->register_module("a", Block(3));
  const std::string text = error_of(*plain_root, units_of<Block>());
  EXPECT_TRUE(contains(text, "the model itself (type ")) << text;

  Root with_shared;
  with_shared->register_module("made", std::make_shared<BlockImpl>(3));
  const std::string made = error_of(*with_shared, units_of<Block>());
  EXPECT_TRUE(contains(made, "module 'made'")) << made;
  EXPECT_TRUE(contains(made, "make_shared<NameImpl>")) << made;
}

TEST(UnitPlanTest, ARuleThatPicksNothingIsRefused) {
  Root root;
  root->register_parameter("scale", at::zeros({2}));
  const std::string text = error_of(*root, units_of<Block>());
  EXPECT_TRUE(contains(text, "picks no module")) << text;
}

TEST(UnitPlanTest, ParametersThatCannotBePackedAreRefusedByName) {
  Root transposed;
  transposed->register_parameter("turned", at::zeros({3, 4}).t());
  const std::string text = error_of(*transposed, nullptr);
  EXPECT_TRUE(contains(text, "parameter 'turned' is not contiguous")) << text;
  EXPECT_TRUE(contains(text, "[1, 4]")) << "its strides: " << text;

  Root with_grad;
  Block a(3);
  with_grad->register_module("a", a);
  a->weight.mutable_grad() = at::zeros({2, 3});
  const std::string grad = error_of(*with_grad, nullptr);
  EXPECT_TRUE(contains(grad, "parameter 'a.weight' has a gradient already")) << grad;
  EXPECT_EQ(thrown<ConfigError>([&] { plan_buckets(*with_grad, 100, 100); }), grad);
}

// Sizes in bytes: a 24, b 32, c 40, d 8; backward is expected to reach d first.
TEST(UnitPlanTest, BucketsAreFilledFromTheLastParameterUpToTheirLimits) {
  Root root;
  root->register_module("a", Block(3));
  root->register_module("b", Block(4));
  root->register_module("c", Block(5));
  root->register_module("d", Block(1));
  const auto buckets = [&](int64_t first, int64_t size) {
    return shown(plan_buckets(*root, first, size));
  };
  EXPECT_EQ(buckets(1000, 1000), "[bucket 0: d.weight c.weight b.weight a.weight]");
  EXPECT_EQ(buckets(1, 1),
            "[bucket 0: d.weight; bucket 1: c.weight; bucket 2: b.weight; bucket 3: a.weight]");
  EXPECT_EQ(buckets(48, 100), "[bucket 0: d.weight c.weight; bucket 1: b.weight a.weight]");
  EXPECT_EQ(buckets(47, 1000), "[bucket 0: d.weight; bucket 1: c.weight b.weight a.weight]");
  EXPECT_EQ(buckets(8, 95),
            "[bucket 0: d.weight; bucket 1: c.weight b.weight; bucket 2: a.weight]");
}

// Of 80 bytes c is half: neither d before it nor a and b behind it wait for it.
TEST(UnitPlanTest, AParameterOfHalfABucketHasOneToItself) {
  Root root;
  root->register_module("a", Block(3));
  root->register_module("b", Block(4));
  root->register_module("c", Block(5));
  root->register_module("d", Block(1));
  EXPECT_EQ(shown(plan_buckets(*root, 80, 80)),
            "[bucket 0: d.weight; bucket 1: c.weight; bucket 2: b.weight a.weight]");
}

TEST(UnitPlanTest, ABucketHoldsOneKind) {
  Root root;
  root->register_parameter("a", at::zeros({2}));
  root->register_parameter("frozen", at::zeros({2}), /*requires_grad=*/false);
  root->register_parameter("b", at::zeros({2}));
  EXPECT_EQ(shown(plan_buckets(*root, 1000, 1000)), "[bucket 0: b a; bucket 1: frozen]");
}

TEST(UnitPlanTest, TheFingerprintTellsNamesShapesDtypesAndFreezing) {
  const auto print = [](at::Tensor tensor, bool trained = true, const std::string& name = "p") {
    Root root;
    root->register_parameter(name, std::move(tensor), trained);
    return fingerprint(plan_units(*root, nullptr), *root);
  };
  const std::string base = print(at::zeros({2, 3}));
  EXPECT_EQ(base, print(at::ones({2, 3}))) << "values may differ";
  EXPECT_NE(base, print(at::zeros({3, 2})));
  EXPECT_NE(base, print(at::zeros({2, 3}, at::kDouble)));
  EXPECT_NE(base, print(at::zeros({2, 3}), false));
  EXPECT_NE(base, print(at::zeros({2, 3}), true, "q"));
}

}  // namespace
}  // namespace tessera::train
