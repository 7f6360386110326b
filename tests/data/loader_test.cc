// Goal: over all ranks every sample is read as promised, resuming changes nothing, and the thread
//       never hangs and never hides an error.
// Method: files whose tokens tell their position, so that a batch says which samples it holds.

#include "data/loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <memory>
#include <set>
#include <thread>

#include "data/token_file_writer.h"
#include "tests/data/scratch.h"

namespace tessera::data {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int64_t kSeqLen = 3;

class LoaderTest : public testing::Test {
 protected:
  // Token i of the file is first_token + i.
  std::string counting_file(const std::string& name, int64_t size, int64_t first_token = 0) {
    TokenFileWriter writer(scratch_.path(name));
    for (int64_t i = 0; i < size; ++i) writer.append(static_cast<uint16_t>(first_token + i));
    writer.finish();
    return scratch_.path(name);
  }

  // Of `samples` samples and a tail that is too short for one more.
  std::string samples_file(int64_t samples) {
    return counting_file("tokens.bin", samples * kSeqLen + kSeqLen);
  }

  std::string error_of(const std::string& path, const LoaderOptions& options) {
    return config_error([&] { Loader loader(TokenFile(path), options); });
  }

  const Scratch scratch_;
};

LoaderOptions options_of(int64_t batch_size, int64_t world, int64_t rank, bool drop_last) {
  LoaderOptions options;
  options.seq_len = kSeqLen;
  options.batch_size = batch_size;
  options.world = world;
  options.rank = rank;
  options.drop_last = drop_last;
  options.seed = 11;
  return options;
}

// Which sample each row is; checks that rows are counting windows and targets the tokens one
// further on.
std::vector<int64_t> samples_of(const Batch& batch) {
  EXPECT_EQ(batch.tokens.scalar_type(), at::kLong);
  EXPECT_EQ(batch.tokens.size(1), kSeqLen);
  EXPECT_EQ(batch.targets.sizes(), batch.tokens.sizes());
  std::vector<int64_t> samples;
  for (int64_t row = 0; row < batch.tokens.size(0); ++row) {
    const int64_t first = batch.tokens[row][0].item<int64_t>();
    EXPECT_EQ(first % kSeqLen, 0);
    for (int64_t t = 0; t < kSeqLen; ++t) {
      EXPECT_EQ(batch.tokens[row][t].item<int64_t>(), first + t);
      EXPECT_EQ(batch.targets[row][t].item<int64_t>(), first + t + 1);
    }
    samples.push_back(first / kSeqLen);
  }
  return samples;
}

// The samples of one epoch in the order of the stream over all ranks.
std::vector<int64_t> epoch_of(std::vector<std::unique_ptr<Loader>>& ranks, int64_t epoch) {
  std::vector<int64_t> stream;
  for (bool last = false; !last;) {
    std::vector<std::vector<int64_t>> rows;
    for (const auto& rank : ranks) {
      const Batch batch = rank->next();
      EXPECT_EQ(batch.epoch, epoch);
      rows.push_back(samples_of(batch));
      EXPECT_EQ(rows.back().size(), rows.front().size());
      EXPECT_TRUE(rank == ranks.front() || batch.last_of_epoch == last);
      last = batch.last_of_epoch;
    }
    for (size_t row = 0; row < rows.front().size(); ++row) {
      for (const auto& rank_rows : rows) stream.push_back(rank_rows[row]);
    }
  }
  return stream;
}

std::vector<std::unique_ptr<Loader>> make_ranks(const std::string& path, int64_t batch_size,
                                                int64_t world, bool drop_last) {
  std::vector<std::unique_ptr<Loader>> ranks;
  for (int64_t rank = 0; rank < world; ++rank) {
    ranks.push_back(
        std::make_unique<Loader>(TokenFile(path), options_of(batch_size, world, rank, drop_last)));
  }
  return ranks;
}

// The order that samplers without a loader give.
std::vector<int64_t> order_of(int64_t samples, int64_t epoch) {
  SamplerOptions options;
  options.seed = 11;
  DistributedSampler sampler(samples, options);
  sampler.set_epoch(epoch);
  return sampler.indices();
}

TEST_F(LoaderTest, ReadsEverySampleOncePerEpochWhereTheyDivide) {
  const std::string path = samples_file(24);
  auto ranks = make_ranks(path, 4, 3, true);
  EXPECT_EQ(ranks[0]->num_samples(), 24);
  EXPECT_EQ(ranks[0]->batches_per_epoch(), 2);
  std::set<std::vector<int64_t>> orders;
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    const std::vector<int64_t> stream = epoch_of(ranks, epoch);
    EXPECT_EQ(stream, order_of(24, epoch));
    orders.insert(stream);
  }
  EXPECT_EQ(orders.size(), 3u);  // epochs differ by themselves
}

