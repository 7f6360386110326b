// Goal: parameters are whole exactly as long as backward can read them, whatever a block does with
// its inputs, outputs and parameters; and what cannot work is said on every rank. Method: small
// models that each do one unusual thing, on 2 ranks as threads, sharded; gradients against LibTorch
// alone, to the bit; bytes by the engine's ledger.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <atomic>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "fsdp/sharded_unit.h"
#include "tests/base/thrown.h"
#include "tests/harness/ranks.h"
#include "train/parallelize.h"

namespace tessera::engine {
namespace {

constexpr int64_t kWidth = 7;
constexpr int kBlocks = 4;

at::Tensor values(at::IntArrayRef shape, int seed) {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  return (at::arange(numel, at::kFloat) * 0.37 + seed).sin().mul(0.5).reshape(shape);
}

enum class Kind {
  kFrozenFirst,   // a frozen layer below the trained one
  kDetachedTwin,  // the weight read once more, detached, below its trained use
  kPassThrough,   // the input is returned beside the output
  kUnused,        // a parameter that forward does not use
};

class OddBlockImpl : public torch::nn::Module {
 public:
  OddBlockImpl(Kind kind, int seed) : kind_(kind) {
    frozen_ =
        register_parameter("frozen", values({kWidth, kWidth}, seed), kind != Kind::kFrozenFirst);
    weight_ = register_parameter("weight", values({kWidth, kWidth}, seed + 1));
  }
  std::pair<at::Tensor, at::Tensor> forward(at::Tensor x, at::Tensor carried) {
    switch (kind_) {
      case Kind::kFrozenFirst:
        return {x.matmul(frozen_).tanh().matmul(weight_).tanh(), carried};
      case Kind::kDetachedTwin:
        return {x.matmul(weight_.detach()).tanh().matmul(weight_).tanh() + x.matmul(frozen_),
                carried};
      case Kind::kPassThrough:
        return {(x.matmul(weight_) + carried.matmul(frozen_)).tanh(), carried};
      case Kind::kUnused:
        return {x.matmul(weight_).tanh(), carried};
    }
    return {};
  }

 private:
  Kind kind_;
  at::Tensor frozen_, weight_;
};
TESSERA_MODULE(OddBlock);

class OddModelImpl : public torch::nn::Module {
 public:
  explicit OddModelImpl(Kind kind) {
    scale_ = register_parameter("scale", values({kWidth}, 0));
    for (int i = 0; i < kBlocks; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), OddBlock(kind, 10 * i)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    at::Tensor h = x * scale_;
    at::Tensor carried = (x + 1) * scale_;
    for (const int i : order) std::tie(h, carried) = blocks[i](h, carried);
    return h;
  }
  std::vector<OddBlock> blocks;
  std::vector<int> order{0, 1, 2, 3};

