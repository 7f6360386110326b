// Goal: sharded units are whole only while they are needed, prefetch the next one and never
// another, and what is left between steps is this rank's slices in the user's own tensors. Method:
// the states of all units as seen from inside a block's forward, and the parameters outside.

#include "fsdp/sharded_unit.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <optional>
#include <set>

#include "base/error.h"
#include "tests/base/thrown.h"
#include "tests/engine/probe_model.h"
#include "tests/harness/ranks.h"

namespace tessera::fsdp {
namespace {

using engine::Bytes;
using engine::input_of;
using engine::loss_of;
using engine::ProbeBlock;
using engine::ProbeModel;
using engine::Unit;
using harness::run_ranks;
using ParamState = Unit::ParamState;

// States of the units, in the order root, block0, block1, block2, as seen inside block `i`.
using Seen = std::vector<std::vector<ParamState>>;

void watch(ProbeModel& model, const Parallel& parallel, Seen& seen) {
  for (ProbeBlock& block : model->blocks) {
    block->inside = [&] {
      seen.emplace_back();
      for (const auto& unit : parallel.units()) seen.back().push_back(unit->param_state());
    };
  }
}

int count_not_sharded(const std::vector<ParamState>& states) {
  int count = 0;
  for (size_t u = 1; u < states.size(); ++u) count += states[u] != ParamState::kSharded ? 1 : 0;
  return count;
}

Policy policy() { return engine::policy_of(Strategy::kFullShard); }

constexpr int kSizes[] = {1, 2, 3, 4};

TEST(ShardedUnitTest, OutsideOfStepsTheUsersTensorsAreOneDimensionalSlices) {
  for (const int size : kSizes) {
    run_ranks(size, [](comm::World& world) {
      ProbeModel model;
      const engine::Tensors whole = engine::values_of(model);
      std::vector<const void*> identities;
      for (const at::Tensor& p : model->parameters()) {
        identities.push_back(p.unsafeGetTensorImpl());
      }
      Parallel parallel = parallelize(model, world, policy());
      const auto check = [&] {
        size_t i = 0;
        for (const at::Tensor& p : model->parameters()) {
          EXPECT_EQ(p.unsafeGetTensorImpl(), identities[i++]) << "the user's own tensor";
          EXPECT_EQ(p.dim(), 1);
          EXPECT_TRUE(p.is_leaf() && p.requires_grad());
        }
      };
      check();
      engine::expect_values(parallel, whole, "at first");
      loss_of(model(input_of(0, world.rank()))).backward();
      check();
      {
        const at::NoGradGuard no_grad;
        model(input_of(0, world.rank()));
      }
      check();
      engine::expect_values(parallel, whole, "unchanged by a step without an optimizer");
    });
  }
}

TEST(ShardedUnitTest, OwnedPartsAreTheLayoutsAndArePrimary) {
  run_ranks(3, [](comm::World& world) {
    ProbeModel model;
    Parallel parallel = parallelize(model, world, policy());
    size_t i = 0;
    for (const auto& unit : parallel.units()) {
      const auto& layout = dynamic_cast<const ShardedUnit&>(*unit).layout();
      EXPECT_EQ(layout.num_shards(), 3);
      for (int64_t p = 0; p < layout.num_params(); ++p) {
        const OwnedParam& owned = parallel.owned_params()[i++];
        EXPECT_EQ(owned.name(), unit->params()[p].name);
        EXPECT_TRUE(owned.elements() == owned.primary());
        EXPECT_TRUE(owned.elements() == layout.shard_in_param(p, world.rank()));
        EXPECT_EQ(owned.value().numel(), owned.elements().size());
      }
    }
    EXPECT_EQ(i, parallel.owned_params().size());
  });
}

TEST(ShardedUnitTest, RanksStartFromTheValuesOfRank0) {
  run_ranks(3, [](comm::World& world) {
    ProbeModel model;
    const engine::Tensors of_rank_0 = engine::values_of(model);
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor& p : model->parameters()) p.add_(world.rank());
    }
    const Parallel parallel = parallelize(model, world, policy());
    engine::expect_values(parallel, of_rank_0, "of rank 0");
  });
}