TEST_F(LoaderTest, CutsOrPadsTheEpochAsPromised) {
  for (int64_t samples = 6; samples <= 14; ++samples) {
    const std::string path = samples_file(samples);
    const std::vector<int64_t> order = order_of(samples, 0);
    for (int64_t world = 1; world <= 3; ++world) {
      for (int64_t batch_size = 1; batch_size <= 2; ++batch_size) {
        auto cut = make_ranks(path, batch_size, world, true);
        const int64_t whole = samples / (world * batch_size) * (world * batch_size);
        EXPECT_EQ(epoch_of(cut, 0), std::vector<int64_t>(order.begin(), order.begin() + whole));
        EXPECT_EQ(cut[0]->batches_per_epoch(), samples / (world * batch_size));

        auto padded = make_ranks(path, batch_size, world, false);
        std::vector<int64_t> expected = order;
        while (expected.size() % static_cast<size_t>(world) != 0) {
          expected.push_back(order[expected.size() - order.size()]);
        }
        EXPECT_EQ(epoch_of(padded, 0), expected);
      }
    }
  }
}

TEST_F(LoaderTest, NumbersBatchesAndEndsAfterItsEpochs) {
  LoaderOptions options = options_of(2, 1, 0, false);
  options.epochs = 2;
  options.shuffle = false;
  Loader loader(TokenFile(samples_file(5)), options);
  for (int64_t epoch = 0; epoch < 2; ++epoch) {
    for (int64_t index = 0; index < 3; ++index) {
      ASSERT_FALSE(loader.done());
      const Batch batch = loader.next();
      EXPECT_EQ(batch.epoch, epoch);
      EXPECT_EQ(batch.index, index);
      EXPECT_EQ(batch.last_of_epoch, index == 2);
      EXPECT_EQ(batch.tokens.size(0), index == 2 ? 1 : 2);
      EXPECT_EQ(samples_of(batch)[0], index * 2);  // unshuffled
    }
  }
  EXPECT_TRUE(loader.done());
  EXPECT_THAT(config_error([&] { loader.next(); }), HasSubstr("after the last of 2 epochs"));
  loader.seek({1, 0});
  EXPECT_FALSE(loader.done());
  EXPECT_EQ(loader.next().epoch, 1);
}

TEST_F(LoaderTest, SamplesOfSeveralFilesNeverCrossThem) {
  const std::string first = counting_file("a.bin", 2 * kSeqLen + 1);
  const std::string second = counting_file("b.bin", kSeqLen + 2, 300);
  const std::string third = counting_file("c.bin", 3 * kSeqLen + 1, 600);
  std::vector<TokenFile> files;
  for (const std::string& path : {first, second, third}) files.emplace_back(path);
  LoaderOptions options = options_of(1, 1, 0, true);
  options.shuffle = false;
  Loader loader(std::move(files), options);
  EXPECT_EQ(loader.num_samples(), 6);
  std::vector<int64_t> samples;
  for (int64_t i = 0; i < 6; ++i) samples.push_back(samples_of(loader.next())[0]);
  EXPECT_EQ(samples, (std::vector<int64_t>{0, 1, 100, 200, 201, 202}));
}

