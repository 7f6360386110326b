// Goal: a forward or backward that throws costs its own step and no other. Method: both strategies
// on 1 to 3 ranks as threads; all ranks fail alike, then the next step must have the bits of a
// fresh run.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <optional>
#include <tuple>

#include "base/error.h"
#include "tests/base/thrown.h"
#include "tests/engine/probe_model.h"
#include "tests/harness/ranks.h"

namespace tessera::engine {
namespace {

class Fault : public std::runtime_error {
 public:
  Fault() : std::runtime_error("the fault") {}
};

// The identity; its backward throws.
struct ThrowsInBackward : torch::autograd::Function<ThrowsInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*,
                                               const torch::autograd::tensor_list&) {
    throw Fault();
  }
};

struct Rank {
  ProbeModel model;
  std::optional<Parallel> parallel;
  int rank;
  int size;

  at::Tensor loss(int step) { return loss_of(model(input_of(step, rank))); }
};

class Failure : public testing::TestWithParam<std::tuple<Strategy, int>> {
 protected:
  Strategy strategy() const { return std::get<0>(GetParam()); }
  bool shards() const { return strategy() == Strategy::kFullShard; }
  int size() const { return std::get<1>(GetParam()); }

  void on_ranks(const std::function<void(Rank&)>& fn) const {
    harness::run_ranks(size(), [&](comm::World& world) {
      ProbeModel model;
      Rank rank{model, parallelize(model, world, policy_of(strategy())), world.rank(),
                world.size()};
      fn(rank);
    });
  }

  Tensors expected(int step) const {
    return mean_over_ranks(size(), [&](ProbeModel& model, int rank) {
      loss_of(model(input_of(step, rank))).backward();
    });
  }

  void expect_steps_as_fresh(Rank& r) const {
    for (int step = 1; step < 3; ++step) {
      r.loss(step).backward();
      expect_at_rest(*r.parallel);
      expect_grads(*r.parallel, expected(step), "after the fault, step " + std::to_string(step));
      clear_grads(*r.parallel);
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Both, Failure,
                         testing::Combine(testing::Values(Strategy::kReplicate,
                                                          Strategy::kFullShard),
                                          testing::Values(1, 2, 3)),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param) == Strategy::kReplicate
                                                  ? "replicated"
                                                  : "sharded") +
                                  "_" + std::to_string(std::get<1>(test.param)) + "ranks";
                         });

TEST_P(Failure, AForwardThatThrowsAnywhereLeavesEverythingSharded) {
  const auto fault = [] { throw Fault(); };
  for (const bool after_a_step : {false, true}) {
    for (int place = 0; place < 4; ++place) {  // in a block, or in the root after all blocks
      on_ranks([&](Rank& r) {
        if (after_a_step) {
          r.loss(0).backward();
          clear_grads(*r.parallel);
        }
        (place < 3 ? r.model->blocks[place]->inside : r.model->at_end) = fault;
        EXPECT_EQ(thrown<Fault>([&] { r.loss(0); }), "the fault");
        expect_at_rest(*r.parallel);
        r.model->at_end = nullptr;
        for (ProbeBlock& block : r.model->blocks) block->inside = nullptr;
        expect_steps_as_fresh(r);
      });
    }
  }
}

// A block whose fault its caller catches: the forward goes on without it.
struct ForgivingImpl : torch::nn::Module {
  ForgivingImpl() : inner(register_module("inner", ProbeModel())) {}
  at::Tensor forward(at::Tensor x) {
    for (ProbeBlock& block : inner->blocks) {
      try {
        x = block(x);
      } catch (const Fault&) {
      }
    }
    return x;
  }
  ProbeModel inner;
};
TESSERA_MODULE(Forgiving);

TEST_P(Failure, AFaultThatIsCaughtInsideTheForwardIsNone) {
  harness::run_ranks(size(), [&](comm::World& world) {
    Forgiving model;
    Parallel parallel = parallelize(model, world, policy_of(strategy()));
    const auto run = [&](Forgiving& m, int rank) {
      m->inner->blocks[1]->inside = [] { throw Fault(); };
      loss_of(m(input_of(0, rank))).backward();
    };
    for (int time = 0; time < 2; ++time) {
      run(model, world.rank());
      expect_at_rest(parallel);
      Tensors sum;
      for (int rank = 0; rank < world.size(); ++rank) {
        Forgiving alone;
        run(alone, rank);
        for (const auto& param : alone->named_parameters()) {
          at::Tensor& total = sum[param.key()];
          const at::Tensor grad = param.value().grad();
          if (grad.defined()) total = total.defined() ? total + grad : grad;
        }
      }
      for (auto& [name, grad] : sum) {
        if (grad.defined()) grad = grad / world.size();
      }
      expect_grads(parallel, sum, "without block 1");
      clear_grads(parallel);
    }
  });
}

