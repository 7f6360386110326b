#ifndef DATA_LOADER_H_
#define DATA_LOADER_H_

// A Loader turns token files into batches for one rank, for ever or for a number of epochs.
// (T: seq_len, B: batch_size, W: world, n: samples)
//
//   sample i of a file   tokens [i * T, i * T + T + 1): T inputs and, one further on, T targets;
//                        so every token but a file's first is a target once (but for a tail
//                        shorter than T)
//   samples              those of all files, one file after the other; none crosses two files
//   order                that of data/distributed_sampler.h, which changes from epoch to epoch
//   batch b of rank r    the samples at positions b * B * W + j * W + r of the order, j in [0, B)
//
// All ranks have the same number of batches in an epoch, of the same shapes. With drop_last (the
// start value) each is [B, T] and up to B * W - 1 samples are left out of an epoch (others in
// each); without, the last may have fewer rows and up to W - 1 samples are read twice.
//
// A thread builds batches ahead. An exception in it reaches the caller of next() after the batches
// before it.
//
// Resuming: a Position counts the samples that all ranks have consumed of the epoch's order. So a
// run may go on with another batch_size or world, at the same sample: nothing consumed is read
// again and nothing between is left out. Only how the epoch ends (the rule above) then counts from
// there.
//
// Bytes: 8n for the permutation (shuffle only), (prefetch_batches + 1) * 16 * B * T for batches.
// Called by one thread. Tensors are on the CPU and belong to the caller; the thread keeps none.

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "data/distributed_sampler.h"
#include "data/token_file.h"

namespace tessera::data {

struct LoaderOptions {
  int64_t seq_len = 0;     // T, tokens a sequence; to be set
  int64_t batch_size = 1;  // B, sequences a batch (a micro-batch of one rank)
  int64_t world = 1;
  int64_t rank = 0;
  uint64_t seed = 0;
  bool shuffle = true;
  bool drop_last = true;
  int64_t prefetch_batches = 2;  // at least 1
  int64_t vocab_size = 0;        // tokens must be below it; 0: any 16-bit token will do
  int64_t epochs = 0;            // done() after so many; 0: never
};

struct Batch {
  at::Tensor tokens;   // [B, T] int64
  at::Tensor targets;  // [B, T] int64; targets[b][t] follows tokens[b][t] in the text
  int64_t epoch = 0;
  int64_t index = 0;  // of the batch in its epoch
  bool last_of_epoch = false;
};

// Before the first batch: {0, 0}. Never at the end of an epoch: that is the start of the next.
struct Position {
  int64_t epoch = 0;
  int64_t consumed_samples = 0;  // in this epoch, over all ranks

  bool operator==(const Position& other) const {
    return epoch == other.epoch && consumed_samples == other.consumed_samples;
  }
};

class Loader {
 public:
  // Errors: ConfigError: an option out of its range, no file, a file too short for one sample
  //         (file, tokens and seq_len in the message), an epoch without a batch. The same on all
  //         ranks.
  Loader(std::vector<TokenFile> files, const LoaderOptions& options);
  Loader(TokenFile file, const LoaderOptions& options);
  // Waits for the batch being built, not for the queue.
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // The next batch; waits until it is built.
  // Errors: ConfigError for a token that is not below vocab_size (file, position and token), here
  //         and at every later call until seek(); also when done(). May throw on one rank alone:
  //         before a collective, agree.
  Batch next();

  // True when options.epochs are over.
  bool done() const { return options_.epochs > 0 && position_.epoch >= options_.epochs; }

  // Of a whole epoch.
  int64_t batches_per_epoch() const;
  int64_t num_samples() const { return sampler_.num_samples(); }

  // Of the next batch that next() returns, whatever was built ahead.
  Position position() const { return position_; }

  // Goes on there. Drops what was built ahead.
  // Errors: ConfigError for a position outside the data.
  void seek(Position position);
  // Before the given batch of the given epoch, counted in batches of this loader's size.
  void seek_batch(int64_t epoch, int64_t index);

  // The position and what it depends on, for a checkpoint: the same on all ranks. Keys: epoch,
  // consumed_samples, samples, seq_len, shuffle, seed, data_hash (of the files' lengths, first and
  // last tokens).
  std::map<std::string, int64_t> state() const;
  // Goes on where `state` was taken, be it with another world, rank or batch_size.
  // Errors: ConfigError for a missing key, or a state of other data, seq_len, seed or shuffle: the
  //         position would mean other samples.
  void load_state(const std::map<std::string, int64_t>& state);

 private:
  struct Built {
    Batch batch;
    Position after;
  };

  void start();
  void stop();
  void build_ahead(Position from);
  Built build(Position at);
  void fill_rows(Position at, int64_t num_rows, Batch& batch);
  void copy_row(const TokenFile& file, int64_t first, int64_t* tokens, int64_t* targets) const;
  void locate(int64_t sample, int64_t& file, int64_t& first_token) const;
  int64_t rows_at(int64_t consumed_samples) const;
  Position settled(Position position) const;

  const std::vector<TokenFile> files_;
  const LoaderOptions options_;
  std::vector<int64_t> first_samples_;  // of each file, and the end of the last
  DistributedSampler sampler_;          // the thread's, while it runs
  Position position_;                   // the caller's

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Built> queue_;   // guarded by mutex_
  std::exception_ptr error_;  // guarded by mutex_; the thread has ended
  bool stop_ = false;         // guarded by mutex_
  std::thread thread_;
};

}  // namespace tessera::data

#endif  // DATA_LOADER_H_
