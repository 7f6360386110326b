#include "data/distributed_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>

#include "base/error.h"
#include "base/math.h"

namespace tessera::data {
namespace {

at::Tensor permutation(int64_t size, uint64_t seed) {
  // A generator of its own: the order must not depend on, or disturb, the numbers drawn by the
  // model.
  return at::randperm(size, at::detail::createCPUGenerator(seed),
                      at::TensorOptions().dtype(at::kLong));
}

}  // namespace

DistributedSampler::DistributedSampler(int64_t num_samples, const SamplerOptions& options)
    : num_samples_(num_samples), options_(options) {
  TESSERA_CHECK_CONFIG(options.world >= 1, "sampler: world is ", options.world,
                       "; expected at least 1");
  TESSERA_CHECK_CONFIG(options.rank >= 0 && options.rank < options.world, "sampler: rank is ",
                       options.rank, "; expected one in [0, ", options.world, ")");
  TESSERA_CHECK_CONFIG(num_samples >= 0, "sampler: num_samples is ", num_samples,
                       "; expected 0 or more");
  size_ =
      options.drop_last ? num_samples / options.world : base::ceil_div(num_samples, options.world);
  TESSERA_CHECK_CONFIG(
      size_ > 0 || options.allow_empty, "sampler: ", num_samples, " samples over ", options.world,
      " ranks", options.drop_last ? " with drop_last" : "",
      " leave no sample for a rank, so an epoch would have no step. Use more data, fewer"
      " ranks, or no drop_last.");
  if (options.shuffle) order_ = permutation(num_samples_, options_.seed);
}

void DistributedSampler::set_epoch(int64_t epoch) {
  TESSERA_CHECK_CONFIG(epoch >= 0, "sampler: epoch is ", epoch, "; expected 0 or more");
  // Undefined: an earlier call ran out of memory.
  if (epoch == epoch_ && (order_.defined() || !options_.shuffle)) return;
  epoch_ = epoch;
  if (!options_.shuffle) return;
  order_.reset();  // first, so that there are never two permutations in memory
  order_ = permutation(num_samples_, options_.seed + static_cast<uint64_t>(epoch));
}

std::vector<int64_t> DistributedSampler::indices() const {
  std::vector<int64_t> all(static_cast<size_t>(size_));
  for (int64_t i = 0; i < size_; ++i) all[static_cast<size_t>(i)] = at(i);
  return all;
}

int64_t DistributedSampler::global_at(int64_t position) const {
  const int64_t place = position % num_samples_;
  return options_.shuffle ? order_.const_data_ptr<int64_t>()[place] : place;
}

}  // namespace tessera::data