 private:
  at::Tensor scale_;
};
TESSERA_MODULE(OddModel);

Policy sharded() {
  Policy policy;
  policy.units = units_of<OddBlock>();
  return policy;
}

at::Tensor input_of(int rank) { return values({3, kWidth}, 100 + rank); }

class Odd : public testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, Odd,
                         testing::Values(Kind::kFrozenFirst, Kind::kDetachedTwin,
                                         Kind::kPassThrough, Kind::kUnused));

TEST_P(Odd, GradientsAreAlonesAndNoMoreThanTwoBlocksAreWhole) {
  constexpr int kRanks = 2;
  std::vector<std::map<std::string, at::Tensor>> alone(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    OddModel model(GetParam());
    model(input_of(rank)).sum().backward();
    for (const auto& p : model->named_parameters()) alone[rank][p.key()] = p.value().grad();
  }
  harness::run_ranks(kRanks, [&](comm::World& world) {
    OddModel model(GetParam());
    Parallel parallel = parallelize(model, world, sharded());
    std::vector<at::Tensor> losses;  // kept, as a user may: their graphs live on
    for (int step = 0; step < 3; ++step) {
      if (step == 1) parallel.ledger().reset_peaks();  // The first step learns the order.
      losses.push_back(model(input_of(world.rank())).sum());
      losses.back().backward();
      for (const OwnedParam& owned : parallel.owned_params()) {
        const at::Tensor& first = alone[0][owned.name()];
        if (!first.defined()) {
          EXPECT_FALSE(owned.grad().defined()) << owned.name();
          continue;
        }
        const at::Tensor mean = ((first + alone[1][owned.name()]) / kRanks).view({-1});
        ASSERT_TRUE(owned.grad().defined()) << owned.name();
        EXPECT_TRUE(
            at::equal(owned.grad(), mean.slice(0, owned.elements().begin, owned.elements().end)))
            << owned.name() << " in step " << step;
      }
      for (const OwnedParam& owned : parallel.owned_params()) owned.clear_grad();
    }
    int64_t root_bytes = 0, block_bytes = 0;
    for (const auto& unit : parallel.units()) {
      const int64_t padded = dynamic_cast<fsdp::ShardedUnit&>(*unit).layout().total_elements() *
                             static_cast<int64_t>(sizeof(float));
      (unit->name().find("block") == 0 ? block_bytes : root_bytes) += padded;
    }
    // Two of four blocks, and the root.
    EXPECT_LE(parallel.ledger().peak(Bytes::kFullParams), root_bytes + block_bytes * 2 / kBlocks);
    EXPECT_EQ(parallel.ledger().live(Bytes::kFullParams), 0);
  });
}

TEST(SiteTest, BlocksInAnotherOrderOnOneRankEndBothWithTheNamesOfTheUnits) {
  const std::string text = thrown<std::exception>([] {
    harness::run_ranks(
        2,
        [](comm::World& world) {
          OddModel model(Kind::kUnused);
          Parallel parallel = parallelize(model, world, sharded());
          if (world.rank() == 1) std::swap(model->order[1], model->order[2]);
          model(input_of(world.rank())).sum().backward();
        },
        std::chrono::seconds(2));
  });
  EXPECT_NE(text.find("block1"), std::string::npos) << text;
  EXPECT_NE(text.find("block2"), std::string::npos) << text;
}

// Two outputs, of which a loss may use the first alone.
class TwoHeadsImpl : public torch::nn::Module {
 public:
  TwoHeadsImpl() {
    trunk_ = register_module("block_trunk", OddBlock(Kind::kUnused, 1));
    head_ = register_module("block_head", OddBlock(Kind::kUnused, 2));
  }
  std::pair<at::Tensor, at::Tensor> forward(at::Tensor x) {
    const at::Tensor h = trunk_(x, x).first;
    return {h, head_(h, h).first};
  }

 private:
  OddBlock trunk_{nullptr}, head_{nullptr};
};
TESSERA_MODULE(TwoHeads);

TEST(SiteTest, ABackwardThatSomeRanksDoNotRunIsSaidByAll) {
  std::atomic<int> told{0};
  const std::string text = thrown<std::exception>([&] {
    harness::run_ranks(
        2,
        [&](comm::World& world) {
          TwoHeads model;
          Policy policy = sharded();
          policy.reshard_after_forward = false;  // Else the gathers of backward already differ.
          Parallel parallel = parallelize(model, world, policy);
          const auto [trunk, head] = model(input_of(world.rank()));
          const at::Tensor loss = world.rank() == 0 ? trunk.sum() + head.sum() : trunk.sum();
          const std::string error = thrown<ConfigError>([&] { loss.backward(); });
          if (contains(error, "unit 'block_head' ran on some ranks and not on others")) ++told;
        },
        std::chrono::seconds(3));
  });
  EXPECT_EQ(told, 2) << text;
}

TEST(SiteTest, UnfreezingAndReplacingAfterwardsAreRefusedByName) {
  harness::run_ranks(2, [](comm::World& world) {
    for (const Strategy strategy : {Strategy::kFullShard, Strategy::kReplicate}) {
      OddModel model(Kind::kFrozenFirst);
      Policy policy = sharded();
      policy.strategy = strategy;
      Parallel parallel = parallelize(model, world, policy);
      at::Tensor frozen = model->named_parameters()["block1.frozen"];
      frozen.set_requires_grad(true);
      const std::string unfrozen = thrown<ConfigError>([&] { model(input_of(0)); });
      EXPECT_NE(unfrozen.find("'block1.frozen' was unfrozen"), std::string::npos) << unfrozen;
      frozen.set_requires_grad(false);
      at::Tensor weight = model->named_parameters()["block2.weight"];
      const at::Tensor kept = weight.variable_data();
      weight.set_data(at::zeros_like(kept));
      const std::string replaced = thrown<ConfigError>([&] { model(input_of(0)); });
      EXPECT_NE(replaced.find("'block2.weight' was replaced"), std::string::npos) << replaced;
      weight.set_data(kept);
      model(input_of(0)).sum().backward();
    }
  });
}

// Runs a backward of its own in backward.
struct BackwardInside : torch::autograd::Function<BackwardInside> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x, OddModel* model) {
    inner() = model;
    return x.clone();
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*,
                                               torch::autograd::tensor_list grads) {
    at::AutoGradMode enable(true);
    (*inner())(input_of(0)).sum().backward();
    return {grads[0], at::Tensor()};
  }
  static OddModel*& inner() {
    static thread_local OddModel* model = nullptr;
    return model;
  }
};

