// Goal: the integer arithmetic that every count rests on is right, and errors say what they are.
// Method: all small arguments against definitions by membership of single positions; texts of
// errors, of nearest names and of log lines.

#include <gtest/gtest.h>
#include <unistd.h>

#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/interval.h"
#include "base/log.h"
#include "base/math.h"
#include "base/nearest.h"
#include "base/resident_memory.h"
#include "base/stopwatch.h"
#include "tests/base/thrown.h"

namespace tessera::base {
namespace {

std::set<int64_t> positions(Interval interval) {
  std::set<int64_t> result;
  for (int64_t i = interval.begin; i < interval.end; ++i) result.insert(i);
  return result;
}

std::vector<Interval> small_intervals() {
  std::vector<Interval> result;
  for (int64_t begin = 0; begin <= 7; ++begin) {
    for (int64_t end = begin; end <= 7; ++end) result.push_back({begin, end});
  }
  return result;
}

TEST(IntervalTest, AnIntersectionHoldsThePositionsInBothAndLiesInTheFirst) {
  for (const Interval a : small_intervals()) {
    for (const Interval b : small_intervals()) {
      std::set<int64_t> expected;
      for (const int64_t i : positions(a)) {
        if (positions(b).count(i) != 0) expected.insert(i);
      }
      const Interval both = intersect(a, b);
      EXPECT_EQ(positions(both), expected);
      EXPECT_LE(a.begin, both.begin);
      EXPECT_LE(both.begin, both.end);
      EXPECT_LE(both.end, a.end);
    }
  }
}

TEST(IntervalTest, SizeEmptyShiftAndEqualityFollowFromThePositions) {
  for (const Interval a : small_intervals()) {
    EXPECT_EQ(a.size(), static_cast<int64_t>(positions(a).size()));
    EXPECT_EQ(a.empty(), positions(a).empty());
    const Interval moved = shift(a, 5);
    EXPECT_EQ(moved.size(), a.size());
    EXPECT_EQ(moved.begin, a.begin + 5);
    EXPECT_TRUE(shift(moved, -5) == a);
    EXPECT_FALSE(moved == a);
  }
}

TEST(MathTest, CeilDivAndRoundUpAreTheSmallestThatReachTheValue) {
  for (int64_t value = 0; value <= 60; ++value) {
    for (int64_t divisor = 1; divisor <= 13; ++divisor) {
      const int64_t n = ceil_div(value, divisor);
      EXPECT_GE(n * divisor, value);
      EXPECT_LT((n - 1) * divisor, value);
      EXPECT_EQ(round_up(value, divisor), n * divisor);
    }
  }
}

TEST(MathTest, CeilDivDoesNotOverflowAtTheEndOfTheRange) {
  const int64_t largest = INT64_MAX;
  EXPECT_EQ(ceil_div(largest, 1), largest);
  EXPECT_EQ(ceil_div(largest, 2), largest / 2 + 1);
}

TEST(MathTest, EvenPartsFollowEachOtherAndTheFirstAreOneLonger) {
  for (int64_t size = 0; size <= 40; ++size) {
    for (int64_t parts = 1; parts <= 9; ++parts) {
      int64_t end = 0;
      for (int64_t i = 0; i < parts; ++i) {
        const Interval part = even_part(size, parts, i);
        EXPECT_EQ(part.begin, end);
        EXPECT_EQ(part.size(), size / parts + (i < size % parts ? 1 : 0));
        end = part.end;
      }
      EXPECT_EQ(end, size);
    }
  }
}

TEST(NearestTest, FindsTheNameWithTheFewestEdits) {
  const std::vector<std::string> names = {"optimizer.lr", "optimizer.eps", "training.steps"};
  EXPECT_EQ(nearest("optimizer.lr", names), "optimizer.lr");
  EXPECT_EQ(nearest("optimiser.lr", names), "optimizer.lr");
  EXPECT_EQ(nearest("training.step", names), "training.steps");
  EXPECT_EQ(nearest("optimizer.esp", names), "optimizer.eps");
}

TEST(NearestTest, TakesTheFirstOfEqualsAndNothingThatIsTooFar) {
  EXPECT_EQ(nearest("bb", {"ab", "ba"}), "ab");
  EXPECT_EQ(nearest("abcd", {"abxy"}), "abxy") << "two of four letters differ: just near enough";
  EXPECT_EQ(nearest("abcd", {"axyz"}), "");
  EXPECT_EQ(nearest("anything", {}), "");
  EXPECT_EQ(nearest("", {"a"}), "");
}

TEST(ErrorTest, MessagesAreTheConcatenatedParts) {
  EXPECT_EQ(str("rank ", 3, ": ", 1.5, 'x', std::string("!")), "rank 3: 1.5x!");
  const auto check = [](int value) {
    TESSERA_CHECK_CONFIG(value > 0, "steps=", value, ": expected more than 0.");
  };
  EXPECT_NO_THROW(check(1));
  EXPECT_EQ(thrown<ConfigError>([&] { check(-2); }), "steps=-2: expected more than 0.");
}

TEST(ErrorTest, AnInternalErrorNamesThePlaceTheConditionAndUs) {
  const std::string text = thrown<InternalError>([] { TESSERA_CHECK(1 + 1 == 3, "sum ", 2, "."); });
  EXPECT_TRUE(contains(text, "base_test.cc:")) << text;
  EXPECT_TRUE(contains(text, "expected 1 + 1 == 3. sum 2.")) << text;
  EXPECT_TRUE(contains(text, "bug in Tessera")) << text;
}

TEST(ErrorTest, MessagePartsAreEvaluatedOnlyOnFailure) {
  int evaluated = 0;
  const auto part = [&] { return ++evaluated; };
  TESSERA_CHECK_CONFIG(true, part());
  TESSERA_CHECK(true, part());
  EXPECT_EQ(evaluated, 0);
}

TEST(ErrorTest, TheFourTypesShareOneBaseAndAreApart) {
  EXPECT_THROW(throw ConfigError("x"), Error);
  EXPECT_THROW(throw CommError("x"), Error);
  EXPECT_THROW(throw CheckpointError("x"), Error);
  EXPECT_THROW(throw InternalError("x"), std::runtime_error);
  EXPECT_EQ(thrown<CommError>([] { throw ConfigError("x"); }).find("<another type"), 0u);
}

TEST(LogTest, LinesCarryRankAndKindAndGoToStandardErrorWhole) {
  testing::internal::CaptureStderr();
  log_info("before a rank is known");
  set_log_rank(3);
  log_info("text");
  log_warning("low");
  log_error("high");
  set_log_rank(-1);
  log_error("after");
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "before a rank is known\n[rank 3] text\n[rank 3] warning: low\n[rank 3] error: high\n"
            "error: after\n");
}

TEST(ResidentMemoryTest, GrowsWithTouchedMemoryAndStaysBelowTheMachines) {
  const int64_t before = resident_memory().peak_bytes;
  constexpr size_t kBytes = 64 << 20;
  std::vector<char> touched(kBytes, 1);
  const ResidentMemory memory = resident_memory();
  // Pages that were resident before may be reused, none of a fresh 64 MiB mapping.
  EXPECT_GE(memory.current_bytes, static_cast<int64_t>(kBytes));
  EXPECT_GE(memory.peak_bytes, memory.current_bytes);
  EXPECT_GE(memory.peak_bytes, before);
  EXPECT_LT(memory.peak_bytes, machine_memory_bytes());
  EXPECT_EQ(touched[kBytes - 1], 1);
}

TEST(StopwatchTest, CountsUpAndStartsAgain) {
  Stopwatch watch;
  ::usleep(20'000);
  const double first = watch.seconds();
  EXPECT_GE(first, 0.02);
  EXPECT_GE(watch.seconds(), first);
  watch.restart();
  const Stopwatch later;
  EXPECT_GE(watch.seconds(), later.seconds());
  EXPECT_LT(watch.seconds(), first + 10.0);
}

}  // namespace
}  // namespace tessera::base
