// Goal: the collectives of training give the bits of a sum in rank order on any number of ranks and
// elements, and a rank that leaves or is late ends the others with its name. Method: 1 to 4 ranks
// as threads; every rank can make every rank's data, so each checks against the definition.

#include "comm/collectives.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "base/error.h"
#include "base/math.h"
#include "base/stopwatch.h"
#include "tests/base/thrown.h"
#include "tests/harness/ranks.h"

namespace tessera::comm {
namespace {

using harness::run_ranks;

// One element more than a multiple of the pieces in which sums are taken (2^15 elements), and less.
constexpr int64_t kSizes[] = {1, 2, 3, 5, 31, 1000, (1 << 15) + 1, 2 * (1 << 15) + 77};

// Fixed by its arguments; its sums round.
at::Tensor data_of(int rank, int64_t elements, at::ScalarType dtype = at::kFloat) {
  return at::sin(at::arange(elements, at::kDouble) * 0.37 + rank * 1.7).to(dtype);
}

// ((d0 + d1) + d2 ...) / W in fp32.
at::Tensor mean_of_ranks(int ranks, int64_t elements, at::ScalarType dtype = at::kFloat) {
  at::Tensor sum = data_of(0, elements, dtype).to(at::kFloat);
  for (int r = 1; r < ranks; ++r) sum = sum + data_of(r, elements, dtype).to(at::kFloat);
  return ranks == 1 ? sum : sum / ranks;
}

at::Tensor part_of(const at::Tensor& flat, int rank, int64_t part) {
  return flat.narrow(0, rank * part, part);
}

TEST(CollectivesTest, AllGatherBringsEveryRanksPartInPlace) {
  for (int size = 1; size <= 4; ++size) {
    run_ranks(size, [&](World& world) {
      for (const int64_t part : kSizes) {
        for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
          const at::Tensor flat = at::full({part * size}, -7.0, dtype);
          part_of(flat, world.rank(), part).copy_(data_of(world.rank(), part, dtype));
          all_gather_in_place(world.gather(), flat, "a gather");
          for (int r = 0; r < size; ++r) {
            EXPECT_TRUE(at::equal(part_of(flat, r, part), data_of(r, part, dtype)));
          }
        }
      }
    });
  }
}

TEST(CollectivesTest, ReduceScatterIsTheSumInRankOrderDividedToTheBit) {
  for (int size = 1; size <= 4; ++size) {
    run_ranks(size, [&](World& world) {
      for (const int64_t part : kSizes) {
        for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
          const at::Tensor full = data_of(world.rank(), part * size, dtype);
          const at::Tensor before = full.clone();
          const at::Tensor out = at::full({part}, 99.0);
          const int64_t parts = reduce_scatter_scratch_parts(world.reduce());
          EXPECT_EQ(parts, size - 1);
          const at::Tensor scratch =
              parts == 0 ? at::Tensor() : at::empty({parts * part}, full.options());
          reduce_scatter_mean(world.reduce(), full, out, scratch, "a reduction");
          const at::Tensor expected = mean_of_ranks(size, part * size, dtype);
          EXPECT_TRUE(at::equal(out, part_of(expected, world.rank(), part)))
              << size << " ranks, " << part << " elements, " << dtype;
          EXPECT_TRUE(at::equal(full, before)) << "the input is not changed";
        }
      }
    });
  }
}

TEST(CollectivesTest, AllReduceIsTheSameMeanForAnyNumberOfElements) {
  for (int size = 1; size <= 4; ++size) {
    run_ranks(size, [&](World& world) {
      for (const int64_t elements : {0, 1, 2, 3, 4, 5, 7, 1000, (1 << 17) + 3}) {
        const at::Tensor flat = data_of(world.rank(), elements);
        const int64_t n = all_reduce_scratch_elements(world.reduce(), elements);
        const at::Tensor scratch = n == 0 ? at::Tensor() : at::empty({n});
        all_reduce_mean(world.reduce(), flat, scratch, "a reduction");
        EXPECT_TRUE(at::equal(flat, mean_of_ranks(size, elements)))
            << size << " ranks, " << elements << " elements";
      }
    });
  }
}

