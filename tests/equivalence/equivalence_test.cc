// Goal: every strategy trains as one process does, to the bit. Method: toy models, 1 to 4 ranks,
// with and without accumulation and clipping, several steps, against harness::Alone.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <tuple>

#include "tests/equivalence/trained.h"

namespace tessera::equivalence {
namespace {

constexpr int64_t kSteps = 4;

std::string name_of(Strategy strategy) {
  return strategy == Strategy::kReplicate ? "replicated" : "sharded";
}

std::string name_of(harness::Update update) {
  return update == harness::Update::kSgd ? "sgd" : "adamw";
}

std::string name_of(const Case& c) {
  return c.model + "_" + name_of(c.strategy) + "_" + std::to_string(c.ranks) + "ranks_" +
         std::to_string(c.micro_batches) + "micro_" + (c.clip ? "clipped_" : "") +
         name_of(c.update) + (c.bf16 ? "_bf16" : "");
}

std::vector<Case> cases(const std::vector<std::string>& models, bool bf16) {
  std::vector<Case> result;
  for (const std::string& model : models) {
    for (const Strategy strategy : {Strategy::kReplicate, Strategy::kFullShard}) {
      for (const int ranks : {1, 2, 3, 4}) {
        for (const int64_t micro_batches : {1, 3}) {
          for (const bool clip : {false, true}) {
            for (const auto update : {harness::Update::kSgd, harness::Update::kAdamW}) {
              result.push_back({model, strategy, ranks, micro_batches, clip, update, bf16});
            }
          }
        }
      }
    }
  }
  return result;
}

std::vector<std::string> all_models() {
  std::vector<std::string> names;
  for (const harness::ModelCase& model : harness::model_cases()) names.push_back(model.name);
  return names;
}

class Equivalence : public testing::TestWithParam<Case> {};

// Gradients, norms and parameters.
TEST_P(Equivalence, TrainsAsAlone) {
  const Trained expected = train_alone(GetParam(), kSteps);
  if (GetParam().clip) {
    for (const auto& step : expected.steps) ASSERT_GT(step.norm, kMaxNorm) << "must really clip";
  }
  expect_equal(train_on_ranks(GetParam(), kSteps), expected);
}

INSTANTIATE_TEST_SUITE_P(Fp32, Equivalence, testing::ValuesIn(cases(all_models(), false)),
                         [](const auto& test) { return name_of(test.param); });

INSTANTIATE_TEST_SUITE_P(Bf16, Equivalence, testing::ValuesIn(cases({"mlp"}, true)),
                         [](const auto& test) { return name_of(test.param); });

// What nobody uses has no gradient in any step and keeps its value, although weights decay.
TEST(EquivalenceOfUnused, HasNoGradientAndKeepsItsValue) {
  const std::vector<std::string> unused = {"unused",
                                           "block1.unused.weight",
                                           "block1.unused.bias",
                                           "block2.unused.weight",
                                           "block2.unused.bias",
                                           "block1.frozen.weight",
                                           "block2.frozen.bias"};
  const auto start = harness::model_case("partial").make(kSeed);
  harness::NamedTensors start_values;
  for (const auto& [name, param] : start->parameters()) start_values[name] = param.detach();
  for (const Strategy strategy : {Strategy::kReplicate, Strategy::kFullShard}) {
    Case c;
    c.model = "partial";
    c.strategy = strategy;
    c.ranks = 3;
    c.update = harness::Update::kAdamW;
    const Trained trained = train_on_ranks(c, kSteps);
    for (const std::string& name : unused) {
      SCOPED_TRACE(name_of(strategy) + " " + name);
      for (const auto& step : trained.steps) {
        const auto grad = step.grads.find(name);
        EXPECT_TRUE(grad == step.grads.end() || !grad->second.defined());
      }
      EXPECT_TRUE(at::equal(trained.params.at(name), start_values.at(name)));
    }
    EXPECT_FALSE(at::equal(trained.params.at("scale"), start_values.at("scale")));
  }
}

// Used by one rank or none, according to the step: the mean counts zeros for the others, and a step
// where nobody uses it leaves it alone.
TEST(EquivalenceOfUnused, OptionalParametersHaveAGradientInTheStepsThatUseThem) {
  for (const Strategy strategy : {Strategy::kReplicate, Strategy::kFullShard}) {
    Case c;
    c.model = "partial";
    c.strategy = strategy;
    c.ranks = 2;
    const Trained trained = train_on_ranks(c, 3);
    // Flags are set where (step + rank) % 3 == 1: by rank 1, by rank 0, by nobody.
    for (const char* name : {"optional", "block1.optional.weight", "block2.optional.bias"}) {
      SCOPED_TRACE(name_of(strategy) + " " + name);
      EXPECT_TRUE(trained.steps[0].grads.at(name).defined());
      EXPECT_TRUE(trained.steps[1].grads.at(name).defined());
      EXPECT_FALSE(trained.steps[2].grads.at(name).defined());
    }
  }
}

}  // namespace
}  // namespace tessera::equivalence
