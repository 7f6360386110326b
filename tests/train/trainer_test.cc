// Goal: the Trainer trains on the mean over micro-batches and ranks, reports the right steps, and
// ends on all ranks when one has a fault, before anything was changed. Method: a small model on a
// file of tokens on ranks as threads; losses that turn NaN and data that is bad on one rank.

#include "train/trainer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <limits>

#include "base/error.h"
#include "data/token_file_writer.h"
#include "tests/base/thrown.h"
#include "tests/engine/probe_model.h"
#include "tests/harness/ranks.h"

namespace tessera::train {
namespace {

using engine::ProbeModel;
using harness::run_ranks;

constexpr int64_t kSeqLen = engine::ProbeModelImpl::kWidth;
constexpr uint16_t kVocab = 50;

class TrainerTest : public testing::Test {
 protected:
  TrainerTest() : folder_(testing::TempDir() + "/trainer_XXXXXX") {
    if (::mkdtemp(folder_.data()) == nullptr) throw std::runtime_error("cannot make " + folder_);
  }
  ~TrainerTest() override { std::filesystem::remove_all(folder_); }

  // Tokens 0, 7, 14, ... below kVocab; the one at `bad_position` is kVocab.
  std::string write_tokens(const std::string& name, int64_t count, int64_t bad_position = -1) {
    data::TokenFileWriter writer(folder_ + "/" + name);
    for (int64_t i = 0; i < count; ++i) {
      writer.append(static_cast<uint16_t>(i == bad_position ? kVocab : i * 7 % kVocab));
    }
    writer.finish();
    return folder_ + "/" + name;
  }

  std::string folder_;
};

at::Tensor loss_of_batch(ProbeModel& model, const data::Batch& batch) {
  const at::Tensor x = batch.tokens.to(at::kFloat) / kVocab;
  return at::mse_loss(model(x), batch.targets.to(at::kFloat) / kVocab);
}

// One rank's training; the tests change what they are about.
struct Training {
  Training(comm::World& w, const std::string& file, Strategy strategy, int64_t batch_size = 2)
      : world(w), parallel(parallelize(model, w, engine::policy_of(strategy))) {
    loader_options.seq_len = kSeqLen;
    loader_options.batch_size = batch_size;
    loader_options.world = w.size();
    loader_options.rank = w.rank();
    loader_options.vocab_size = kVocab;
    loader_options.shuffle = false;
    path = file;
    options.steps = 5;
    options.lr_schedule.total_steps = 100;
    loss = [this](const data::Batch& batch) { return loss_of_batch(model, batch); };
  }

  double run() {
    data::Loader loader(data::TokenFile(path), loader_options);
    Trainer trainer(
        world, parallel, loader, loss,
        [this](double lr) {
          rates.push_back(lr);
          engine::step_and_clear(parallel);
        },
        [this](const StepMetrics& metrics) { reports.push_back(metrics); }, options);
    return trainer.run();
  }