TEST_F(LoaderTest, ResumesAtEveryBatchAsIfNeverInterrupted) {
  const std::string path = samples_file(11);
  for (const bool drop_last : {true, false}) {
    const LoaderOptions options = options_of(2, 2, 1, drop_last);
    std::vector<std::vector<int64_t>> whole;
    std::vector<std::map<std::string, int64_t>> states;
    Loader uninterrupted(TokenFile(path), options);
    for (int64_t i = 0; i < 12; ++i) {
      states.push_back(uninterrupted.state());
      whole.push_back(samples_of(uninterrupted.next()));
    }
    for (size_t start = 0; start < 9; ++start) {
      Loader resumed(TokenFile(path), options);
      resumed.next();  // a used loader resumes as well as a new one
      resumed.load_state(states[start]);
      EXPECT_EQ(resumed.state(), states[start]);
      for (size_t i = start; i < start + 3; ++i) EXPECT_EQ(samples_of(resumed.next()), whole[i]);
    }
  }
}

TEST_F(LoaderTest, ResumesInAnotherWorldWithoutRepeatingOrLosingASample) {
  const std::string path = samples_file(24);
  const std::vector<int64_t> order = order_of(24, 0);
  auto four = make_ranks(path, 1, 4, true);
  for (const auto& rank : four) rank->next();
  const auto state = four[0]->state();
  EXPECT_EQ(state.at("consumed_samples"), 4);
  auto three = make_ranks(path, 2, 3, false);
  for (const auto& rank : three) rank->load_state(state);
  std::vector<int64_t> expected(order.begin() + 4, order.end());
  expected.push_back(
      order[0]);  // 20 samples over 3 ranks: one is read twice, from the order's start
  EXPECT_EQ(epoch_of(three, 0), expected);
  EXPECT_EQ(epoch_of(three, 1), order_of(24, 1));
}

TEST_F(LoaderTest, SeeksToABatch) {
  const std::string path = samples_file(12);
  Loader loader(TokenFile(path), options_of(2, 2, 0, true));
  loader.seek_batch(3, 2);
  EXPECT_EQ(loader.position(), (Position{3, 8}));
  const Batch batch = loader.next();
  EXPECT_EQ(batch.epoch, 3);
  EXPECT_EQ(batch.index, 2);
  const std::vector<int64_t> order = order_of(12, 3);
  EXPECT_EQ(samples_of(batch), (std::vector<int64_t>{order[8], order[10]}));
  EXPECT_EQ(loader.position(), (Position{4, 0}));  // never at the end of an epoch
  EXPECT_THAT(config_error([&] { loader.seek_batch(0, 3); }), HasSubstr("no batch 3"));
  EXPECT_THAT(config_error([&] { loader.seek({-1, 0}); }), HasSubstr("epoch -1"));
  EXPECT_THAT(config_error([&] { loader.seek({0, 13}); }), HasSubstr("sample 13"));
  loader.seek({0, 12});
  EXPECT_EQ(loader.position(), (Position{1, 0}));
}

TEST_F(LoaderTest, RefusesAStateThatWouldMeanOtherSamples) {
  Loader loader(TokenFile(samples_file(12)), options_of(1, 1, 0, true));
  const auto own = loader.state();
  const auto error = [&](const std::map<std::string, int64_t>& state) {
    return config_error([&] { loader.load_state(state); });
  };
  for (const std::string key : {"samples", "seq_len", "shuffle", "seed", "data_hash"}) {
    auto other = own;
    ++other[key];
    EXPECT_THAT(error(other), HasSubstr("has " + key)) << key;
  }
  for (const auto& [key, value] : own) {
    auto without = own;
    without.erase(key);
    EXPECT_THAT(error(without), HasSubstr("no '" + key + "'"));
  }
  const std::string same_length = counting_file("other.bin", 12 * kSeqLen + kSeqLen, 3);
  Loader other(TokenFile(same_length), options_of(1, 1, 0, true));
  EXPECT_THAT(error(other.state()), HasSubstr("data_hash"));
}

