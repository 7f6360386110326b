// Goal: a rank that dies or stands still in the middle of a training ends the whole run in bounded
// time, with its number in the message, and nothing stays behind. Method: SIGKILL and SIGSTOP to
// one process of a training that has reported its third step.

#include <gtest/gtest.h>
#include <signal.h>

#include <string>

#include "tests/process/processes.h"

namespace tessera::process {
namespace {

constexpr int kCommCode = 3;
constexpr int kTrainTimeoutSeconds = 3;

// Until it is stopped.
const Strings kForever = {"--training.steps=1000000", "--comm.train_timeout_seconds=3"};

class LostRank : public Processes {
 protected:
  static Strings forever(const std::string& strategy) {
    Strings options = kForever;
    options.push_back("--parallelism.strategy=" + strategy);
    return options;
  }

  void await_step(int64_t step) {
    ASSERT_TRUE(becomes_true([&] { return reported_steps() >= step; }, 30)) << "it does not train";
  }
};

TEST_F(LostRank, KilledRankEndsTheLaunchWithItsNumberAndSignal) {
  for (const std::string strategy : {"fsdp", "ddp"}) {
    for (const int64_t rank : {0, 1}) {
      SCOPED_TRACE(strategy + ", rank " + std::to_string(rank));
      forget_metrics();
      const auto launcher = start(launch_command(2, forever(strategy), {"--grace-seconds", "5"}));
      await_step(3);
      const pid_t pid = process_of_rank(rank);
      ASSERT_NE(pid, 0);
      ::kill(pid, SIGKILL);
      const Outcome outcome = launcher->wait(30);
      EXPECT_FALSE(outcome.was_late);
      EXPECT_LT(outcome.seconds, 5 + kTrainTimeoutSeconds);
      EXPECT_EQ(outcome.code, 128 + SIGKILL) << outcome.err;
      EXPECT_SAYS(outcome.err, "launch: rank " + std::to_string(rank) + " (pid " +
                                   std::to_string(pid) + ") was killed by signal 9 (SIGKILL)");
      expect_no_process_left();
    }
  }
}

TEST_F(LostRank, KilledRankOfThreeEndsTheLaunch) {
  const auto launcher = start(launch_command(3, forever("fsdp"), {"--grace-seconds", "5"}));
  await_step(3);
  const pid_t pid = process_of_rank(2);
  ASSERT_NE(pid, 0);
  ::kill(pid, SIGKILL);
  const Outcome outcome = launcher->wait(30);
  EXPECT_EQ(outcome.code, 128 + SIGKILL) << outcome.err;
  EXPECT_SAYS(outcome.err, "launch: rank 2 (pid ");
  expect_no_process_left();
}

// Without a launcher the other rank finds out by itself.
TEST_F(LostRank, PeerOfAKilledRankNamesIt) {
  for (const std::string strategy : {"fsdp", "ddp"}) {
    for (const int64_t victim : {0, 1}) {
      SCOPED_TRACE(strategy + ", rank " + std::to_string(victim));
      forget_metrics();
      const int64_t port = free_port();
      std::unique_ptr<Child> ranks[2];
      for (const int64_t r : {0, 1}) {
        ranks[r] = start(train_command(forever(strategy)), rank_environment(r, 2, port));
      }
      await_step(3);
      ranks[victim]->signal(SIGKILL);
      const Outcome outcome = ranks[1 - victim]->wait(30);
      EXPECT_FALSE(outcome.was_late);
      EXPECT_LT(outcome.seconds, kTrainTimeoutSeconds + 5);
      EXPECT_EQ(outcome.code, kCommCode) << outcome.err;
      EXPECT_SAYS(error_line(outcome.err), " with rank " + std::to_string(victim) + " failed: ");
      EXPECT_TRUE(ends_with_a_stop(error_line(outcome.err))) << outcome.err;
      EXPECT_EQ(ranks[victim]->wait(5).code, 128 + SIGKILL);
      expect_no_process_left();
    }
  }
}

TEST_F(LostRank, PeerOfAStoppedRankEndsAfterTheTimeLimitAndNamesCollectiveAndRank) {
  for (const std::string strategy : {"fsdp", "ddp"}) {
    SCOPED_TRACE(strategy);
    forget_metrics();
    const int64_t port = free_port();
    const auto first = start(train_command(forever(strategy)), rank_environment(0, 2, port));
    const auto second = start(train_command(forever(strategy)), rank_environment(1, 2, port));
    await_step(3);
    second->signal(SIGSTOP);
    const Outcome outcome = first->wait(30);
    second->signal(SIGKILL);
    EXPECT_FALSE(outcome.was_late);
    EXPECT_GE(outcome.seconds, kTrainTimeoutSeconds - 0.5);
    EXPECT_LT(outcome.seconds, kTrainTimeoutSeconds + 5);
    EXPECT_EQ(outcome.code, kCommCode) << outcome.err;
    const std::string line = error_line(outcome.err);
    EXPECT_SAYS(line, " with rank 1 failed: ");
    EXPECT_SAYS(line, "Rank 1 has ended, is later than the time limit of 3 s");
    const bool names_collective =
        line.find("all-gather of unit '") != std::string::npos ||
        line.find("reduce-scatter of unit '") != std::string::npos ||
        line.find("all-reduce of bucket '") != std::string::npos ||
        line.find("agreement on ") != std::string::npos;  // wherever the stop met it
    EXPECT_TRUE(names_collective) << line;
    EXPECT_TRUE(ends_with_a_stop(line)) << line;
    second->wait(5);
    expect_no_process_left();
  }
}

TEST_F(LostRank, StoppedRankDoesNotKeepTheLauncher) {
  const auto launcher = start(launch_command(2, forever("fsdp"), {"--grace-seconds", "1"}));
  await_step(3);
  const pid_t pid = process_of_rank(1);
  ASSERT_NE(pid, 0);
  ::kill(pid, SIGSTOP);
  const Outcome outcome = launcher->wait(40);
  EXPECT_FALSE(outcome.was_late);
  EXPECT_EQ(outcome.code, kCommCode) << outcome.err;
  EXPECT_SAYS(outcome.err, " with rank 1 failed: ");
  EXPECT_SAYS(outcome.err, "did not end within 1 s; killing");
  expect_no_process_left();
}

// A write to a peer that has died raises SIGPIPE, and whether one is under way is chance: so the
// reader of rank 0's standard output dies instead, which every report meets.
TEST_F(LostRank, ClosedPipeIsAnErrorWithAMessageAndNoSilentSignal) {
  Strings argv = {"/bin/bash", "-c", "set -o pipefail; \"$0\" \"$@\" | :"};
  const Strings launch = launch_command(2, forever("fsdp"), {"--grace-seconds", "5"});
  argv.insert(argv.end(), launch.begin(), launch.end());
  const Outcome outcome = run(argv);
  EXPECT_EQ(outcome.code, 2) << outcome.err;
  EXPECT_SAYS(outcome.err, "cannot write the metrics to standard output: Broken pipe");
}

TEST_F(LostRank, InterruptedLauncherEndsAllRanks) {
  const auto launcher = start(launch_command(2, forever("ddp"), {"--grace-seconds", "5"}));
  await_step(3);
  launcher->signal(SIGINT);
  const Outcome outcome = launcher->wait(30);
  EXPECT_FALSE(outcome.was_late);
  EXPECT_EQ(outcome.code, 128 + SIGINT) << outcome.err;
  expect_no_process_left();
  // What was reported is whole: no torn line.
  EXPECT_GE(metrics().size(), 3u);
}

}  // namespace
}  // namespace tessera::process