TEST(SiteTest, ABackwardInsideABackwardIsRefused) {
  OddModel model(Kind::kUnused);
  Parallel parallel = parallelize(model, comm::init(comm::Environment{}, {}), sharded());
  const at::Tensor between = BackwardInside::apply(model(input_of(0)), &model);
  const at::Tensor loss = model(between).sum();
  const std::string text = thrown<std::exception>([&] { loss.backward(); });
  EXPECT_NE(text.find("backward of this model inside"), std::string::npos) << text;
}

TEST(SiteTest, GradientsAreNotReadInAnOpenWindow) {
  OddModel model(Kind::kUnused);
  for (const Strategy strategy : {Strategy::kReplicate, Strategy::kFullShard}) {
    Policy policy = sharded();
    policy.strategy = strategy;
    Parallel parallel = parallelize(model, comm::init(comm::Environment{}, {}), policy);
    {
      const auto sync = parallel.sync_gradients(false);
      model(input_of(0)).sum().backward();
    }
    const std::string text = thrown<ConfigError>([&] { parallel.clip_grad_norm(1.0); });
    EXPECT_TRUE(contains(text, "open window")) << text;
    model(input_of(0)).sum().backward();
    EXPECT_GT(parallel.clip_grad_norm(1.0), 0.0);
    for (const OwnedParam& owned : parallel.owned_params()) owned.clear_grad();
  }
}

TEST(SiteTest, SavingIsRefusedWhereParametersAreSlices) {
  for (const Strategy strategy : {Strategy::kReplicate, Strategy::kFullShard}) {
    OddModel model(Kind::kUnused);
    Policy policy = sharded();
    policy.strategy = strategy;
    Parallel parallel = parallelize(model, comm::init(comm::Environment{}, {}), policy);
    std::ostringstream out;
    const std::string text = thrown<ConfigError>([&] { torch::save(model, out); });
    if (strategy == Strategy::kFullShard) {
      EXPECT_TRUE(contains(text, "torch::save of the model, whose parameters are sharded")) << text;
    } else {
      EXPECT_EQ(text, "<no exception>");
    }
  }
}

class LookupImpl : public torch::nn::Module {
 public:
  LookupImpl() {
    table_ = register_module(
        "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(11, kWidth).sparse(true)));
  }
  at::Tensor forward(at::Tensor i) { return table_(i); }

 private:
  torch::nn::Embedding table_{nullptr};
};
TESSERA_MODULE(Lookup);

TEST(SiteTest, ASparseGradientIsRefusedByName) {
  Lookup model;
  Parallel parallel = parallelize(model, comm::init(comm::Environment{}, {}), Policy());
  const at::Tensor loss = model(at::arange(3)).sum();
  const std::string text = thrown<std::exception>([&] { loss.backward(); });
  EXPECT_NE(text.find("'table.weight' is sparse"), std::string::npos) << text;
}

}  // namespace
}  // namespace tessera::engine