  comm::World& world;
  ProbeModel model;
  Parallel parallel;
  std::string path;
  data::LoaderOptions loader_options;
  TrainerOptions options;
  Trainer::Loss loss;
  std::vector<double> rates;
  std::vector<StepMetrics> reports;
};

constexpr Strategy kStrategies[] = {Strategy::kReplicate, Strategy::kFullShard};

TEST_F(TrainerTest, ReportsTheFirstTheLastAndEveryLogFreqthStep) {
  const std::string file = write_tokens("a.bin", 4000);
  for (const auto& [steps, log_freq, expected] :
       std::vector<std::tuple<int64_t, int64_t, std::vector<int64_t>>>{
           {1, 10, {1}}, {7, 3, {1, 3, 6, 7}}, {6, 2, {1, 2, 4, 6}}, {3, 1, {1, 2, 3}}}) {
    run_ranks(2, [&, steps = steps, log_freq = log_freq, expected = expected](comm::World& world) {
      Training training(world, file, Strategy::kFullShard);
      training.options.steps = steps;
      training.options.log_freq = log_freq;
      const double last_loss = training.run();
      std::vector<int64_t> reported;
      for (const StepMetrics& metrics : training.reports) {
        reported.push_back(metrics.step);
        EXPECT_EQ(metrics.tokens_seen, metrics.step * 2 * 2 * kSeqLen) << "batch x ranks x T";
        EXPECT_EQ(metrics.lr, training.rates[metrics.step - 1]);
        EXPECT_GT(metrics.tps, 0.0);
        EXPECT_GT(metrics.grad_norm, 0.0);
        EXPECT_FALSE(metrics.mfu.has_value()) << "the peak is unknown";
      }
      EXPECT_EQ(reported, expected);
      EXPECT_EQ(training.reports.back().loss, last_loss);
      EXPECT_EQ(training.rates.size(), static_cast<size_t>(steps));
    });
  }
}

TEST_F(TrainerTest, LossesAndNormsAreTheSameOnEveryRankAndForEveryStrategy) {
  const std::string file = write_tokens("a.bin", 4000);
  std::vector<std::vector<StepMetrics>> all(4);
  for (size_t s = 0; s < 2; ++s) {
    run_ranks(2, [&](comm::World& world) {
      Training training(world, file, kStrategies[s]);
      training.options.log_freq = 1;
      training.run();
      all[2 * s + world.rank()] = training.reports;
    });
  }
  for (size_t i = 1; i < all.size(); ++i) {
    ASSERT_EQ(all[i].size(), all[0].size());
    for (size_t step = 0; step < all[0].size(); ++step) {
      EXPECT_EQ(all[i][step].loss, all[0][step].loss);
      // The order of a sum of squares in double.
      EXPECT_NEAR(all[i][step].grad_norm, all[0][step].grad_norm, 1e-12);
    }
  }
  EXPECT_LT(all[0].back().loss, all[0].front().loss) << "it learns";
}

// The same 24 sequences a step on 1 rank at once, on 2 ranks and in 3 micro-batches. Means of means
// of equal sizes are equal up to rounding: fewer than 32 additions of fp32 terms on the way to each
// gradient, each with a relative error of at most 2^-24, over 4 steps; 2^-24 * 32 * 4 < 1e-5.
TEST_F(TrainerTest, MicroBatchesAndRanksTrainAsOneBigBatch) {
  const std::string file = write_tokens("a.bin", 4000);
  constexpr int64_t kSequences = 24;
  const auto train = [&](int size, int64_t micro_batches, Strategy strategy, bool compare,
                         engine::Tensors& values, std::vector<double>& losses) {
    run_ranks(size, [&](comm::World& world) {
      Training training(world, file, strategy, kSequences / size / micro_batches);
      training.options.steps = 4;
      training.options.log_freq = 1;
      training.options.micro_batches = micro_batches;
      training.run();
      for (size_t step = 0; compare && step < losses.size(); ++step) {
        EXPECT_NEAR(training.reports[step].loss, losses[step], 1e-5 * losses[step]);
      }
      if (compare) {
        engine::expect_values(training.parallel, values, "after training", 1e-5);
      } else {
        values = engine::values_of(training.model);
        for (const StepMetrics& metrics : training.reports) losses.push_back(metrics.loss);
      }
    });
  };
  engine::Tensors values;
  std::vector<double> losses;
  train(1, 1, Strategy::kReplicate, false, values, losses);
  ASSERT_EQ(losses.size(), 4u);
  for (const Strategy strategy : kStrategies) {
    for (const auto& [size, micro_batches] :
         std::vector<std::pair<int, int64_t>>{{1, 3}, {2, 1}, {2, 3}, {3, 2}}) {
      train(size, micro_batches, strategy, true, values, losses);
    }
  }
}

TEST_F(TrainerTest, ALossThatIsNoNumberOnOneRankEndsAllBeforeTheUpdate) {
  const std::string file = write_tokens("a.bin", 4000);
  for (const Strategy strategy : kStrategies) {
    for (const double bad :
         {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      run_ranks(3, [&](comm::World& world) {
        Training training(world, file, strategy);
        int64_t calls = 0;
        std::vector<at::Tensor> before;
        training.loss = [&](const data::Batch& batch) {
          before.clear();
          for (const OwnedParam& param : training.parallel.owned_params()) {
            before.push_back(param.value().detach().clone());
          }
          const at::Tensor loss = loss_of_batch(training.model, batch);
          // Step 3, which is not reported.
          return ++calls == 3 && world.rank() == 1 ? loss * bad : loss;
        };
        const std::string text = thrown<ConfigError>([&] { training.run(); });
        EXPECT_TRUE(contains(text, "step 3: the loss on rank 1 is ")) << text;
        EXPECT_EQ(training.rates.size(), 2u) << "no update of step 3";
        for (size_t i = 0; i < before.size(); ++i) {
          const OwnedParam& param = training.parallel.owned_params()[i];
          EXPECT_TRUE(at::equal(param.value(), before[i])) << param.name();
        }
        engine::expect_at_rest(training.parallel);
      });
    }
  }
}

// A finite loss whose gradient is not: d sqrt(x) at 0.
TEST_F(TrainerTest, AGradientThatIsNoNumberEndsAllBeforeTheUpdate) {
  const std::string file = write_tokens("a.bin", 4000);
  run_ranks(2, [&](comm::World& world) {
    Training training(world, file, Strategy::kFullShard);
    int64_t calls = 0;
    training.loss = [&](const data::Batch& batch) {
      const at::Tensor loss = loss_of_batch(training.model, batch);
      return ++calls == 2 && world.rank() == 0 ? at::sqrt(loss * 0.0) : loss;
    };
    const std::string text = thrown<ConfigError>([&] { training.run(); });
    EXPECT_TRUE(contains(text, "step 2: the norm of the gradients is ")) << text;
    EXPECT_EQ(training.rates.size(), 1u);
  });
}

// Over 2 ranks in batches of 2, sequence 9 is rank 1's in the third step.
TEST_F(TrainerTest, BadDataOnOneRankEndsAllWithItsText) {
  const std::string file = write_tokens("bad.bin", 4000, /*bad_position=*/9 * kSeqLen + 2);
  run_ranks(2, [&](comm::World& world) {
    Training training(world, file, Strategy::kFullShard);
    const std::string text = thrown<ConfigError>([&] { training.run(); });
    EXPECT_TRUE(contains(text, "bad.bin")) << text;
    // The rank that read it throws the loader's own text, the other one names that rank.
    EXPECT_EQ(contains(text, "rank 1 failed: "), world.rank() == 0) << text;
    EXPECT_EQ(training.rates.size(), 2u);
    engine::expect_at_rest(training.parallel);
  });
}

TEST_F(TrainerTest, AReportThatFailsOnOneRankEndsAll) {
  const std::string file = write_tokens("a.bin", 4000);
  run_ranks(2, [&](comm::World& world) {
    Training training(world, file, Strategy::kReplicate);
    data::Loader loader(data::TokenFile(training.path), training.loader_options);
    Trainer trainer(
        world, training.parallel, loader, training.loss,
        [&](double) { engine::step_and_clear(training.parallel); },
        [&](const StepMetrics& metrics) {
          if (world.rank() == 0 && metrics.step == 5) throw ConfigError("disk full");
        },
        training.options);
    const std::string text = thrown<ConfigError>([&] { trainer.run(); });
    EXPECT_EQ(text, world.rank() == 0 ? "disk full" : "rank 0 failed: disk full");
  });
}

TEST_F(TrainerTest, OptionsThatCannotWorkAreRefused) {
  const std::string file = write_tokens("a.bin", 4000);
  run_ranks(1, [&](comm::World& world) {
    const auto error_with = [&](const std::function<void(TrainerOptions&)>& change) {
      Training training(world, file, Strategy::kReplicate);
      change(training.options);
      return thrown<ConfigError>([&] { training.run(); });
    };
    EXPECT_TRUE(contains(error_with([](TrainerOptions& o) { o.steps = 0; }), "0 steps"));
    EXPECT_TRUE(contains(error_with([](TrainerOptions& o) { o.micro_batches = 0; }), "0 micro"));
    EXPECT_TRUE(contains(error_with([](TrainerOptions& o) { o.log_freq = 0; }), "every 0"));
    EXPECT_FALSE(contains(error_with([](TrainerOptions& o) { o.lr_schedule.total_steps = 0; }),
                          "<no exception>"));
  });
}

}  // namespace
}  // namespace tessera::train
