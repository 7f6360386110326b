// Goal: the rate of every step is right, also at the edges. Method: tables, some of them from
// PyTorch.

#include "optim/lr_schedule.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "base/error.h"

namespace tessera::optim {
namespace {

LrSchedule schedule(int64_t warmup, int64_t total, DecayType type, double min_factor) {
  return {1.0, warmup, total, /*decay_steps=*/-1, type, min_factor};
}

// PyTorch 2.11: SequentialLR([LinearLR(start_factor=1e-3, total_iters=4),
// CosineAnnealingLR(T_max=6, eta_min=0.1)], milestones=[4]) at lr 1 gives for steps 0..10
//   0.001 0.25075 0.5005 0.75025 1.0 0.939711 0.775 0.55 0.325 0.160289 0.1
// The definitions agree from the end of the warm-up on. Before it PyTorch goes from the start
// factor to the peak and reaches it in step 4; here step 3, the last of four, is at the peak and no
// start factor is needed. PyTorch climbs back after step 10; here the rate stays.
TEST(LrSchedule, DecaysAsPyTorchDoes) {
  const LrSchedule cosine = schedule(4, 10, DecayType::kCosine, 0.1);
  const std::vector<double> torch = {1.0, 0.939711, 0.775, 0.55, 0.325, 0.160289, 0.1};
  for (size_t i = 0; i < torch.size(); ++i) {
    // The table has six digits.
    EXPECT_NEAR(cosine.lr(4 + static_cast<int64_t>(i)), torch[i], 5e-7) << "step " << 4 + i;
  }
}

TEST(LrSchedule, WarmsUpFromTheFirstStepToThePeak) {
  const LrSchedule cosine = schedule(4, 10, DecayType::kCosine, 0.1);
  EXPECT_EQ(cosine.lr(0), 0.25);
  EXPECT_EQ(cosine.lr(1), 0.5);
  EXPECT_EQ(cosine.lr(2), 0.75);
  EXPECT_EQ(cosine.lr(3), 1.0);
  EXPECT_EQ(cosine.lr(4), 1.0);
}

TEST(LrSchedule, DecaysLinearly) {
  const LrSchedule linear = schedule(2, 10, DecayType::kLinear, 0.5);
  const std::vector<double> table = {0.5,  1.0,    1.0,   0.9375, 0.875, 0.8125,
                                     0.75, 0.6875, 0.625, 0.5625, 0.5,   0.5};
  for (size_t i = 0; i < table.size(); ++i) {
    EXPECT_DOUBLE_EQ(linear.lr(static_cast<int64_t>(i)), table[i]) << "step " << i;
  }
}

TEST(LrSchedule, StaysAtThePeakUntilTheDecaySteps) {
  LrSchedule wsd = schedule(4, 20, DecayType::kLinear, 0.0);
  wsd.decay_steps = 5;
  for (int64_t step = 3; step <= 15; ++step) EXPECT_EQ(wsd.lr(step), 1.0) << step;
  EXPECT_NEAR(wsd.lr(16), 0.8, 1e-15);
  EXPECT_NEAR(wsd.lr(19), 0.2, 1e-15);
  EXPECT_EQ(wsd.lr(20), 0.0);
  wsd.decay_steps = 0;
  EXPECT_EQ(wsd.lr(19), 1.0);
  EXPECT_EQ(wsd.lr(20), 0.0);
  wsd.decay_steps = 17;  // one more than there are after the warm-up
  EXPECT_THROW(wsd.lr(0), ConfigError);
}

TEST(LrSchedule, WithoutWarmUpStartsAtThePeak) {
  for (const DecayType type : {DecayType::kCosine, DecayType::kLinear}) {
    EXPECT_EQ(schedule(0, 10, type, 0.0).lr(0), 1.0);
    EXPECT_LT(schedule(0, 10, type, 0.0).lr(1), 1.0);
  }
}

TEST(LrSchedule, StaysAtTheMinimumAfterTheEnd) {
  for (const DecayType type : {DecayType::kCosine, DecayType::kLinear}) {
    for (const int64_t step : {int64_t{10}, int64_t{11}, int64_t{19}, int64_t{1} << 40}) {
      EXPECT_EQ(schedule(3, 10, type, 0.25).lr(step), 0.25) << "step " << step;
      EXPECT_EQ(schedule(3, 10, type, 0.0).lr(step), 0.0) << "step " << step;
    }
  }
}

TEST(LrSchedule, NeverLeavesItsRangeAndNeverRisesAfterWarmUp) {
  for (const DecayType type : {DecayType::kCosine, DecayType::kLinear}) {
    for (int64_t total = 1; total <= 12; ++total) {
      for (int64_t warmup = 0; warmup <= total; ++warmup) {
        for (const double factor : {0.0, 0.1, 1.0}) {
          const LrSchedule s = schedule(warmup, total, type, factor);
          for (int64_t step = 0; step <= 2 * total; ++step) {
            EXPECT_GE(s.lr(step), step < warmup ? 0.0 : factor);
            EXPECT_LE(s.lr(step), 1.0);
            if (step < warmup) {
              EXPECT_GT(s.lr(step), 0.0);
            } else {
              EXPECT_LE(s.lr(step + 1), s.lr(step)) << warmup << " of " << total << " " << step;
            }
          }
        }
      }
    }
  }
}

TEST(LrSchedule, NamesTheFieldThatIsWrong) {
  const auto message = [](const LrSchedule& s, int64_t step) -> std::string {
    try {
      s.lr(step);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "no error";
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const LrSchedule good = schedule(1, 10, DecayType::kCosine, 0.1);
  LrSchedule bad = good;
  bad.base_lr = nan;
  EXPECT_NE(message(bad, 0).find("base_lr"), std::string::npos);
  bad.base_lr = -1.0;
  EXPECT_NE(message(bad, 0).find("base_lr"), std::string::npos);
  EXPECT_NE(message(LrSchedule{}, 0).find("total_steps"), std::string::npos);
  EXPECT_NE(message(schedule(11, 10, DecayType::kCosine, 0.1), 0).find("warmup_steps"),
            std::string::npos);
  EXPECT_NE(message(schedule(-1, 10, DecayType::kCosine, 0.1), 0).find("warmup_steps"),
            std::string::npos);
  EXPECT_NE(message(schedule(1, 10, DecayType::kCosine, 1.1), 0).find("min_lr_factor"),
            std::string::npos);
  EXPECT_NE(message(schedule(1, 10, DecayType::kCosine, nan), 0).find("min_lr_factor"),
            std::string::npos);
  EXPECT_NE(message(good, -1).find("counted from 0"), std::string::npos);
  EXPECT_EQ(message(good, 0), "no error");
}

}  // namespace
}  // namespace tessera::optim