// The fault comes after some units' gradients and before others'.
TEST_P(Failure, ABackwardThatThrowsDropsTheGradientsOfItsWindow) {
  for (const bool zero_grad : {false, true}) {
    on_ranks([&](Rank& r) {
      r.loss(5).backward();  // An earlier micro-batch of the window.
      const auto fails = [&] {
        // Between two calls of the model: the later one's gradients are there, and waiting.
        loss_of(r.model(ThrowsInBackward::apply(r.model(input_of(0, r.rank))))).backward();
      };
      EXPECT_EQ(thrown<Fault>(fails), "the fault");
      if (zero_grad) r.model->zero_grad();
      expect_steps_as_fresh(r);
    });
  }
}

TEST_P(Failure, TwoBackwardsThatThrowAreRecoveredFrom) {
  on_ranks([&](Rank& r) {
    for (int time = 0; time < 2; ++time) {
      const at::Tensor x = input_of(time, r.rank).requires_grad_();
      const at::Tensor loss = loss_of(r.model(ThrowsInBackward::apply(x)));
      EXPECT_EQ(thrown<Fault>([&] { loss.backward(); }), "the fault");
    }
    expect_steps_as_fresh(r);
  });
}

TEST_P(Failure, AGraphFromBeforeTheFaultCanStillGoBackward) {
  on_ranks([&](Rank& r) {
    const at::Tensor kept = r.loss(1);
    const at::Tensor x = input_of(0, r.rank).requires_grad_();
    const at::Tensor loss = loss_of(r.model(ThrowsInBackward::apply(x)));
    EXPECT_EQ(thrown<Fault>([&] { loss.backward(); }), "the fault");
    kept.backward();
    expect_at_rest(*r.parallel);
    expect_grads(*r.parallel, expected(1), "of the kept graph");
    clear_grads(*r.parallel);
    expect_steps_as_fresh(r);
  });
}

// As in PyTorch: what backward needs was overwritten.
TEST_P(Failure, ValuesWrittenBetweenForwardAndBackwardMakeBackwardThrow) {
  on_ranks([&](Rank& r) {
    r.loss(0).backward();
    clear_grads(*r.parallel);
    const at::Tensor loss = r.loss(0);
    bool wrote = false;
    for (const OwnedParam& param : r.parallel->owned_params()) {
      if (param.name() != "block1.w2") continue;  // Sharded while it waits for backward.
      const at::NoGradGuard no_grad;
      param.value().mul_(1.0);
      wrote = true;
    }
    EXPECT_TRUE(wrote);
    const std::string text = thrown<std::exception>([&] { loss.backward(); });
    EXPECT_TRUE(contains(text, "modified by an inplace operation")) << text;
    expect_steps_as_fresh(r);
  });
}

TEST_P(Failure, ABackwardAfterTheParallelModelIsGoneIsRefused) {
  on_ranks([&](Rank& r) {
    const at::Tensor loss = r.loss(0);
    r.parallel.reset();
    for (const auto& param : r.model->named_parameters()) {
      EXPECT_EQ(param.value().dim() == 1 || !shards(), true) << param.key() << " is put back";
    }
    const std::string text = thrown<ConfigError>([&] { loss.backward(); });
    EXPECT_TRUE(contains(text, "whose Parallel is gone")) << text;
  });
}

TEST_P(Failure, TheModelIsItsOwnAgainAfterTheParallelModelIsGone) {
  on_ranks([&](Rank& r) {
    r.loss(0).backward();
    clear_grads(*r.parallel);
    r.parallel.reset();
    for (ProbeBlock& block : r.model->blocks) EXPECT_EQ(block->forward_hook(), nullptr);
    EXPECT_EQ(r.model->forward_hook(), nullptr);
    if (shards()) {
      for (const at::Tensor& param : r.model->parameters()) EXPECT_EQ(param.dim(), 1);
      EXPECT_THROW(r.loss(0), std::exception) << "slices are no model";
      return;
    }
    const Tensors truth =
        gradients_of([&](ProbeModel& alone) { loss_of(alone(input_of(1, r.rank))).backward(); });
    r.loss(1).backward();
    for (const auto& param : r.model->named_parameters()) {
      EXPECT_TRUE(at::equal(param.value().grad(), truth.at(param.key())))
          << "not averaged: " << param.key();
    }
  });
}

}  // namespace
}  // namespace tessera::engine
