// Goal: every element of every parameter lies in exactly one place of exactly one shard. Method:
// all layouts of up to three parameters of up to 12 elements over up to 7 shards, and the same
// sizes scaled and offset so that they cross the alignment; each flat buffer is painted element by
// element.

#include "engine/layout.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/error.h"

namespace tessera::engine {
namespace {

using base::Interval;

constexpr int64_t kNobody = -1;
constexpr int64_t kGap = -2;

// Paints parameters and gaps into the flat buffer; every element must be painted once.
void check_cover(const Layout& layout) {
  std::vector<int64_t> owner(layout.total_elements(), kNobody);
  const auto paint = [&](Interval where, int64_t color) {
    ASSERT_GE(where.begin, 0);
    ASSERT_LE(where.end, layout.total_elements());
    for (int64_t i = where.begin; i < where.end; ++i) {
      ASSERT_EQ(owner[i], kNobody);
      owner[i] = color;
    }
  };
  int64_t elements = 0;
  for (int64_t p = 0; p < layout.num_params(); ++p) {
    paint(layout.param(p), p);
    elements += layout.param(p).size();
  }
  EXPECT_EQ(elements, layout.param_elements());
  for (const Interval gap : layout.gaps()) {
    EXPECT_FALSE(gap.empty());
    paint(gap, kGap);
  }
  for (const int64_t color : owner) ASSERT_NE(color, kNobody);
}

void check_alignment(const Layout& layout) {
  EXPECT_EQ(layout.shard_elements() % Layout::kAlignElements, 0);
  EXPECT_EQ(layout.total_elements(), layout.shard_elements() * layout.num_shards());
  int64_t end = 0;
  for (int64_t p = 0; p < layout.num_params(); ++p) {
    EXPECT_EQ(layout.param(p).begin % Layout::kAlignElements, 0);
    EXPECT_GE(layout.param(p).begin, end) << "in order";
    EXPECT_LT(layout.param(p).begin - end, Layout::kAlignElements) << "no more padding than needed";
    end = layout.param(p).end;
  }
  for (int64_t r = 0; r < layout.num_shards(); ++r) {
    EXPECT_EQ(layout.shard(r).size(), layout.shard_elements());
    EXPECT_EQ(layout.shard(r).begin, r * layout.shard_elements());
  }
  // The padding behind the last parameter: less than an aligned step a shard.
  EXPECT_LT(layout.total_elements() - end,
            layout.num_shards() * Layout::kAlignElements + layout.num_shards());
}

// Both views of a part are the same elements, and the parts of all shards cover each parameter
// once.
void check_parts(const Layout& layout) {
  for (int64_t p = 0; p < layout.num_params(); ++p) {
    std::vector<int> seen(layout.param(p).size(), 0);
    for (int64_t r = 0; r < layout.num_shards(); ++r) {
      const Interval in_shard = layout.param_in_shard(p, r);
      const Interval in_param = layout.shard_in_param(p, r);
      ASSERT_EQ(in_shard.size(), in_param.size());
      ASSERT_GE(in_shard.begin, 0);
      ASSERT_LE(in_shard.end, layout.shard_elements());
      ASSERT_GE(in_param.begin, 0);
      ASSERT_LE(in_param.end, layout.param(p).size());
      for (int64_t i = 0; i < in_param.size(); ++i) {
        ++seen[in_param.begin + i];
        ASSERT_EQ(layout.shard(r).begin + in_shard.begin + i,
                  layout.param(p).begin + in_param.begin + i);
      }
    }
    for (const int count : seen) ASSERT_EQ(count, 1);
  }
}

void check(const std::vector<int64_t>& numels, int64_t shards) {
  const Layout layout(numels, shards);
  ASSERT_EQ(layout.num_params(), static_cast<int64_t>(numels.size()));
  ASSERT_EQ(layout.num_shards(), shards);
  for (size_t p = 0; p < numels.size(); ++p) ASSERT_EQ(layout.param(p).size(), numels[p]);
  check_cover(layout);
  check_alignment(layout);
  check_parts(layout);
}

// Calls f with all lists of one to three of the sizes.
template <typename F>
void for_all_lists(const std::vector<int64_t>& sizes, F f) {
  for (const int64_t a : sizes) {
    f({a});
    for (const int64_t b : sizes) {
      f({a, b});
      for (const int64_t c : sizes) f({a, b, c});
    }
  }
}

TEST(LayoutTest, AllSmallLayoutsCoverEveryElementOnce) {
  std::vector<int64_t> sizes;
  for (int64_t size = 0; size <= 12; ++size) sizes.push_back(size);
  for_all_lists(sizes, [](const std::vector<int64_t>& numels) {
    for (int64_t shards = 1; shards <= 7 && !testing::Test::HasFatalFailure(); ++shards) {
      SCOPED_TRACE(testing::PrintToString(numels) + " in " + std::to_string(shards));
      check(numels, shards);
    }
  });
}

TEST(LayoutTest, SizesAroundTheAlignmentCoverEveryElementOnce) {
  const int64_t a = Layout::kAlignElements;
  const std::vector<int64_t> sizes = {0,         1,     a - 1,     a,         a + 1,
                                      2 * a - 1, 2 * a, 2 * a + 1, 3 * a + 5, 7 * a};
  for_all_lists(sizes, [](const std::vector<int64_t>& numels) {
    for (int64_t shards = 1; shards <= 7 && !testing::Test::HasFatalFailure(); ++shards) {
      SCOPED_TRACE(testing::PrintToString(numels) + " in " + std::to_string(shards));
      check(numels, shards);
    }
  });
}

TEST(LayoutTest, TheAlignmentIsSixtyFourBytesOfTheNarrowestDtype) {
  EXPECT_EQ(Layout::kAlignElements * 2, 64);
}

TEST(LayoutTest, AShardCanHoldPartsOfSeveralParametersOrNone) {
  // 100 at 0, 5 at 128; 133 elements in 3 shards of 64.
  const Layout layout({100, 5}, 3);
  EXPECT_EQ(layout.shard_elements(), 64);
  EXPECT_TRUE(layout.param_in_shard(0, 1) == (Interval{0, 36}));
  EXPECT_TRUE(layout.shard_in_param(0, 1) == (Interval{64, 100}));
  EXPECT_TRUE(layout.param_in_shard(1, 1) == (Interval{0, 0}));
  EXPECT_TRUE(layout.param_in_shard(1, 2) == (Interval{0, 5}));
  const Layout small({3}, 4);
  EXPECT_EQ(small.param_in_shard(0, 0).size(), 3);
  for (int64_t r = 1; r < 4; ++r) EXPECT_TRUE(small.param_in_shard(0, r).empty());
}

TEST(LayoutTest, LargeCountsDoNotOverflow) {
  const int64_t huge = int64_t{1} << 40;
  const Layout layout({huge, huge + 1}, 1000);
  EXPECT_EQ(layout.param(1).begin, huge);
  EXPECT_EQ(layout.param_elements(), 2 * huge + 1);
  EXPECT_GE(layout.total_elements(), 2 * huge + 1);
  EXPECT_LT(layout.total_elements(), 2 * huge + 1 + 1001 * Layout::kAlignElements);
}

TEST(LayoutTest, ImpossibleLayoutsAreRefused) {
  EXPECT_THROW(Layout({1}, 0), InternalError);
  EXPECT_THROW(Layout({1, -1}, 2), InternalError);
  EXPECT_EQ(Layout({}, 3).total_elements(), 0);
}

}  // namespace
}  // namespace tessera::engine