TEST(ShardedUnitTest, AtMostTheCurrentBlockAndTheNextAreNotSharded) {
  for (const int size : kSizes) {
    run_ranks(size, [](comm::World& world) {
      ProbeModel model;
      Parallel parallel = parallelize(model, world, policy());
      ASSERT_EQ(parallel.units().size(), 4u);
      EXPECT_EQ(parallel.units()[0]->name(), "root");
      for (int step = 0; step < 3; ++step) {
        Seen seen;
        watch(model, parallel, seen);
        loss_of(model(input_of(step, world.rank()))).backward();
        ASSERT_EQ(seen.size(), 3u);
        for (int block = 0; block < 3; ++block) {
          EXPECT_EQ(seen[block][0], ParamState::kReady) << "the root stays";
          EXPECT_EQ(seen[block][block + 1], ParamState::kReady);
          // Nothing is known of the order in the first step.
          const bool prefetches = step > 0 && block < 2;
          EXPECT_EQ(count_not_sharded(seen[block]), prefetches ? 2 : 1);
          if (prefetches) {
            EXPECT_NE(seen[block][block + 2], ParamState::kSharded) << "the next one is on its way";
          }
        }
      }
    });
  }
}

TEST(ShardedUnitTest, WithoutPrefetchOnlyTheCurrentBlockIsWhole) {
  run_ranks(2, [](comm::World& world) {
    ProbeModel model;
    Policy p = policy();
    p.prefetch = false;
    Parallel parallel = parallelize(model, world, p);
    for (int step = 0; step < 3; ++step) {
      Seen seen;
      watch(model, parallel, seen);
      loss_of(model(input_of(step, world.rank()))).backward();
      for (int block = 0; block < 3; ++block) EXPECT_EQ(count_not_sharded(seen[block]), 1);
    }
  });
}

struct AfterForward {
  std::optional<bool> reshard;
  std::vector<ParamState> first_step, later_steps;
};

TEST(ShardedUnitTest, ThePolicySaysWhatStaysWholeAfterForward) {
  const auto s = ParamState::kSharded;
  const auto r = ParamState::kReady;
  const std::vector<AfterForward> rows = {
      // The root, and the last block once the order is known.
      {std::nullopt, {r, s, s, s}, {r, s, s, r}},
      {true, {s, s, s, s}, {s, s, s, s}},
      {false, {r, r, r, r}, {r, r, r, r}},
  };
  for (const AfterForward& row : rows) {
    run_ranks(2, [&](comm::World& world) {
      ProbeModel model;
      Policy p = policy();
      p.reshard_after_forward = row.reshard;
      Parallel parallel = parallelize(model, world, p);
      for (int step = 0; step < 3; ++step) {
        const at::Tensor loss = loss_of(model(input_of(step, world.rank())));
        std::vector<ParamState> states;
        for (const auto& unit : parallel.units()) states.push_back(unit->param_state());
        EXPECT_EQ(states, step == 0 ? row.first_step : row.later_steps) << "step " << step;
        loss.backward();
        engine::expect_at_rest(parallel);
        const engine::Tensors truth = engine::mean_over_ranks(2, [&](ProbeModel& alone, int rank) {
          loss_of(alone(input_of(step, rank))).backward();
        });
        engine::expect_grads(parallel, truth, "step " + std::to_string(step));
        engine::clear_grads(parallel);
      }
    });
  }
}

