// Goal: a failing rank ends its test at once and is named. Method: ranks that throw, leave early or
// do nothing.

#include "tests/harness/ranks.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "base/stopwatch.h"

namespace tessera::harness {
namespace {

std::string failure_of(int size, const std::function<void(comm::World&)>& fn,
                       std::chrono::milliseconds timeout) {
  try {
    run_ranks(size, fn, timeout);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "no failure";
}

TEST(Ranks, RunOnceEachWithTheirNumbers) {
  for (int size = 1; size <= 4; ++size) {
    std::atomic<int> sum{0};
    run_ranks(size, [&](comm::World& world) {
      EXPECT_EQ(world.size(), size);
      sum += 1 << world.rank();
    });
    EXPECT_EQ(sum, (1 << size) - 1);
  }
}

TEST(Ranks, AnExceptionEndsAllAndItsTextComesFirst) {
  const base::Stopwatch watch;
  const auto fail_in_rank_1 = [](comm::World& world) {
    if (world.rank() == 1) throw std::runtime_error("the culprit");
    world.barrier();
  };
  const std::string text = failure_of(3, fail_in_rank_1, std::chrono::seconds(30));
  EXPECT_EQ(text.find("rank 1 threw: the culprit"), 0u) << text;
  EXPECT_NE(text.find("rank 0 threw:"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 2 threw:"), std::string::npos) << text;
  EXPECT_LT(watch.seconds(), 15.0) << "others must not wait for their time limit";
}

TEST(Ranks, ARankThatLeavesEarlyFailsTheOthersWithinTheTimeout) {
  const auto leave_in_rank_0 = [](comm::World& world) {
    if (world.rank() != 0) world.barrier();
  };
  const std::string text = failure_of(2, leave_in_rank_0, std::chrono::seconds(1));
  EXPECT_EQ(text.find("rank 1 threw:"), 0u) << text;
}

}  // namespace
}  // namespace tessera::harness
