#include "engine/layout.h"

#include <utility>

#include "base/error.h"
#include "base/math.h"

namespace tessera::engine {

Layout::Layout(std::vector<int64_t> numels, int64_t shards)
    : numels_(std::move(numels)), num_shards_(shards) {
  TESSERA_CHECK(shards >= 1, "a layout of ", shards, " shards.");
  int64_t end = 0;
  offsets_.reserve(numels_.size());
  for (const int64_t numel : numels_) {
    TESSERA_CHECK(numel >= 0, "a parameter of ", numel, " elements.");
    offsets_.push_back(base::round_up(end, kAlignElements));
    end = offsets_.back() + numel;
  }
  shard_elements_ = base::round_up(base::ceil_div(end, shards), kAlignElements);
}

int64_t Layout::param_elements() const {
  int64_t sum = 0;
  for (const int64_t numel : numels_) sum += numel;
  return sum;
}

base::Interval Layout::param_in_shard(int64_t i, int64_t r) const {
  const base::Interval part = base::intersect(param(i), shard(r));
  if (part.empty()) return {0, 0};
  return base::shift(part, -shard(r).begin);
}

base::Interval Layout::shard_in_param(int64_t i, int64_t r) const {
  const base::Interval part = base::intersect(param(i), shard(r));
  return base::shift(part, -offsets_[i]);
}

std::vector<base::Interval> Layout::gaps() const {
  std::vector<base::Interval> gaps;
  int64_t end = 0;
  for (int64_t i = 0; i < num_params(); ++i) {
    if (offsets_[i] > end) gaps.push_back({end, offsets_[i]});
    end = offsets_[i] + numels_[i];
  }
  if (total_elements() > end) gaps.push_back({end, total_elements()});
  return gaps;
}

}  // namespace tessera::engine
