// Goal: the order is that of Python's DistributedSampler, whatever the size, world, seed and epoch.
// Method: the orders that PyTorch gave (sampler_golden.txt), read from the folder that tests run
// in.

#include "data/distributed_sampler.h"

#include <ATen/ops/rand.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/data/scratch.h"

namespace tessera::data {
namespace {

using testing::HasSubstr;

constexpr char kGoldenPath[] = "tests/data/sampler_golden.txt";

struct Case {
  int64_t num_samples = 0;
  SamplerOptions options;
  int64_t epoch = 0;
};

Case read_case(std::istream& line) {
  Case result;
  line >> result.num_samples >> result.options.world >> result.options.seed >> result.epoch >>
      result.options.shuffle >> result.options.drop_last;
  result.options.allow_empty = true;
  return result;
}

std::vector<int64_t> indices_of(Case wanted, int64_t rank) {
  wanted.options.rank = rank;
  DistributedSampler sampler(wanted.num_samples, wanted.options);
  sampler.set_epoch(wanted.epoch);
  return sampler.indices();
}

uint64_t fnv1a(uint64_t hash, int64_t number) {
  for (int byte = 0; byte < 8; ++byte) {
    hash = (hash ^ ((static_cast<uint64_t>(number) >> (8 * byte)) & 0xFF)) * 0x100000001B3;
  }
  return hash;
}

TEST(DistributedSampler, GivesTheOrdersOfPyTorch) {
  std::ifstream golden(kGoldenPath);
  ASSERT_TRUE(golden) << "no " << kGoldenPath;
  int64_t num_hashes = 0;
  int64_t num_lists = 0;
  for (std::string text; std::getline(golden, text);) {
    std::istringstream line(text);
    std::string kind;
    line >> kind;
    if (kind == "hash") {
      const Case wanted = read_case(line);
      uint64_t expected = 0;
      line >> std::hex >> expected;
      ASSERT_FALSE(line.fail()) << text;
      uint64_t hash = 0xCBF29CE484222325;
      for (int64_t rank = 0; rank < wanted.options.world; ++rank) {
        const std::vector<int64_t> indices = indices_of(wanted, rank);
        hash = fnv1a(hash, static_cast<int64_t>(indices.size()));
        for (const int64_t index : indices) hash = fnv1a(hash, index);
      }
      EXPECT_EQ(hash, expected) << text;
      ++num_hashes;
    } else if (kind == "list") {
      const Case wanted = read_case(line);
      int64_t rank = 0;
      std::string colon;
      line >> rank >> colon;
      ASSERT_EQ(colon, ":") << text;
      std::vector<int64_t> expected;
      for (int64_t index; line >> index;) expected.push_back(index);
      EXPECT_EQ(indices_of(wanted, rank), expected) << text;
      ++num_lists;
    } else {
      EXPECT_EQ(kind, "#") << text;
    }
  }
  EXPECT_EQ(num_hashes, 5 * 8 * 2 * (7 * 4 + 2) + 3);
  EXPECT_EQ(num_lists, 4 * (3 + 3 + 4 + 4 + 5 + 7));
}

TEST(DistributedSampler, EpochsAreTheSameInAnyOrderOfVisiting) {
  SamplerOptions options;
  options.seed = 5;
  DistributedSampler sampler(103, options);
  const std::vector<int64_t> epoch_0 = sampler.indices();
  sampler.set_epoch(3);
  EXPECT_EQ(sampler.epoch(), 3);
  EXPECT_NE(sampler.indices(), epoch_0);
  sampler.set_epoch(0);
  EXPECT_EQ(sampler.indices(), epoch_0);
}

TEST(DistributedSampler, PositionsMeanTheSameInEveryWorld) {
  SamplerOptions alone;
  const DistributedSampler truth(11, alone);
  for (int64_t world = 1; world <= 5; ++world) {
    for (int64_t rank = 0; rank < world; ++rank) {
      SamplerOptions options;
      options.world = world;
      options.rank = rank;
      const DistributedSampler sampler(11, options);
      for (int64_t i = 0; i < sampler.size(); ++i) {
        EXPECT_EQ(sampler.at(i), truth.global_at(i * world + rank));
      }
    }
  }
}

TEST(DistributedSampler, LeavesTheGlobalGeneratorAlone) {
  const auto draw = [](bool with_sampler) {
    at::manual_seed(1);
    if (with_sampler) DistributedSampler(1000, {}).set_epoch(2);
    return at::rand({1}).item<float>();
  };
  EXPECT_EQ(draw(true), draw(false));
}

TEST(DistributedSampler, RefusesAnEpochWithoutSamples) {
  SamplerOptions options;
  options.world = 5;
  options.drop_last = true;
  const auto construct = [&](int64_t num_samples) {
    return config_error([&] { DistributedSampler sampler(num_samples, options); });
  };
  EXPECT_THAT(construct(4), HasSubstr("4 samples over 5 ranks with drop_last"));
  EXPECT_EQ(construct(5), "");
  options.drop_last = false;
  EXPECT_THAT(construct(0), HasSubstr("no sample"));
  EXPECT_EQ(construct(1), "");
  options.allow_empty = true;
  EXPECT_EQ(construct(0), "");
}

TEST(DistributedSampler, RefusesImpossibleOptions) {
  const auto construct = [&](int64_t num_samples, int64_t world, int64_t rank) {
    SamplerOptions options;
    options.world = world;
    options.rank = rank;
    return config_error([&] { DistributedSampler sampler(num_samples, options); });
  };
  EXPECT_THAT(construct(5, 0, 0), HasSubstr("world is 0"));
  EXPECT_THAT(construct(5, 3, 3), HasSubstr("rank is 3"));
  EXPECT_THAT(construct(5, 3, -1), HasSubstr("rank is -1"));
  EXPECT_THAT(construct(-1, 3, 0), HasSubstr("num_samples is -1"));
  DistributedSampler sampler(5, {});
  EXPECT_THAT(config_error([&] { sampler.set_epoch(-1); }), HasSubstr("epoch is -1"));
}

}  // namespace
}  // namespace tessera::data