// Large parts travel as several messages of 2^20 elements; ranks' parts may have other numbers of
// them.
TEST(CollectivesTest, LargePartsHaveTheSameBits) {
  run_ranks(3, [](World& world) {
    const int64_t message = 1 << 20;
    for (const int64_t elements : {3 * message + 1, 3 * message + 5}) {
      const at::Tensor flat = data_of(world.rank(), elements);
      const at::Tensor scratch = at::empty({all_reduce_scratch_elements(world.reduce(), elements)});
      all_reduce_mean(world.reduce(), flat, scratch, "a reduction");
      EXPECT_TRUE(at::equal(flat, mean_of_ranks(3, elements))) << elements;
    }
    const int64_t part = 2 * message + 7;
    const at::Tensor full = data_of(world.rank(), 3 * part);
    const at::Tensor out = at::empty({part});
    reduce_scatter_mean(world.reduce(), full, out, at::empty({2 * part}), "a reduction");
    EXPECT_TRUE(at::equal(out, part_of(mean_of_ranks(3, 3 * part), world.rank(), part)));
    all_gather_in_place(world.gather(), full, "a gather");
    for (int r = 0; r < 3; ++r) {
      EXPECT_TRUE(at::equal(part_of(full, r, part), part_of(data_of(r, 3 * part), r, part)));
    }
  });
}

// Whatever travels, sums are taken in fp32 and rounded once.
TEST(CollectivesTest, AllReduceInBf16IsTheSumInRankOrderInFp32) {
  run_ranks(3, [](World& world) {
    const int64_t elements = 1001;
    const at::Tensor flat = data_of(world.rank(), elements, at::kBFloat16);
    const at::Tensor scratch =
        at::empty({all_reduce_scratch_elements(world.reduce(), elements)}, at::kBFloat16);
    all_reduce_mean(world.reduce(), flat, scratch, "a reduction");
    const auto d = [&](int rank) {
      return data_of(rank, elements, at::kBFloat16).to(at::kFloat);
    };
    EXPECT_TRUE(at::equal(flat, ((d(0) + d(1) + d(2)) / 3).to(at::kBFloat16)));
  });
}

