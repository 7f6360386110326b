// Goal: the lines are torchtitan's, the JSON is valid whatever the numbers, no write error is lost.
// Method: expected text by hand from torchtitan's format strings; the file is parsed back.

#include "train/metrics.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/resident_memory.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

StepMetrics example() {
  StepMetrics metrics;
  metrics.step = 3;
  metrics.loss = 8.1398;
  metrics.grad_norm = 1.5;
  metrics.lr = 8e-4;
  metrics.memory_bytes = int64_t{3} << 29;  // 1.5 GiB
  metrics.memory_fraction = 0.0125;
  metrics.tps = 1234567.4;
  metrics.tflops = 1234.5;
  metrics.mfu = 0.4567;
  metrics.tokens_seen = int64_t{1} << 40;
  metrics.step_seconds = 0.25;
  metrics.data_seconds = 0.01;
  return metrics;
}

class Metrics : public testing::Test {
 protected:
  Metrics() {
    std::string pattern = (fs::path(testing::TempDir()) / "metrics_XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~Metrics() override { fs::remove_all(folder_); }

  std::vector<std::string> lines() const {
    std::vector<std::string> result;
    std::ifstream in(folder_ / "metrics.jsonl");
    for (std::string line; std::getline(in, line);) result.push_back(line);
    return result;
  }

  fs::path folder_;
};

TEST_F(Metrics, LineIsTorchtitans) {
  EXPECT_EQ(metrics_line(example()),
            "step:  3  loss:  8.13980  grad_norm:  1.5000  memory:  1.50GiB(1.25%)  "
            "tps: 1,234,567  tflops: 1,234.50  mfu: 45.67%");
}

TEST_F(Metrics, LineGroupsDigitsByThree) {
  StepMetrics metrics = example();
  const std::vector<std::pair<double, std::string>> cases = {
      {0, "tps: 0  "},           {7, "tps: 7  "},          {999, "tps: 999  "},
      {1000, "tps: 1,000  "},    {12345, "tps: 12,345  "}, {999999, "tps: 999,999  "},
      {1e6, "tps: 1,000,000  "}, {-1234, "tps: -1,234  "}, {-123, "tps: -123  "}};
  for (const auto& [tps, expected] : cases) {
    metrics.tps = tps;
    EXPECT_NE(metrics_line(metrics).find(expected), std::string::npos) << metrics_line(metrics);
  }
}

TEST_F(Metrics, LineSaysWhatIsUnknownOrNotANumber) {
  StepMetrics metrics = example();
  metrics.step = 12345;
  metrics.loss = -kNan;
  metrics.grad_norm = kInfinity;
  metrics.mfu.reset();
  EXPECT_EQ(metrics_line(metrics),
            "step: 12345  loss:      nan  grad_norm:     inf  memory:  1.50GiB(1.25%)  "
            "tps: 1,234,567  tflops: 1,234.50  mfu: N/A");
}

TEST_F(Metrics, WritesOneJsonObjectPerLineAndTheSameToStandardOutput) {
  testing::internal::CaptureStdout();
  MetricsWriter writer((folder_ / "new" / "run").string());
  writer.write(example());
  EXPECT_EQ(testing::internal::GetCapturedStdout(), metrics_line(example()) + "\n");

  std::ifstream in(writer.path());
  std::string line, more;
  ASSERT_TRUE(std::getline(in, line));
  EXPECT_FALSE(std::getline(in, more));
  const auto json = nlohmann::json::parse(line);
  EXPECT_EQ(json.size(), 12u);
  EXPECT_EQ(json["step"], 3);
  EXPECT_EQ(json["loss"], 8.1398);
  EXPECT_EQ(json["grad_norm"], 1.5);
  EXPECT_EQ(json["lr"], 8e-4);
  EXPECT_EQ(json["memory_bytes"], int64_t{3} << 29);
  EXPECT_EQ(json["memory_fraction"], 0.0125);
  EXPECT_EQ(json["tps"], 1234567.4);
  EXPECT_EQ(json["tflops"], 1234.5);
  EXPECT_EQ(json["mfu"], 0.4567);
  EXPECT_EQ(json["tokens_seen"], int64_t{1} << 40);
  EXPECT_EQ(json["step_seconds"], 0.25);
  EXPECT_EQ(json["data_seconds"], 0.01);
}

TEST_F(Metrics, JsonStaysValidWithoutNumbers) {
  StepMetrics metrics = example();
  metrics.loss = kNan;
  metrics.grad_norm = -kInfinity;
  metrics.mfu.reset();
  const auto json = nlohmann::json::parse(metrics_json(metrics));  // throws for NaN
  EXPECT_TRUE(json["loss"].is_null());
  EXPECT_EQ(json["loss_is"], "nan");
  EXPECT_TRUE(json["grad_norm"].is_null());
  EXPECT_EQ(json["grad_norm_is"], "-inf");
  EXPECT_TRUE(json["mfu"].is_null());
  EXPECT_EQ(json.count("mfu_is"), 0u);
  EXPECT_EQ(json.count("lr_is"), 0u);
}

TEST_F(Metrics, AppendsAfterAResumeAndAfterATornLine) {
  std::ofstream(folder_ / "metrics.jsonl") << "{\"step\":1}\n{\"step\":2,\"lo";
  testing::internal::CaptureStdout();
  { MetricsWriter(folder_.string()).write(example()); }
  { MetricsWriter(folder_.string()).write(example()); }
  testing::internal::GetCapturedStdout();
  const auto found = lines();
  ASSERT_EQ(found.size(), 4u);
  EXPECT_EQ(found[0], "{\"step\":1}");
  EXPECT_EQ(found[1], "{\"step\":2,\"lo");
  EXPECT_EQ(found[2], metrics_json(example()));
  EXPECT_EQ(found[3], metrics_json(example()));
}

TEST_F(Metrics, RefusesAnMfuOverOneAndSaysWhichKeyIsWrong) {
  StepMetrics metrics = example();
  metrics.mfu = 1.5;
  MetricsWriter writer(folder_.string());
  testing::internal::CaptureStdout();
  try {
    writer.write(metrics);
    ADD_FAILURE() << "no error";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("metrics.peak_flops is too low"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("150.00%"), std::string::npos);
  }
  testing::internal::GetCapturedStdout();
}

TEST_F(Metrics, FailsWhereItCannotOpenOrWrite) {
  std::ofstream(folder_ / "file") << "x";
  EXPECT_THROW(MetricsWriter((folder_ / "file").string()), ConfigError);
  EXPECT_THROW(MetricsWriter((folder_ / "file" / "deeper").string()), ConfigError);
  fs::create_directory(folder_ / "metrics.jsonl");
  EXPECT_THROW(MetricsWriter(folder_.string()), ConfigError);

  fs::create_directory(folder_ / "full");
  fs::create_symlink("/dev/full", folder_ / "full" / "metrics.jsonl");
  MetricsWriter writer((folder_ / "full").string());
  testing::internal::CaptureStdout();
  try {
    writer.write(example());
    ADD_FAILURE() << "no error";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("No space left"), std::string::npos) << error.what();
  }
  testing::internal::GetCapturedStdout();
}

TEST(ResidentMemory, FollowsWhatTheProcessTouches) {
  constexpr int64_t kBytes = int64_t{64} << 20;
  const base::ResidentMemory before = base::resident_memory();
  EXPECT_GT(before.current_bytes, 0);
  EXPECT_LT(before.peak_bytes, base::machine_memory_bytes());
  {
    std::vector<char> block(kBytes, 1);
    const base::ResidentMemory during = base::resident_memory();
    // Linux adds up per-thread counts late: 64 pages of 4 KiB per thread may be missing, far below
    // a 16th.
    EXPECT_GE(during.current_bytes, before.current_bytes + kBytes - kBytes / 16) << block.back();
    EXPECT_GE(during.peak_bytes, during.current_bytes - kBytes / 16);
  }
  const base::ResidentMemory after = base::resident_memory();
  EXPECT_LT(after.current_bytes, before.current_bytes + kBytes / 2);
  EXPECT_GE(after.peak_bytes, before.current_bytes + kBytes / 2);
}

}  // namespace
}  // namespace tessera::train
