// Goal: whatever order of forward, backward and step a training loop takes, gradients are those of
// one process and nothing stays unsharded. Method: both strategies on 1 to 3 ranks as threads, a
// small model; the truth is LibTorch alone, with ranks summed in rank order, to the bit unless a
// test says why not.

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <tuple>

#include "base/error.h"
#include "tests/base/thrown.h"
#include "tests/engine/probe_model.h"
#include "tests/harness/ranks.h"

namespace tessera::engine {
namespace {

// Sums of a few terms in another order: relative to the largest element some units in the last
// place (2^-24) for each of the fewer than ten additions, with room for cancellation.
constexpr double kOtherOrder = 64 * 0x1p-24;

struct Rank {
  ProbeModel model;
  Parallel parallel;
  int rank;
  int size;

  at::Tensor loss(int step) { return loss_of(model(input_of(step, rank))); }
};

class Step : public testing::TestWithParam<std::tuple<Strategy, int>> {
 protected:
  Strategy strategy() const { return std::get<0>(GetParam()); }
  bool shards() const { return strategy() == Strategy::kFullShard; }
  int size() const { return std::get<1>(GetParam()); }

  // Runs fn on every rank with a fresh parallel model.
  void on_ranks(const std::function<void(Rank&)>& fn) const {
    harness::run_ranks(size(), [&](comm::World& world) {
      ProbeModel model;
      Parallel parallel = parallelize(model, world, policy_of(strategy()));
      Rank rank{model, std::move(parallel), world.rank(), world.size()};
      fn(rank);
    });
  }

