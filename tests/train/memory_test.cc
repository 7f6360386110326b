// Goal: what is sharded takes 1/ranks of the bytes, and whole parameters are never more than the
// root's and two units' at a time. Method: the ledger and the optimizer's own count on a Llama and
// on an MLP of odd widths, to the byte; the expected numbers come from the model's shapes and the
// layout's rule.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "apps/llama.h"
#include "engine/layout.h"
#include "optim/adamw.h"
#include "tests/harness/ranks.h"
#include "tests/harness/toy_models.h"
#include "train/parallelize.h"

namespace tessera {
namespace {

using engine::Bytes;
using engine::Layout;

constexpr int64_t kFloatBytes = 4;

// A model to train, and its rule of units.
struct Trained {
  std::shared_ptr<torch::nn::Module> root;
  UnitRule units;
  std::function<at::Tensor(int step, int rank)> loss;
};

Trained debug_llama() {
  const apps::LlamaConfig config = apps::llama_flavor("debug");
  apps::Llama model(config);
  const auto loss = [model, config](int step, int rank) mutable {
    const at::Tensor tokens =
        (at::arange(2 * 17, at::kLong) * (3 + step) + rank).remainder(config.vocab_size);
    const at::Tensor rows = tokens.view({2, 17});
    return apps::loss(model(rows.slice(1, 0, 16)), rows.slice(1, 1, 17).contiguous());
  };
  return {model.ptr(), units_of<apps::Block>(), loss};
}

Trained odd_mlp() {
  const std::shared_ptr<harness::ToyModel> model = harness::model_case("mlp").make(7);
  return {model->root(), [model](const torch::nn::Module& m) { return model->is_unit(m); },
          [model](int step, int rank) { return model->loss(model->batch(step, 0, rank)); }};
}

// The shapes of each unit, by the units themselves, and the layout that they must have.
std::vector<Layout> layouts_of(const Parallel& parallel, int64_t shards) {
  std::vector<Layout> layouts;
  for (const auto& unit : parallel.units()) {
    std::vector<int64_t> numels;
    for (const OwnedParam& param : unit->owned_params()) {
      int64_t numel = 1;
      for (const int64_t size : param.shape()) numel *= size;
      numels.push_back(numel);
    }
    layouts.emplace_back(numels, shards);
  }
  return layouts;
}

int64_t numel_of(const torch::nn::Module& model) {
  int64_t numel = 0;
  for (const at::Tensor& param : model.parameters()) numel += param.numel();
  return numel;
}

int64_t count_defined(const std::vector<OwnedParam>& params) {
  return std::count_if(params.begin(), params.end(),
                       [](const OwnedParam& p) { return p.elements().size() > 0; });
}

struct Measured {
  std::vector<Layout> layouts;
  std::vector<int64_t> owned_params, owned_grads, state_bytes;  // by rank
  std::vector<int64_t> with_elements;                           // parameters, by rank
  std::vector<int64_t> peak_full_params;                        // by rank
};

// Two steps to get going, then two that are measured.
Measured measure(int size, Strategy strategy, const std::function<Trained()>& make) {
  Measured measured;
  measured.owned_params.resize(size);
  measured.owned_grads.resize(size);
  measured.state_bytes.resize(size);
  measured.with_elements.resize(size);
  measured.peak_full_params.resize(size);
  harness::run_ranks(size, [&](comm::World& world) {
    Trained trained;
    {
      static std::mutex generator;  // one per process
      const std::lock_guard<std::mutex> lock(generator);
      torch::manual_seed(3);
      trained = make();
    }
    Policy policy;
    policy.strategy = strategy;
    policy.units = trained.units;
    Parallel parallel = parallelize(trained.root, world, policy);
    optim::AdamW adamw(parallel.owned_params());
    engine::ByteLedger& ledger = parallel.ledger();
    for (int step = 0; step < 4; ++step) {
      if (step == 2) ledger.reset_peaks();
      trained.loss(step, world.rank()).backward();
      adamw.step();
      adamw.zero_grad();
      for (const Bytes kind : {Bytes::kFullParams, Bytes::kFullGrads, Bytes::kScratch}) {
        EXPECT_EQ(ledger.live(kind), 0) << "kind " << static_cast<int>(kind);
      }
    }
    const int rank = world.rank();
    measured.owned_params[rank] = ledger.live(Bytes::kOwnedParams);
    measured.owned_grads[rank] = ledger.live(Bytes::kOwnedGrads);
    measured.state_bytes[rank] = adamw.state_bytes();
    measured.with_elements[rank] = count_defined(parallel.owned_params());
    measured.peak_full_params[rank] = ledger.peak(Bytes::kFullParams);
    const int64_t shards = strategy == Strategy::kFullShard ? size : 1;
    if (rank == 0) measured.layouts = layouts_of(parallel, shards);
  });
  return measured;
}

class Memory : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  static Trained make(const std::string& name) {
    return name == "llama" ? debug_llama() : odd_mlp();
  }
  std::string name() const { return std::get<0>(GetParam()); }
  int size() const { return std::get<1>(GetParam()); }
  Measured run(Strategy strategy) const {
    return measure(size(), strategy, [this] { return make(name()); });
  }
  int64_t numel() const { return numel_of(*make(name()).root); }
};

INSTANTIATE_TEST_SUITE_P(
    Models, Memory, testing::Combine(testing::Values("llama", "mlp"), testing::Values(1, 2, 3, 4)),
    [](const auto& test) {
      return std::get<0>(test.param) + "_" + std::to_string(std::get<1>(test.param)) + "ranks";
    });

TEST_P(Memory, ShardedTakesOneOfRanksBetweenSteps) {
  const Measured m = run(Strategy::kFullShard);
  int64_t shard_elements = 0;
  int64_t padding = 0;
  for (const Layout& layout : m.layouts) {
    shard_elements += layout.shard_elements();
    padding += layout.total_elements() - layout.param_elements();
    // Less than an aligned step for each parameter, and for each shard to be aligned and equal.
    EXPECT_LT(layout.total_elements() - layout.param_elements(),
              (layout.num_params() + size() + 1) * Layout::kAlignElements);
  }
  EXPECT_EQ(shard_elements * size(), numel() + padding);
  int64_t states = 0;
  for (int rank = 0; rank < size(); ++rank) {
    EXPECT_EQ(m.owned_params[rank], shard_elements * kFloatBytes);
    EXPECT_EQ(m.owned_grads[rank], shard_elements * kFloatBytes);
    // Two moments an element, no padding; and a step count a parameter.
    states += m.state_bytes[rank] - m.with_elements[rank] * kFloatBytes;
    EXPECT_LE(m.state_bytes[rank],
              2 * shard_elements * kFloatBytes + m.with_elements[rank] * kFloatBytes);
  }
  EXPECT_EQ(states, 2 * numel() * kFloatBytes) << "each element's state is on one rank";
}

TEST_P(Memory, ShardedHasAtMostTheRootAndTwoUnitsWhole) {
  const Measured m = run(Strategy::kFullShard);
  ASSERT_GE(m.layouts.size(), 3u);
  int64_t largest = 0;
  int64_t all = m.layouts[0].total_elements();
  for (size_t unit = 1; unit < m.layouts.size(); ++unit) {
    largest = std::max(largest, m.layouts[unit].total_elements());
    all += m.layouts[unit].total_elements();
  }
  const int64_t root = m.layouts[0].total_elements();
  for (const int64_t peak : m.peak_full_params) {
    EXPECT_LE(peak, (root + 2 * largest) * kFloatBytes);
    EXPECT_GE(peak, (root + largest) * kFloatBytes);
    if (m.layouts.size() > 3) {
      EXPECT_LT(peak, all * kFloatBytes) << "never the whole model";
    }
  }
}

TEST_P(Memory, ReplicatedHoldsEverythingOnEveryRank) {
  const Measured m = run(Strategy::kReplicate);
  int64_t buckets = 0;
  for (const Layout& layout : m.layouts) buckets += layout.total_elements();
  for (int rank = 0; rank < size(); ++rank) {
    EXPECT_EQ(m.owned_params[rank], numel() * kFloatBytes);
    EXPECT_EQ(m.owned_grads[rank], buckets * kFloatBytes);
    EXPECT_GE(m.owned_grads[rank], numel() * kFloatBytes);
    EXPECT_EQ(m.state_bytes[rank], (2 * numel() + m.with_elements[rank]) * kFloatBytes);
    EXPECT_EQ(m.peak_full_params[rank], 0);
  }
}

}  // namespace
}  // namespace tessera
