#ifndef DATA_DISTRIBUTED_SAMPLER_H_
#define DATA_DISTRIBUTED_SAMPLER_H_

// A DistributedSampler says which samples of a data set each rank reads in an epoch: the same
// indices in the same order as Python's torch.utils.data.DistributedSampler (not as LibTorch's
// samplers of similar names).
//
//   order    with shuffle torch.randperm(n) seeded by seed + epoch, otherwise 0, 1, ..., n - 1
//   length   n padded up to a multiple of world, by repeating the order from its start; with
//            drop_last n cut down to a multiple of world
//   rank r   takes the positions r, r + world, r + 2 * world, ... of it
//
// Positions count samples over all ranks, so they mean the same at any number of ranks: who resumes
// with another world goes on at the same position (global_at).
//
// Life:   construct (at epoch 0); set_epoch(e) before each epoch, the same e on all ranks;
//         at(0), ..., at(size() - 1).
// Bytes:  8n on each rank for one permutation (1 billion samples: 8 GB), drawn anew by set_epoch;
//         none without shuffle.
// Called by one thread. A copy shares the permutation until either changes its epoch.
// Source: torch/utils/data/distributed.py of PyTorch 2.11.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::data {

struct SamplerOptions {
  int64_t world = 1;
  int64_t rank = 0;
  bool shuffle = true;
  uint64_t seed = 0;  // the same on all ranks
  bool drop_last = false;
  // An epoch without a sample for this rank (n < world and drop_last, or n == 0) is an error unless
  // this is set: a training loop over it would never make a step.
  bool allow_empty = false;
};

class DistributedSampler {
 public:
  // Errors: ConfigError: world < 1, a rank outside [0, world), num_samples < 0, an epoch without
  //         samples (see allow_empty).
  DistributedSampler(int64_t num_samples, const SamplerOptions& options);

  // Requires: epoch >= 0, or ConfigError.
  void set_epoch(int64_t epoch);
  int64_t epoch() const { return epoch_; }

  // Samples of this rank in an epoch; equal on all ranks.
  int64_t size() const { return size_; }
  // The i-th sample of this rank. Requires 0 <= i < size().
  int64_t at(int64_t i) const { return global_at(i * options_.world + options_.rank); }
  // All of this rank.
  std::vector<int64_t> indices() const;

  // The sample at a position of the order over all ranks; beyond n the order repeats. Requires
  // position >= 0.
  int64_t global_at(int64_t position) const;

  int64_t num_samples() const { return num_samples_; }
  const SamplerOptions& options() const { return options_; }

 private:
  int64_t num_samples_;
  SamplerOptions options_;
  int64_t size_;
  int64_t epoch_ = 0;
  at::Tensor order_;  // int64 [n]; undefined without shuffle
};

}  // namespace tessera::data

#endif  // DATA_DISTRIBUTED_SAMPLER_H_
