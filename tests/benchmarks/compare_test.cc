// Goal: compare.py runs both programs in turn, reports medians and ratios, and says when losses
// differ or a run fails. Method: the peer is a small Python program that answers at once, and our
// own train_step.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "tests/benchmarks/run_program.h"

namespace tessera::benchmarks {
namespace {

using ::testing::HasSubstr;

constexpr char kTiny[] =
    " -- --dim 16 --layers 1 --heads 2 --kv-heads 2 --ffn 24 --vocab 31 --seq 8 --steps 4 --warmup "
    "1";
constexpr char kOurs[] = " --ours benchmarks/step/train_step";

std::string scratch(const std::string& name) {
  const char* const folder = std::getenv("TEST_TMPDIR");
  return std::string(folder != nullptr ? folder : "/tmp") + "/" + name;
}

// Writes a peer with this body; `say(**fields)` prints a result from rank 0.
std::string peer(const std::string& name, const std::string& body) {
  const std::string path = scratch(name);
  std::ofstream(path) << "import json, os, sys, time\n"
                         "rank = int(os.environ['RANK'])\n"
                         "def say(**fields):\n"
                         "    if rank == 0: print(json.dumps(fields), flush=True)\n"
                      << body;
  return " --peer " + path;
}

// A Python program that becomes our train_step: a peer with equal losses.
std::string equal_peer() {
  return peer("equal_peer.py",
              "os.execv('benchmarks/step/train_step', ['train_step'] + sys.argv[1:])\n");
}

Outcome compare(const std::string& arguments) {
  return run_program("timeout 120 python3 benchmarks/compare.py" + arguments);
}

TEST(Compare, ReportsMediansAndRatiosOfBothPrograms) {
  const Outcome outcome =
      compare(kOurs + equal_peer() + " --modes single:single --rounds 3" + kTiny);
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  const nlohmann::json result = last_json(outcome.output);
  const nlohmann::json& single = result.at("modes").at("single");
  EXPECT_EQ(result.at("rounds"), 3);
  EXPECT_EQ(single.at("world"), 1);
  EXPECT_EQ(single.at("losses_agree"), true);
  EXPECT_DOUBLE_EQ(
      single.at("median_s_ratio").get<double>(),
      single.at("peer_median_s").get<double>() / single.at("ours_median_s").get<double>());
}

TEST(Compare, SaysWhenLossesDiffer) {
  const std::string liar = peer("liar.py",
                                "say(median_s=2.0, min_s=1.0, peak_rss_mb=10.0, world=1, "
                                "loss_rank0=[1.0, 2.0, 3.0, 4.0])\n");
  const Outcome outcome = compare(kOurs + liar + " --modes single:single --rounds 1" + kTiny);
  EXPECT_EQ(outcome.status, 1) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("LOSSES DIFFER in single"));
  EXPECT_EQ(last_json(outcome.output).at("modes").at("single").at("losses_agree"), false);
}

TEST(Compare, EndsTheOtherRanksAndShowsTheErrorWhenOneFails) {
  const std::string torn = peer("torn.py",
                                "if rank == 1: sys.exit('rank 1 has had enough')\n"
                                "time.sleep(600)\n");
  const Outcome outcome =
      compare(kOurs + torn + " --modes fsdp:fsdp2 --world 3 --rounds 1" + kTiny);
  EXPECT_EQ(outcome.status, 1) << outcome.output;  // 124 would be the time limit
  EXPECT_THAT(outcome.output, HasSubstr("rank 1 ended with 1"));
  EXPECT_THAT(outcome.output, HasSubstr("rank 1 has had enough"));
}

TEST(Compare, EndsRunsThatTakeTooLong) {
  const std::string slow = peer("slow.py", "time.sleep(600)\n");
  const Outcome outcome =
      compare(kOurs + slow + " --modes single:single --rounds 1 --timeout 1" + kTiny);
  EXPECT_EQ(outcome.status, 1) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("ranks [0] still ran after 1.0 s"));
}

TEST(Compare, ComparesTheHostOverheadOfBothPrograms) {
  const std::string path = scratch("ours.sh");
  std::ofstream(path)
      << "#!/bin/sh\necho '{\"plain_us\": 10, \"plain_opt_us\": 2, \"fsdp_us\": 15, "
         "\"fsdp_opt_us\": 2, \"fsdp_added_us\": 5}'\n";
  ASSERT_EQ(run_program("chmod +x " + path).status, 0);
  const std::string host_peer =
      peer("host_peer.py",
           "say(plain_us=12, plain_opt_us=4, fsdp2_us=42, fsdp2_opt_us=6, "
           "fsdp2_added_us=30)\n");
  const Outcome outcome = compare(" --host-overhead --rounds 1 --ours " + path + host_peer);
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  const nlohmann::json result = last_json(outcome.output);
  EXPECT_EQ(result.at("fsdp_added_us_ratio"), 6.0);
  EXPECT_EQ(result.at("fsdp_opt_us_ratio"), 3.0);
}

}  // namespace
}  // namespace tessera::benchmarks