// Another order than the one of the step before: guesses are wrong, results are not.
struct ShuffledImpl : torch::nn::Module {
  ShuffledImpl() : inner(register_module("inner", ProbeModel())) {}
  at::Tensor forward(at::Tensor x, int64_t step) {
    const int orders[][3] = {{0, 1, 2}, {2, 1, 0}, {1, 1, 0}, {2, 2, 2}};
    for (const int i : orders[step % 4]) x = inner->blocks[i](x);
    return x;
  }
  ProbeModel inner;
};
TESSERA_MODULE(Shuffled);

TEST(ShardedUnitTest, AnOrderOfBlocksThatChangesCostsNoCorrectness) {
  run_ranks(3, [](comm::World& world) {
    Shuffled model;
    Parallel parallel = parallelize(model, world, policy());
    for (int step = 0; step < 9; ++step) {
      loss_of(model(input_of(step, world.rank()), step)).backward();
      engine::expect_at_rest(parallel);
      engine::Tensors mean;
      for (int rank = 0; rank < 3; ++rank) {
        Shuffled alone;
        loss_of(alone(input_of(step, rank), step)).backward();
        for (const auto& param : alone->named_parameters()) {
          at::Tensor& total = mean[param.key()];
          const at::Tensor grad = param.value().grad();
          if (grad.defined()) total = total.defined() ? total + grad : grad;
        }
      }
      for (auto& [name, grad] : mean) {
        if (grad.defined()) grad = grad / 3;
      }
      engine::expect_grads(parallel, mean, "step " + std::to_string(step));
      engine::clear_grads(parallel);
    }
  });
}

// bf16 in forward and backward, fp32 slices outside.
TEST(ShardedUnitTest, UnderACastPolicyParametersAreBf16InsideAndFp32Outside) {
  run_ranks(2, [](comm::World& world) {
    ProbeModel model;
    Policy p = policy();
    p.precision = precision::bf16();
    Parallel parallel = parallelize(model, world, p);
    std::set<at::ScalarType> inside;
    model->blocks[1]->inside = [&] {
      for (const at::Tensor& param : model->blocks[1]->parameters()) {
        inside.insert(param.scalar_type());
      }
    };
    for (int step = 0; step < 2; ++step) {
      loss_of(model(input_of(step, world.rank())).to(at::kFloat)).backward();
      for (const at::Tensor& param : model->parameters()) {
        EXPECT_EQ(param.scalar_type(), at::kFloat);
        EXPECT_EQ(param.grad().scalar_type(), at::kFloat);
        EXPECT_EQ(param.grad().numel(), param.numel());
      }
    }
    EXPECT_EQ(inside, std::set<at::ScalarType>{at::kBFloat16});
    EXPECT_EQ(parallel.ledger().live(Bytes::kFullParams), 0);
  });
}

TEST(ShardedUnitTest, AGradientOfAnotherSizeThanTheSliceIsRefusedByName) {
  run_ranks(1, [](comm::World& world) {
    ProbeModel model;
    Parallel parallel = parallelize(model, world, policy());
    const at::Tensor loss = loss_of(model(input_of(0, 0)));
    const at::Tensor& w1 = model->blocks[1]->named_parameters()["w1"];
    ASSERT_EQ(w1.dim(), 1) << "sharded between its forward and backward";
    at::Tensor(w1).mutable_grad() = at::zeros({w1.numel() + 1});
    const std::string text = thrown<ConfigError>([&] { loss.backward(); });
    EXPECT_TRUE(contains(text, "the gradient of parameter 'block1.w1'")) << text;
  });
}

// The gradient is an ordinary leaf gradient: C++ zero_grad(false) detaches it in place.
TEST(ShardedUnitTest, GradientsAreNoViewsInAutogradsEyes) {
  run_ranks(2, [](comm::World& world) {
    ProbeModel model;
    Parallel parallel = parallelize(model, world, policy());
    loss_of(model(input_of(0, world.rank()))).backward();
    for (const at::Tensor& param : model->parameters()) {
      EXPECT_FALSE(param.grad().is_view());
      EXPECT_FALSE(param.grad().requires_grad());
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp
