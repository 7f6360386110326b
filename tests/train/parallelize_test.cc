// Goal: parallelize() takes over any model or refuses it on all ranks alike, with the rank and the
// parameter named; and there is one table of strategies. Method: models that are odd, and ranks
// that differ.

#include "train/parallelize.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "base/error.h"
#include "tests/base/thrown.h"
#include "tests/engine/probe_model.h"
#include "tests/harness/ranks.h"

namespace tessera {
namespace {

using engine::input_of;
using engine::loss_of;
using engine::policy_of;
using engine::ProbeBlock;
using engine::ProbeModel;
using harness::run_ranks;

constexpr Strategy kStrategies[] = {Strategy::kReplicate, Strategy::kFullShard};

// Runs parallelize on `size` ranks with what `make` gives, and returns each rank's ConfigError.
template <typename Make>
std::vector<std::string> errors_of(int size, const Make& make) {
  std::vector<std::string> errors(size);
  run_ranks(size, [&](comm::World& world) {
    auto [model, policy] = make(world.rank());
    errors[world.rank()] = thrown<ConfigError>([&, m = model, p = policy] {
      parallelize(std::shared_ptr<torch::nn::Module>(m), world, p);
    });
  });
  return errors;
}

using Given = std::pair<std::shared_ptr<torch::nn::Module>, Policy>;

TEST(ParallelizeTest, TakingAModelOverTwiceIsRefused) {
  for (const Strategy first : kStrategies) {
    for (const Strategy second : kStrategies) {
      run_ranks(2, [&](comm::World& world) {
        ProbeModel model;
        const Parallel parallel = parallelize(model, world, policy_of(first));
        const auto again = [&] { parallelize(model, world, policy_of(second)); };
        const std::string text = thrown<ConfigError>(again);
        EXPECT_TRUE(contains(text, "was parallelized already")) << text;
        // The first take-over is as it was.
        loss_of(model(input_of(0, world.rank()))).backward();
        engine::expect_at_rest(parallel);
      });
    }
  }
}

TEST(ParallelizeTest, AReplicatedModelCanBeTakenOverAgainWhenTheFirstParallelIsGone) {
  run_ranks(2, [](comm::World& world) {
    ProbeModel model;
    { const Parallel first = parallelize(model, world, policy_of(Strategy::kReplicate)); }
    const Parallel second = parallelize(model, world, policy_of(Strategy::kFullShard));
    loss_of(model(input_of(0, world.rank()))).backward();
    const engine::Tensors truth = engine::mean_over_ranks(
        2, [](ProbeModel& alone, int rank) { loss_of(alone(input_of(0, rank))).backward(); });
    engine::expect_grads(second, truth, "of the second");
  });
}

// The shape of one parameter differs on one rank.
TEST(ParallelizeTest, RanksWithDifferentModelsAllLearnTheRankAndTheParameter) {
  for (const Strategy strategy : kStrategies) {
    const auto errors = errors_of(3, [&](int rank) {
      ProbeModel model;
      model->register_parameter("late", at::zeros({rank == 2 ? 4 : 5}));
      return Given{model.ptr(), policy_of(strategy)};
    });
    for (const std::string& text : errors) {
      EXPECT_TRUE(contains(text, "'parameter 'late' [5] ")) << text;
      EXPECT_TRUE(contains(text, "where rank 2 has 'parameter 'late' [4] ")) << text;
    }
  }
}

TEST(ParallelizeTest, AFaultOfOneRanksModelIsThrownByAll) {
  for (const Strategy strategy : kStrategies) {
    const auto errors = errors_of(3, [&](int rank) {
      ProbeModel model;
      const at::Tensor value = at::zeros({3, 4});
      model->register_parameter("turned", rank == 1 ? value.t() : at::zeros({4, 3}));
      return Given{model.ptr(), policy_of(strategy)};
    });
    EXPECT_EQ(errors[1].find("parameter 'turned' is not contiguous"), 0u) << errors[1];
    for (const int other : {0, 2}) {
      EXPECT_EQ(errors[other].find("rank 1 failed: parameter 'turned'"), 0u) << errors[other];
    }
  }
}

TEST(ParallelizeTest, RanksWithDifferentPoliciesAllLearnTheRank) {
  const std::vector<std::function<void(Policy&)>> changes = {
      [](Policy& p) { p.strategy = Strategy::kReplicate; },
      [](Policy& p) { p.precision = precision::bf16(); },
      [](Policy& p) { p.precision.reduce_dtype = at::kBFloat16; },
      [](Policy& p) { p.reshard_after_forward = false; },
      [](Policy& p) { p.units = nullptr; },
  };
  for (const auto& change : changes) {
    const auto errors = errors_of(2, [&](int rank) {
      Policy policy = policy_of(Strategy::kFullShard);
      if (rank == 1) change(policy);
      return Given{ProbeModel().ptr(), policy};
    });
    for (const std::string& text : errors) {
      EXPECT_TRUE(contains(text, "disagree")) << text;
      EXPECT_TRUE(contains(text, "where rank 1 has ")) << text;
    }
  }
}

TEST(ParallelizeTest, PoliciesThatCannotWorkAreRefused) {
  const auto error_with = [](const std::function<void(Policy&)>& change) {
    return errors_of(1, [&](int) {
      Policy policy = policy_of(Strategy::kReplicate);
      change(policy);
      return Given{ProbeModel().ptr(), policy};
    })[0];
  };
  const std::string bucket = error_with([](Policy& p) { p.bucket_bytes = 0; });
  EXPECT_TRUE(contains(bucket, "bucket sizes of 100 and 0 bytes")) << bucket;
  const std::string half = error_with([](Policy& p) { p.precision.param_dtype = at::kHalf; });
  EXPECT_TRUE(contains(half, "Half: expected float32 or bfloat16")) << half;
  const std::string empty = errors_of(1, [](int) {
    return Given{nullptr, policy_of(Strategy::kReplicate)};
  })[0];
  EXPECT_TRUE(contains(empty, "empty module holder")) << empty;
}

// A scalar, a parameter without elements, a frozen one, one of another dtype, and a tied one.
struct OddImpl : torch::nn::Module {
  OddImpl() {
    scalar = register_parameter("scalar", at::full({}, 0.5));
    empty = register_parameter("empty", at::zeros({0, 3}));
    frozen = register_parameter("frozen", at::full({3}, 2.0), false);
    wide = register_parameter("wide", at::full({3}, 0.25, at::kDouble));
    weight = register_parameter("weight", (at::arange(15, at::kFloat) / 16).view({5, 3}));
    tied = register_parameter("tied", weight);
  }
  at::Tensor forward(at::Tensor x) {
    const at::Tensor y = at::linear(x * frozen, weight) * scalar + empty.sum();
    return at::linear(y, tied.t()) + wide.to(at::kFloat);
  }
  at::Tensor scalar, empty, frozen, wide, weight, tied;
};
TESSERA_MODULE(Odd);

at::Tensor odd_loss(Odd& model, int rank) {
  return loss_of(model(at::arange(6, at::kFloat).view({2, 3}) / 8 + rank));
}

TEST(ParallelizeTest, ScalarsEmptyFrozenTiedAndDoubleParametersTrain) {
  for (const Strategy strategy : kStrategies) {
    for (const int size : {1, 3}) {
      engine::Tensors mean;
      for (int rank = 0; rank < size; ++rank) {
        Odd alone;
        odd_loss(alone, rank).backward();
        for (const auto& param : alone->named_parameters()) {
          if (param.key() == "tied") continue;
          at::Tensor& sum = mean[param.key()];
          const at::Tensor grad = param.value().grad();
          if (grad.defined()) sum = sum.defined() ? sum + grad : grad;
        }
      }
      for (auto& [name, grad] : mean) {
        if (grad.defined()) grad = grad / size;
      }
      run_ranks(size, [&](comm::World& world) {
        Odd model;
        Policy policy;
        policy.strategy = strategy;
        policy.bucket_bytes = policy.first_bucket_bytes = 1;
        Parallel parallel = parallelize(model, world, policy);
        EXPECT_EQ(parallel.num_parameters(), 1 + 0 + 3 + 3 + 15);
        for (int step = 0; step < 2; ++step) {
          odd_loss(model, world.rank()).backward();
          engine::expect_grads(parallel, mean, "step " + std::to_string(step));
          engine::clear_grads(parallel);
        }
      });
    }
  }
}

TEST(ParallelizeTest, ATiedParameterOfTwoUnitsIsWholeDuringBoth) {
  run_ranks(2, [](comm::World& world) {
    const auto tie = [](ProbeModel& model) {
      // block2 computes with block0's matrix as well.
      const at::Tensor shared = model->blocks[0]->named_parameters()["w1"];
      model->blocks[2]->register_parameter("shared", shared);
      model->blocks[2]->inside = [shared] { EXPECT_EQ(shared.dim(), 2); };
    };
    ProbeModel model;
    tie(model);
    Parallel parallel = parallelize(model, world, policy_of(Strategy::kFullShard));
    EXPECT_EQ(parallel.units()[0]->params().size(), 2u) << "scale and block0.w1";
    loss_of(model(input_of(0, world.rank()))).backward();
    engine::expect_at_rest(parallel);
  });
}

TEST(ParallelizeTest, NormsAreOfTheWholeGradientOnEveryRank) {
  const engine::Tensors mean = engine::mean_over_ranks(
      3, [](ProbeModel& alone, int rank) { loss_of(alone(input_of(0, rank))).backward(); });
  double squares = 0.0;
  for (const auto& [name, grad] : mean)
    squares += grad.to(at::kDouble).square().sum().item<double>();
  const double norm = std::sqrt(squares);
  for (const Strategy strategy : kStrategies) {
    run_ranks(3, [&](comm::World& world) {
      ProbeModel model;
      Parallel parallel = parallelize(model, world, policy_of(strategy));
      loss_of(model(input_of(0, world.rank()))).backward();
      // Sums of some hundred squares in double, in another order.
      EXPECT_NEAR(parallel.grad_norm(), norm, norm * 1e-12);
      EXPECT_NEAR(parallel.clip_grad_norm(norm / 2), norm, norm * 1e-12);
      // The coefficient is (norm / 2) / (norm + 1e-6); one rounding to fp32 an element.
      EXPECT_NEAR(parallel.grad_norm(), norm / 2 * norm / (norm + 1e-6), norm * 1e-6);
    });
  }
}

TEST(ParallelizeTest, AParallelCanBeMoved) {
  run_ranks(2, [](comm::World& world) {
    ProbeModel model;
    Parallel first = parallelize(model, world, policy_of(Strategy::kFullShard));
    Parallel second = std::move(first);
    loss_of(model(input_of(0, world.rank()))).backward();
    engine::expect_at_rest(second);
    EXPECT_EQ(second.owned_params().size(), 13u);
  });
}

TEST(StrategyTest, EveryStrategyHasOneRowAndItsNameLeadsBackToIt) {
  for (const Strategy strategy : kStrategies) {
    const train::StrategyRow& row = train::row_of(strategy);
    EXPECT_EQ(row.strategy, strategy);
    EXPECT_EQ(train::strategy_of(row.name), strategy);
  }
  EXPECT_EQ(train::strategy_table().size(), std::size(kStrategies));
  const std::string text = thrown<ConfigError>([] { train::strategy_of("zero"); });
  EXPECT_TRUE(contains(text, "'zero': expected one of 'ddp', 'fsdp'")) << text;
}

}  // namespace
}  // namespace tessera
