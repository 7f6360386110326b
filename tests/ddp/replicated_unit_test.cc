// Goal: replicated units leave the user's parameters alone, reduce once a window, and put gradients
// into their bucket without copies after the first time. Method: addresses, ledger counts and
// gradients of small models on ranks as threads.

#include "ddp/replicated_unit.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <set>

#include "base/math.h"
#include "tests/engine/probe_model.h"
#include "tests/harness/ranks.h"

namespace tessera::ddp {
namespace {

using engine::Bytes;
using engine::input_of;
using engine::loss_of;
using engine::ProbeModel;
using engine::Tensors;
using harness::run_ranks;

Policy policy() { return engine::policy_of(Strategy::kReplicate); }

TEST(ReplicatedUnitTest, ParametersStayWholeAndTheUsersOwn) {
  run_ranks(3, [](comm::World& world) {
    ProbeModel model;
    std::vector<const void*> memory;
    for (const at::Tensor& p : model->parameters()) memory.push_back(p.data_ptr());
    const Tensors whole = engine::values_of(model);
    Parallel parallel = parallelize(model, world, policy());
    for (int step = 0; step < 2; ++step) {
      size_t i = 0;
      for (const auto& p : model->named_parameters()) {
        EXPECT_EQ(p.value().data_ptr(), memory[i++]);
        EXPECT_EQ(p.value().sizes(), whole.at(p.key()).sizes());
      }
      loss_of(model(input_of(step, world.rank()))).backward();
    }
    EXPECT_EQ(parallel.ledger().peak(Bytes::kFullParams), 0) << "no copies in fp32";
  });
}

TEST(ReplicatedUnitTest, EveryRankOwnsAllAndAnswersForAnEvenPart) {
  run_ranks(3, [](comm::World& world) {
    ProbeModel model;
    Parallel parallel = parallelize(model, world, policy());
    EXPECT_EQ(parallel.owned_params().size(), model->parameters().size());
    for (const OwnedParam& param : parallel.owned_params()) {
      const int64_t numel = param.value().numel();
      EXPECT_TRUE(param.elements() == (base::Interval{0, numel}));
      EXPECT_TRUE(param.primary() == base::even_part(numel, 3, world.rank()));
      EXPECT_EQ(param.value().dim(), 1);
    }
  });
}

TEST(ReplicatedUnitTest, RanksStartFromTheValuesOfRank0) {
  run_ranks(3, [](comm::World& world) {
    ProbeModel model;
    const Tensors of_rank_0 = engine::values_of(model);
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor& p : model->parameters()) p.add_(world.rank());
    }
    const Parallel parallel = parallelize(model, world, policy());
    engine::expect_values(parallel, of_rank_0, "of rank 0");
  });
}

TEST(ReplicatedUnitTest, GradientsLieInTheBucketFromStepToStep) {
  run_ranks(2, [](comm::World& world) {
    ProbeModel model;
    Parallel parallel = parallelize(model, world, policy());
    std::vector<std::set<const void*>> places(model->parameters().size());
    for (int step = 0; step < 4; ++step) {
      loss_of(model(input_of(step, world.rank()))).backward();
      size_t i = 0;
      for (const at::Tensor& p : model->parameters()) {
        places[i++].insert(p.grad().data_ptr());
        EXPECT_EQ(p.grad().sizes(), p.sizes());
        EXPECT_FALSE(p.grad().is_view()) << "zero_grad(false) detaches it in place";
      }
      model->zero_grad(/*set_to_none=*/step % 2 == 0);
    }
    for (const auto& place : places) EXPECT_EQ(place.size(), 1u);
  });
}

// Ranks differ until the last micro-batch of the window; then all have the mean of the sums.
TEST(ReplicatedUnitTest, GradientsStayOnTheirRankUntilTheLastMicroBatch) {
  run_ranks(2, [](comm::World& world) {
    ProbeModel model;
    Parallel parallel = parallelize(model, world, policy());
    for (int window = 0; window < 2; ++window) {
      const auto backward = [&](ProbeModel& m, int rank, int micro_batch) {
        loss_of(m(input_of(3 * window + micro_batch, rank))).backward();
      };
      for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
        const auto sync = parallel.sync_gradients(false);
        backward(model, world.rank(), micro_batch);
        engine::expect_at_rest(parallel);
        const Tensors local = engine::gradients_of([&](ProbeModel& alone) {
          for (int m = 0; m <= micro_batch; ++m) backward(alone, world.rank(), m);
        });
        engine::expect_grads(parallel, local, "of this rank alone");
      }
      {
        const auto sync = parallel.sync_gradients(true);
        backward(model, world.rank(), 2);
      }
      const Tensors mean = engine::mean_over_ranks(2, [&](ProbeModel& alone, int rank) {
        for (int m = 0; m < 3; ++m) backward(alone, rank, m);
      });
      engine::expect_grads(parallel, mean, "of the window");
      engine::clear_grads(parallel);
    }
  });
}

TEST(ReplicatedUnitTest, ScopesOfMicroBatchesNestAndEnd) {
  run_ranks(2, [](comm::World& world) {
    ProbeModel model;
    Parallel parallel = parallelize(model, world, policy());
    const auto is_mean = [&] {
      engine::clear_grads(parallel);
      loss_of(model(input_of(0, world.rank()))).backward();
      // One element's gradient, which differs over ranks until it is reduced.
      const double mine = parallel.owned_params()[0].grad()[0].item<double>();
      const Tensors mean = engine::mean_over_ranks(
          2, [&](ProbeModel& alone, int rank) { loss_of(alone(input_of(0, rank))).backward(); });
      const std::string name = parallel.owned_params()[0].name();
      return mean.at(name).flatten()[0].item<double>() == mine;
    };
    EXPECT_TRUE(is_mean()) << "without a scope every backward ends its window";
    {
      const auto outer = parallel.sync_gradients(false);
      EXPECT_FALSE(is_mean());
      {
        const auto inner = parallel.sync_gradients(true);
        EXPECT_TRUE(is_mean());
      }
      EXPECT_FALSE(is_mean());
    }
    EXPECT_TRUE(is_mean());
  });
}

TEST(ReplicatedUnitTest, UnderACastPolicyParametersAreBf16InsideAndFp32Outside) {
  run_ranks(2, [](comm::World& world) {
    ProbeModel model;
    Policy p = policy();
    p.precision = precision::bf16();
    Parallel parallel = parallelize(model, world, p);
    std::set<at::ScalarType> inside;
    model->blocks[1]->inside = [&] {
      for (const at::Tensor& param : model->parameters()) inside.insert(param.scalar_type());
    };
    for (int step = 0; step < 2; ++step) {
      loss_of(model(input_of(step, world.rank())).to(at::kFloat)).backward();
      for (const at::Tensor& param : model->parameters()) {
        EXPECT_EQ(param.scalar_type(), at::kFloat);
        EXPECT_EQ(param.grad().scalar_type(), at::kFloat);
      }
    }
    EXPECT_EQ(inside, std::set<at::ScalarType>{at::kBFloat16});
    EXPECT_EQ(parallel.ledger().live(Bytes::kFullParams), 0);
    EXPECT_GT(parallel.ledger().peak(Bytes::kFullParams), 0);
  });
}

}  // namespace
}  // namespace tessera::ddp
