// Goal: the benchmark programs run, and print what benchmarks/compare.py and the pages of results
// read. Method: tiny sizes, one process, every mode.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/benchmarks/run_program.h"

namespace tessera::benchmarks {
namespace {

using ::testing::HasSubstr;

constexpr char kTrainStep[] = "benchmarks/step/train_step";
constexpr char kHostOverhead[] = "benchmarks/engine/host_overhead";
constexpr char kTiny[] =
    " --dim 16 --layers 2 --heads 2 --kv-heads 1 --ffn 24 --vocab 31 --seq 8 --steps 5 --warmup 1";
// tok and out 31 * 16 each; a block: norms 2 * 16, wq and wo 16 * 16 each, wk and wv 16 * 8 each,
// w1, w2, w3 16 * 24.
constexpr int64_t kTinyParams = 2 * 31 * 16 + 2 * (32 + 2 * 256 + 2 * 128 + 3 * 384) + 16;

nlohmann::json result_of(const std::string& command) {
  const Outcome outcome = run_program(command);
  EXPECT_EQ(outcome.status, 0) << command << "\n" << outcome.output;
  return last_json(outcome.output);
}

nlohmann::json train(const std::string& flags) { return result_of(kTrainStep + (kTiny + flags)); }

void expect_like(const nlohmann::json& losses, const nlohmann::json& expected, double bound) {
  ASSERT_EQ(losses.size(), expected.size());
  for (size_t i = 0; i < losses.size(); ++i) {
    EXPECT_NEAR(losses[i].get<double>(), expected[i].get<double>(), bound) << "step " << i;
  }
}

TEST(TrainStep, PrintsTheFieldsOfTheComparisonInEveryMode) {
  for (const std::string mode : {"single", "ddp", "fsdp"}) {
    const nlohmann::json result = train(" --accum 2 --mode " + mode);
    EXPECT_EQ(result.at("mode"), mode);
    EXPECT_EQ(result.at("world"), 1);
    EXPECT_EQ(result.at("params"), kTinyParams);
    EXPECT_EQ(result.at("dtype"), "fp32");
    EXPECT_EQ(result.at("accum"), 2);
    EXPECT_GT(result.at("min_s").get<double>(), 0);
    EXPECT_GE(result.at("median_s").get<double>(), result.at("min_s").get<double>());
    EXPECT_GT(result.at("peak_rss_mb").get<double>(), 1);
    ASSERT_EQ(result.at("loss_rank0").size(), 4u);
    EXPECT_FALSE(result.contains("stats"));
  }
}

// One rank computes what a training without the engine computes. The norm for clipping is summed in
// another order, which moves the losses by a few roundings: 1e-5 is some 40 of them at a loss
// near 3.
TEST(TrainStep, LosesTheSameInEveryMode) {
  const nlohmann::json alone = train(" --accum 2 --mode single");
  for (const std::string flags : {" --mode ddp", " --mode fsdp", " --mode fsdp --prefetch 0",
                                  " --mode fsdp --reshard-after-forward 0"}) {
    expect_like(train(" --accum 2" + flags).at("loss_rank0"), alone.at("loss_rank0"), 1e-5);
  }
}

// With any of these flags the training is another one, and so are its losses.
TEST(TrainStep, ReadsItsFlags) {
  const nlohmann::json base = train(" --mode single").at("loss_rank0");
  for (const std::string flags : {"--accum 2", "--clip 0", "--batch 3", "--param-dtype bf16"}) {
    EXPECT_NE(train(" --mode single " + flags).at("loss_rank0"), base) << flags;
  }
  const nlohmann::json fp32 = train(" --mode fsdp").at("loss_rank0");
  const nlohmann::json bf16 = train(" --mode fsdp --param-dtype bf16").at("loss_rank0");
  EXPECT_NE(bf16, fp32);
  // bf16 keeps 8 bits: about 0.4% of activations near 1, averaged over 16 tokens.
  expect_like(bf16, fp32, 0.05);
}

TEST(TrainStep, SplitsTheTimeWhenAsked) {
  for (const std::string mode : {"single", "fsdp"}) {
    const nlohmann::json stats = train(" --stats 1 --mode " + mode).at("stats");
    for (const std::string part : {"forward_s", "backward_s", "clip_s", "optimizer_s"}) {
      EXPECT_GT(stats.at(part).get<double>(), 0) << part;
    }
  }
}

TEST(TrainStep, RefusesARunThatTimesNothing) {
  const Outcome outcome = run_program(kTrainStep + std::string(" --steps 3 --warmup 3"));
  EXPECT_NE(outcome.status, 0);
  EXPECT_THAT(outcome.output, HasSubstr("expected --steps > --warmup, found 3 and 3"));
}

TEST(HostOverhead, PrintsTheFieldsOfTheComparisonInEveryMode) {
  for (const std::string mode : {"fsdp", "ddp"}) {
    for (const std::string bf16 : {"0", "1"}) {
      const nlohmann::json result =
          result_of(kHostOverhead + (" --world 8 --units 3 --dim 4 --steps 7 --mode " + mode) +
                    " --bf16 " + bf16);
      EXPECT_EQ(result.at("world"), 8);
      EXPECT_EQ(result.at("units"), 3);
      EXPECT_GT(result.at("plain_us").get<double>(), 0);
      EXPECT_GT(result.at("plain_opt_us").get<double>(), 0);
      EXPECT_GT(result.at(mode + "_us").get<double>(), 0);
      EXPECT_GT(result.at(mode + "_opt_us").get<double>(), 0);
      // Each of the three is rounded to a tenth.
      EXPECT_NEAR(result.at(mode + "_added_us").get<double>(),
                  result.at(mode + "_us").get<double>() - result.at("plain_us").get<double>(), 0.2);
    }
  }
}

}  // namespace
}  // namespace tessera::benchmarks