  // The mean over ranks of the gradient of the losses of these steps.
  Tensors expected(const std::vector<int>& steps) const {
    return mean_over_ranks(size(), [&](ProbeModel& model, int rank) {
      for (const int step : steps) loss_of(model(input_of(step, rank))).backward();
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Both, Step,
                         testing::Combine(testing::Values(Strategy::kReplicate,
                                                          Strategy::kFullShard),
                                          testing::Values(1, 2, 3)),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param) == Strategy::kReplicate
                                                  ? "replicated"
                                                  : "sharded") +
                                  "_" + std::to_string(std::get<1>(test.param)) + "ranks";
                         });

TEST_P(Step, GradientsAreTheMeanOverRanksAndEverythingIsAtRestAfterwards) {
  on_ranks([&](Rank& r) {
    expect_at_rest(r.parallel);
    for (int step = 0; step < 3; ++step) {
      r.loss(step).backward();
      expect_at_rest(r.parallel);
      expect_grads(r.parallel, expected({step}), "step " + std::to_string(step));
      clear_grads(r.parallel);
    }
  });
}

TEST_P(Step, TwoBackwardsWithoutZeroGradSum) {
  on_ranks([&](Rank& r) {
    r.loss(0).backward();
    r.loss(1).backward();
    expect_grads(r.parallel, expected({0, 1}), "of two", kOtherOrder);
    r.loss(2).backward();
    expect_grads(r.parallel, expected({0, 1, 2}), "of three", kOtherOrder);
  });
}

TEST_P(Step, ZeroGradBetweenForwardAndBackwardDropsOnlyWhatWasBefore) {
  for (const bool set_to_none : {true, false}) {
    on_ranks([&](Rank& r) {
      r.loss(0).backward();
      const at::Tensor loss = r.loss(1);
      r.model->zero_grad(set_to_none);
      loss.backward();
      expect_grads(r.parallel, expected({1}), set_to_none ? "none" : "zeros");
      r.model->zero_grad(set_to_none);
      r.loss(2).backward();
      expect_grads(r.parallel, expected({2}), "one more");
    });
  }
}

TEST_P(Step, TheModelCanBeAppliedToItsOwnOutput) {
  const Tensors truth = mean_over_ranks(size(), [](ProbeModel& model, int rank) {
    loss_of(model(model(input_of(0, rank)))).backward();
  });
  on_ranks([&](Rank& r) {
    for (int time = 0; time < 2; ++time) {
      loss_of(r.model(r.model(input_of(0, r.rank)))).backward();
      expect_grads(r.parallel, truth, "time " + std::to_string(time));
      expect_at_rest(r.parallel);
      clear_grads(r.parallel);
    }
  });
}

TEST_P(Step, TwoForwardsThenTheirBackwardsInEitherOrderSum) {
  for (const bool swapped : {false, true}) {
    on_ranks([&](Rank& r) {
      const at::Tensor first = r.loss(0);
      const at::Tensor second = r.loss(1);
      (swapped ? second : first).backward();
      expect_grads(r.parallel, expected({swapped ? 1 : 0}), "of the first backward");
      expect_at_rest(r.parallel);
      (swapped ? first : second).backward();
      expect_grads(r.parallel, expected({0, 1}), "of both", kOtherOrder);
      expect_at_rest(r.parallel);
    });
  }
}

TEST_P(Step, ASumOfLossesOfTwoForwardsHasOneBackward) {
  const Tensors truth = mean_over_ranks(size(), [](ProbeModel& model, int rank) {
    (loss_of(model(input_of(0, rank))) + loss_of(model(input_of(1, rank)))).backward();
  });
  on_ranks([&](Rank& r) {
    (r.loss(0) + r.loss(1)).backward();
    expect_grads(r.parallel, truth, "of the sum");
    expect_at_rest(r.parallel);
  });
}

TEST_P(Step, ARetainedGraphCanGoBackwardAgain) {
  on_ranks([&](Rank& r) {
    const at::Tensor loss = r.loss(0);
    loss.backward({}, /*retain_graph=*/true);
    expect_grads(r.parallel, expected({0}), "once");
    expect_at_rest(r.parallel);
    loss.backward();
    expect_grads(r.parallel, expected({0, 0}), "twice", kOtherOrder);
    expect_at_rest(r.parallel);
  });
}

TEST_P(Step, AForwardAfterAStepSeesTheNewValues) {
  on_ranks([&](Rank& r) {
    // What one process has after one step with the mean gradient.
    ProbeModel alone;
    Tensors grads = expected({0});
    for (auto& param : alone->named_parameters()) {
      param.value().mutable_grad() = grads.at(param.key());
    }
    step_and_clear(alone);
    const at::Tensor truth = alone(input_of(1, r.rank)).detach();

    r.loss(0).backward();
    step_and_clear(r.parallel);
    expect_values(r.parallel, values_of(alone), "after a step");
    EXPECT_TRUE(at::equal(r.model(input_of(1, r.rank)).detach(), truth));
    // The same when a forward without a backward has left units whole.
    EXPECT_TRUE(at::equal(r.model(input_of(1, r.rank)).detach(), truth));
  });
}

// A forward with a graph leaves whole units for a backward. A step on those would be lost.
TEST_P(Step, AStepWhileAForwardWaitsForItsBackwardIsRefusedWhereItWouldBeLost) {
  on_ranks([&](Rank& r) {
    r.loss(0).backward();
    const at::Tensor unused_loss = r.loss(1);
    const std::string text = thrown<ConfigError>([&] { step_and_clear(r.parallel); });
    if (shards()) {
      EXPECT_TRUE(contains(text, "its unit is unsharded")) << text;
      EXPECT_TRUE(contains(text, "parameter '")) << text;
    } else {
      EXPECT_EQ(text, "<no exception>");
    }
    {
      const at::NoGradGuard no_grad;
      r.model(input_of(1, r.rank));
    }
    expect_at_rest(r.parallel);
    step_and_clear(r.parallel);
    const at::Tensor before = r.model(input_of(2, r.rank)).detach();
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(r.model(input_of(2, r.rank)), before));
  });
}

TEST_P(Step, EvaluationLeavesNothingUnshardedAndChangesNothing) {
  ProbeModel alone;
  on_ranks([&](Rank& r) {
    const at::Tensor truth = alone(input_of(5, r.rank)).detach();
    for (int step = 0; step < 2; ++step) {
      {
        const at::NoGradGuard no_grad;
        EXPECT_TRUE(at::equal(r.model(input_of(5, r.rank)), truth));
        expect_at_rest(r.parallel);
      }
      {
        const c10::InferenceMode inference;
        EXPECT_TRUE(at::equal(r.model(input_of(5, r.rank)), truth));
        expect_at_rest(r.parallel);
      }
      r.loss(step).backward();
      expect_grads(r.parallel, expected({step}), "after an evaluation");
      clear_grads(r.parallel);
    }
    // Between a forward and its backward.
    const at::Tensor loss = r.loss(2);
    {
      const at::NoGradGuard no_grad;
      r.model(input_of(5, r.rank));
    }
    loss.backward();
    expect_grads(r.parallel, expected({2}), "around an evaluation");
  });
}

TEST_P(Step, GradientsOfAnInputAloneLeaveParametersWithoutGradients) {
  on_ranks([&](Rank& r) {
    const at::Tensor x = input_of(0, r.rank).requires_grad_();
    loss_of(r.model(x)).backward({}, false, false, at::TensorList{x});
    ASSERT_TRUE(x.grad().defined());
    expect_at_rest(r.parallel);
    for (const OwnedParam& param : r.parallel.owned_params()) {
      EXPECT_FALSE(param.grad().defined()) << param.name();
    }
    r.loss(1).backward();
    expect_grads(r.parallel, expected({1}), "afterwards");
  });
}

// A branch that depends on the rank, another one in each step: ranks without a gradient count
// zeros.
TEST_P(Step, AParameterUsedOnSomeRanksOnlyIsAveragedWithZeros) {
  const auto choose = [](ProbeModel& model, int step, int rank) {
    for (int b = 0; b < 3; ++b) model->blocks[b]->use_extra = (rank + step + b) % 3 == 0;
  };
  on_ranks([&](Rank& r) {
    for (int step = 0; step < 5; ++step) {
      const Tensors truth = mean_over_ranks(r.size, [&](ProbeModel& model, int rank) {
        choose(model, step, rank);
        loss_of(model(input_of(step, rank))).backward();
      });
      choose(r.model, step, r.rank);
      r.loss(step).backward();
      expect_grads(r.parallel, truth, "step " + std::to_string(step));
      expect_at_rest(r.parallel);
      clear_grads(r.parallel);
    }
  });
}

// The second backward of a graph is not announced by a forward; ranks must agree on the order of
// reductions all the same.
TEST_P(Step, ARetainedGraphWithABranchByRankKeepsTheOrderOfReductions) {
  const auto run = [](ProbeModel& model, int rank) {
    for (int b = 0; b < 3; ++b) model->blocks[b]->use_extra = rank != b;
    const at::Tensor loss = loss_of(model(input_of(0, rank)));
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  };
  const Tensors truth = mean_over_ranks(size(), run);
  on_ranks([&](Rank& r) {
    for (int time = 0; time < 2; ++time) {
      run(r.model, r.rank);
      expect_grads(r.parallel, truth, "time " + std::to_string(time), kOtherOrder);
      clear_grads(r.parallel);
    }
  });
}

TEST_P(Step, AGradientThatTheUserSetsBetweenStepsIsAddedTo) {
  on_ranks([&](Rank& r) {
    for (int step = 0; step < 2; ++step) {
      Tensors sum = expected({step});
      for (auto& [name, grad] : sum) grad = grad + 0.25;
      for (const at::Tensor& param : r.model->parameters()) {
        param.mutable_grad() = at::full_like(param, 0.25).detach();
      }
      r.loss(step).backward();
      expect_grads(r.parallel, sum, "set by the user", kOtherOrder);
      clear_grads(r.parallel);
    }
  });
}

// Element-wise, so that slices step as the whole does; a vector loop and its remainder may round
// differently (fused multiply-add), each of some ten operations a step by 2^-24.
TEST_P(Step, TorchsOwnOptimizersWorkOnParameters) {
  Tensors truth;
  {
    ProbeModel alone;
    torch::optim::AdamW adamw(alone->parameters(), torch::optim::AdamWOptions(0.05));
    for (int step = 0; step < 3; ++step) {
      Tensors mean;
      for (int rank = 0; rank < size(); ++rank) {
        adamw.zero_grad();
        loss_of(alone(input_of(step, rank))).backward();
        for (const auto& param : alone->named_parameters()) {
          at::Tensor& sum = mean[param.key()];
          sum = sum.defined() ? sum + param.value().grad() : param.value().grad();
        }
      }
      for (auto& param : alone->named_parameters()) {
        param.value().mutable_grad() = mean.at(param.key()) / size();
      }
      adamw.step();
    }
    truth = values_of(alone);
  }
  on_ranks([&](Rank& r) {
    torch::optim::AdamW adamw(r.model->parameters(), torch::optim::AdamWOptions(0.05));
    for (int step = 0; step < 3; ++step) {
      r.loss(step).backward();
      adamw.step();
      adamw.zero_grad();
    }
    expect_values(r.parallel, truth, "after AdamW", 1e-5);
  });
}

}  // namespace
}  // namespace tessera::engine