TEST_F(LoaderTest, RefusesAFileTooShortForASample) {
  const std::string short_file = counting_file("short.bin", kSeqLen);
  EXPECT_THAT(
      error_of(short_file, options_of(1, 1, 0, true)),
      AllOf(HasSubstr("short.bin"), HasSubstr("holds 3 tokens"), HasSubstr("seq_len 3 needs 4")));
  EXPECT_EQ(error_of(counting_file("just.bin", kSeqLen + 1), options_of(1, 1, 0, true)), "");
}

TEST_F(LoaderTest, RefusesOptionsThatCannotWork) {
  const std::string path = samples_file(5);
  const auto error = [&](auto change) {
    LoaderOptions options = options_of(1, 1, 0, true);
    change(options);
    return error_of(path, options);
  };
  EXPECT_THAT(error([](auto& o) { o.seq_len = 0; }), HasSubstr("seq_len is 0"));
  EXPECT_THAT(error([](auto& o) { o.batch_size = 0; }), HasSubstr("batch_size is 0"));
  EXPECT_THAT(error([](auto& o) { o.batch_size = 6; }), HasSubstr("5 samples"));
  EXPECT_THAT(error([](auto& o) { o.prefetch_batches = 0; }), HasSubstr("prefetch_batches is 0"));
  EXPECT_THAT(error([](auto& o) { o.vocab_size = -1; }), HasSubstr("vocab_size is -1"));
  EXPECT_THAT(error([](auto& o) { o.epochs = -1; }), HasSubstr("epochs is -1"));
  EXPECT_THAT(error([](auto& o) { o.world = 6; }), HasSubstr("5 samples over 6 ranks"));
  EXPECT_THAT(error([](auto& o) { o.rank = 1; }), HasSubstr("rank is 1"));
  EXPECT_THAT(
      config_error([&] { Loader loader(std::vector<TokenFile>{}, options_of(1, 1, 0, true)); }),
      HasSubstr("no token file"));
}

// Token 17 is the second of sample 5; it is the last target of no sample before.
TEST_F(LoaderTest, RethrowsFromItsThreadAfterTheBatchesBefore) {
  const std::string path = samples_file(10);
  LoaderOptions options = options_of(1, 1, 0, true);
  options.shuffle = false;
  options.vocab_size = 17;
  options.prefetch_batches = 3;
  Loader loader(TokenFile(path), options);
  for (int64_t i = 0; i < 5; ++i) EXPECT_EQ(samples_of(loader.next())[0], i);
  for (int64_t again = 0; again < 2; ++again) {
    EXPECT_THAT(config_error([&] { loader.next(); }),
                AllOf(HasSubstr("tokens.bin"), HasSubstr("token 17"), HasSubstr("position 17"),
                      HasSubstr("vocab_size 17")));
  }
  EXPECT_EQ(loader.position(), (Position{0, 5}));
  loader.seek_batch(0, 1);
  EXPECT_EQ(samples_of(loader.next())[0], 1);
}

TEST_F(LoaderTest, ChecksTheLastTargetToo) {
  LoaderOptions options = options_of(1, 1, 0, true);
  options.vocab_size = 3;
  Loader loader(TokenFile(counting_file("a.bin", 4)), options);
  EXPECT_THAT(config_error([&] { loader.next(); }), HasSubstr("token 3 at position 3"));
  options.vocab_size = 4;
  Loader fits(TokenFile(scratch_.path("a.bin")), options);
  EXPECT_EQ(fits.next().targets[0][2].item<int64_t>(), 3);
}

// A hang here is a failure by the test's time limit.
TEST_F(LoaderTest, IsDestroyedWhileItsThreadWaitsOnAFullQueue) {
  const std::string path = samples_file(10);
  LoaderOptions options = options_of(1, 1, 0, true);
  options.prefetch_batches = 1;
  {
    Loader loader(TokenFile(path), options);
    loader.next();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the queue is full, most surely
  }
  for (int64_t i = 0; i < 200; ++i) {  // and at any other moment
    Loader loader(TokenFile(path), options);
    for (int64_t j = 0; j < i % 4; ++j) loader.next();
  }
}

}  // namespace
}  // namespace tessera::data
