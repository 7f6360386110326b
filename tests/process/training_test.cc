// Goal: `tessera train` as processes trains, the same in every strategy and at any number of ranks,
// and reports it. Method: the real program on a tiny data set; the losses are read from
// metrics.jsonl.

#include <gtest/gtest.h>

#include <cmath>
#include <regex>
#include <set>
#include <sstream>
#include <string>

#include "tests/process/processes.h"

namespace tessera::process {
namespace {

// The first loss of the same global batch, its mean taken in another order: 64 tokens with losses
// near 5.6, each of which is off by a few fp32 units in the last place (2^-24 relative) and so is
// the sum: 64 * 5.6 * 2^-24.
constexpr double kFirstLossBound = 64 * 5.6 / (1 << 24);

class Training : public Processes {
 protected:
  // The metrics of a training that must succeed.
  std::vector<nlohmann::json> trained(const Strings& argv) {
    forget_metrics();
    const Outcome outcome = run(argv);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    last_ = outcome;
    return metrics();
  }

  // As they stand in the file: to the last digit.
  static Strings losses(const std::vector<nlohmann::json>& lines) {
    Strings texts;
    for (const nlohmann::json& line : lines) texts.push_back(line.at("loss").dump());
    return texts;
  }

  Outcome last_;
};

double loss(const nlohmann::json& line) { return line.at("loss").get<double>(); }

TEST_F(Training, IsTheSameToTheLastDigitInBothStrategiesAndNearlySoAlone) {
  const auto fsdp = trained(launch_command(2, {"--parallelism.strategy=fsdp"}));
  const auto ddp = trained(launch_command(2, {"--parallelism.strategy=ddp"}));
  ASSERT_EQ(fsdp.size(), 4u);
  EXPECT_EQ(losses(fsdp), losses(ddp));
  EXPECT_LT(loss(fsdp[3]), loss(fsdp[0]) - 0.05);  // it learns: equal losses are no accident

  const auto alone = trained(train_command({"--training.local_batch_size=4"}));
  ASSERT_EQ(alone.size(), 4u);
  EXPECT_NEAR(loss(alone[0]), loss(fsdp[0]), kFirstLossBound);
  EXPECT_EQ(alone[3].at("tokens_seen"), fsdp[3].at("tokens_seen"));

  const auto other_seed = trained(launch_command(2, {"--debug.seed=1"}));
  EXPECT_NE(losses(other_seed), losses(fsdp));
}

TEST_F(Training, RunsOnThreeRanksInBf16) {
  const Strings bf16 = {"--training.mixed_precision_param=bfloat16",
                        "--training.mixed_precision_reduce=float32", "--training.steps=8"};
  for (const std::string strategy : {"fsdp", "ddp"}) {
    Strings options = bf16;
    options.push_back("--parallelism.strategy=" + strategy);
    const auto lines = trained(launch_command(3, options));
    ASSERT_EQ(lines.size(), 8u) << strategy;
    EXPECT_LT(loss(lines[7]), loss(lines[0]) - 0.1) << strategy;
    EXPECT_EQ(lines[7].at("tokens_seen"), 8 * 3 * 2 * 16);
    // Casting does something: the losses are not those of fp32.
    const auto fp32 =
        trained(launch_command(3, {"--training.steps=1", "--parallelism.strategy=" + strategy}));
    EXPECT_NE(loss(lines[0]), loss(fp32[0])) << strategy;
    // A bf16 rounds by up to 2^-9 of its value; the mean over 96 tokens stays within two of those.
    EXPECT_NEAR(loss(lines[0]), loss(fp32[0]), 5.6 / 256) << strategy;
  }
}

TEST_F(Training, AccumulatesToTheGlobalBatchSize) {
  for (const std::string strategy : {"fsdp", "ddp"}) {
    const auto at_once = trained(
        launch_command(2, {"--training.local_batch_size=4", "--parallelism.strategy=" + strategy}));
    EXPECT_SAYS(last_.err, "8 a step");
    const auto accumulated = trained(launch_command(
        2, {"--training.global_batch_size=8", "--parallelism.strategy=" + strategy}));
    EXPECT_SAYS(last_.err, "8 a step");
    ASSERT_EQ(accumulated.size(), 4u);
    EXPECT_EQ(accumulated[0].at("tokens_seen"), 8 * 16);
    EXPECT_NEAR(loss(accumulated[0]), loss(at_once[0]), 2 * kFirstLossBound);
    // Updates are the same but for rounding, which AdamW's division lets grow a little with each
    // step.
    EXPECT_NEAR(loss(accumulated[3]), loss(at_once[3]), 1e-3);
  }
}

TEST_F(Training, PrintsOneSampleOfTheModel) {
  for (const std::string strategy : {"fsdp", "ddp"}) {
    const Strings options = {"--sampling.sample_bytes=12", "--sampling.sample_prompt=begin",
                             "--parallelism.strategy=" + strategy};
    trained(launch_command(2, options));
    const std::string start = "sample: begin";
    const size_t at = last_.out.find(start);
    ASSERT_NE(at, std::string::npos) << last_.out;
    EXPECT_EQ(last_.out.find("sample: ", at + 1), std::string::npos) << "more than rank 0's";
    const size_t end = last_.out.find('\n', at);
    ASSERT_NE(end, std::string::npos);
    EXPECT_GE(end - at - start.size(), 12u) << last_.out;  // an escaped byte is longer than one
  }
}

TEST_F(Training, ReportsEveryLogFreqStepsAndTheFirstAndTheLast) {
  const auto lines = trained(
      launch_command(2, {"--training.steps=7", "--metrics.log_freq=3", "--metrics.peak_flops=1e12",
                         "--lr_scheduler.warmup_steps=2", "--optimizer.lr=0.001"}));
  ASSERT_EQ(lines.size(), 4u);
  const int64_t steps[] = {1, 3, 6, 7};
  for (size_t i = 0; i < lines.size(); ++i) {
    const nlohmann::json& line = lines[i];
    std::set<std::string> names;
    for (const auto& [name, value] : line.items()) {
      names.insert(name);
      EXPECT_TRUE(value.is_number()) << name;
    }
    EXPECT_EQ(names, (std::set<std::string>{"step", "loss", "grad_norm", "lr", "memory_bytes",
                                            "memory_fraction", "tps", "tflops", "mfu",
                                            "tokens_seen", "step_seconds", "data_seconds"}));
    EXPECT_EQ(line.at("step"), steps[i]);
    EXPECT_EQ(line.at("tokens_seen"), steps[i] * 2 * 2 * 16);
    EXPECT_GT(line.at("tps").get<double>(), 0);
    EXPECT_GT(line.at("memory_bytes").get<int64_t>(), 1 << 20);
    EXPECT_NEAR(line.at("mfu").get<double>(), line.at("tflops").get<double>(), 1e-12);
    EXPECT_LE(line.at("data_seconds").get<double>(), line.at("step_seconds").get<double>());
  }
  EXPECT_LT(lines[0].at("lr").get<double>(), 0.001);
  EXPECT_GT(lines[0].at("lr").get<double>(), 0);
  EXPECT_LT(lines[3].at("lr").get<double>(), lines[1].at("lr").get<double>());

  // torchtitan's line, one for each line of JSON and from rank 0 alone.
  const std::regex pattern(R"(step: +\d+  loss: +\d+\.\d{5}  grad_norm: +\d+\.\d{4}  )"
                           R"(memory: +\d+\.\d\dGiB\(\d+\.\d\d%\)  )"
                           R"(tps: [\d,]+  tflops: \d+\.\d\d  mfu: \d+\.\d\d%)");
  std::istringstream out(last_.out);
  size_t num_lines = 0;
  for (std::string line; std::getline(out, line); ++num_lines) {
    EXPECT_TRUE(std::regex_match(line, pattern)) << line;
  }
  EXPECT_EQ(num_lines, lines.size());
}

}  // namespace
}  // namespace tessera::process