TEST(CollectivesTest, BroadcastGivesEveryRankTheContentsOfRank0) {
  for (int size = 1; size <= 4; ++size) {
    run_ranks(size, [](World& world) {
      for (const int64_t elements : {0, 1, 5, 70'001}) {
        const at::Tensor flat = data_of(world.rank(), elements);
        broadcast(world.gather(), flat, "a broadcast");
        EXPECT_TRUE(at::equal(flat, data_of(0, elements)));
      }
    });
  }
}

TEST(CollectivesTest, GroupsDoNotWaitForEachOther) {
  run_ranks(2, [](World& world) {
    const at::Tensor a = at::ones({64});
    const at::Tensor b = at::ones({2 * 64});
    // Rank 0 issues on one group first, rank 1 on the other.
    const auto reduce = [&] {
      return world.reduce().stream().run(
          [&] { all_reduce_mean(world.reduce(), a, at::empty({64}), "a reduction"); });
    };
    const auto gather = [&] {
      return world.gather().stream().run(
          [&] { all_gather_in_place(world.gather(), b, "a gather"); });
    };
    const Event first = world.rank() == 0 ? reduce() : gather();
    const Event second = world.rank() == 0 ? gather() : reduce();
    second.wait();
    first.wait();
  });
}

TEST(CollectivesTest, AFakeWorldReturnsAtOnce) {
  const World world = fake_world(3, 1000);
  EXPECT_TRUE(world.is_fake());
  EXPECT_EQ(world.rank(), 3);
  EXPECT_EQ(world.size(), 1000);
  all_gather_in_place(world.gather(), at::ones({1000}), "a gather");
  EXPECT_EQ(reduce_scatter_scratch_parts(world.reduce()), 0);
  reduce_scatter_mean(world.reduce(), at::ones({1000}), at::ones({1}), {}, "a reduction");
  all_reduce_mean(world.reduce(), at::ones({7}), {}, "a reduction");
  broadcast(world.gather(), at::ones({7}), "a broadcast");
  world.barrier();
}

// ---- a peer that is gone or late

using Collective = std::function<void(World&)>;

const std::vector<std::pair<std::string, Collective>>& collectives() {
  static const std::vector<std::pair<std::string, Collective>> list = {
      {"the gather",
       [](World& w) { all_gather_in_place(w.gather(), at::ones({w.size() * 8}), "the gather"); }},
      {"the reduce-scatter",
       [](World& w) {
         reduce_scatter_mean(w.reduce(), at::ones({w.size() * 8}), at::ones({8}),
                             at::ones({(w.size() - 1) * 8}), "the reduce-scatter");
       }},
      {"the all-reduce",
       [](World& w) {
         all_reduce_mean(w.reduce(), at::ones({64}),
                         at::ones({all_reduce_scratch_elements(w.reduce(), 64)}), "the all-reduce");
       }},
  };
  return list;
}

constexpr int kMissing = 1;

void expect_peer_named(const std::string& text, int rank, const std::string& what) {
  EXPECT_TRUE(contains(text, "rank " + std::to_string(rank) + ": ")) << text;
  EXPECT_TRUE(contains(text, what)) << text;
  EXPECT_TRUE(contains(text, "with rank " + std::to_string(kMissing))) << text;
}

TEST(CollectivesTest, ARankThatStaysAwayFailsTheOthersWithinTheTimeLimitByName) {
  for (const auto& [what, collective] : collectives()) {
    const base::Stopwatch watch;
    run_ranks(
        3,
        [&, name = what, call = collective](World& world) {
          if (world.rank() == kMissing) return;  // Its sockets stay open.
          expect_peer_named(thrown<CommError>([&] { call(world); }), world.rank(), name);
        },
        std::chrono::seconds(1));
    EXPECT_LT(watch.seconds(), 10.0) << what;
  }
}

TEST(CollectivesTest, ARankThatDiesFailsTheOthersAtOnce) {
  const base::Stopwatch watch;
  const auto run = [] {
    run_ranks(
        3,
        [](World& world) {
          if (world.rank() == kMissing) throw std::runtime_error("dies");
          all_gather_in_place(world.gather(), at::ones({3 * 8}), "the gather");
        },
        std::chrono::seconds(60));
  };
  const std::string text = thrown<std::runtime_error>(run);
  EXPECT_TRUE(contains(text, "rank 1 threw: dies")) << text;
  EXPECT_TRUE(contains(text, "rank 0 threw: rank 0: the gather with rank ")) << text;
  EXPECT_LT(watch.seconds(), 30.0);
}

TEST(CollectivesTest, ARankThatIsLaterThanTheTimeLimitFailsTheOthers) {
  run_ranks(
      2,
      [](World& world) {
        const auto gather = [&] {
          all_gather_in_place(world.gather(), at::ones({16}), "the gather");
        };
        if (world.rank() == kMissing) {
          std::this_thread::sleep_for(std::chrono::seconds(3));
          // What it finds then is its own affair; it must end.
          try {
            gather();
          } catch (const CommError&) {
          }
          return;
        }
        const base::Stopwatch watch;
        const std::string text = thrown<CommError>(gather);
        expect_peer_named(text, 0, "the gather");
        EXPECT_TRUE(contains(text, "time limit of 1 s")) << text;
        EXPECT_LT(watch.seconds(), 2.9);
      },
      std::chrono::seconds(1));
}

}  // namespace
}  // namespace tessera::comm
