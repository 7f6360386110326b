#ifndef ENGINE_LAYOUT_H_
#define ENGINE_LAYOUT_H_

// A Layout says where the elements of a unit's parameters live: each at an aligned offset of one
// flat buffer, which is cut into one equal shard per rank. A parameter may lie in several shards,
// and a shard may hold parts of several parameters or none.
//
//   flat:    | p0 ....| p1 .|pad| p2 ........ | p3 |pad     pad |
//   shards:  |    shard 0       |     shard 1     |   shard 2    |
//
// Plain integers; a value type. Positions are in elements, of whatever dtype the buffer has.

#include <cstdint>
#include <vector>

#include "base/interval.h"

namespace tessera::engine {

class Layout {
 public:
  // Every parameter and every shard starts at a multiple of this: 64 bytes in the narrowest dtype
  // (2 bytes).
  static constexpr int64_t kAlignElements = 32;

  // Requires: every numel >= 0, shards >= 1.
  Layout(std::vector<int64_t> numels, int64_t shards);

  int64_t num_params() const { return static_cast<int64_t>(numels_.size()); }
  int64_t num_shards() const { return num_shards_; }
  int64_t shard_elements() const { return shard_elements_; }
  int64_t total_elements() const { return shard_elements_ * num_shards_; }
  // Elements of parameters, without padding.
  int64_t param_elements() const;

  // Where parameter i lies in the flat buffer.
  base::Interval param(int64_t i) const { return {offsets_[i], offsets_[i] + numels_[i]}; }
  // Where shard r lies in the flat buffer.
  base::Interval shard(int64_t r) const { return {r * shard_elements_, (r + 1) * shard_elements_}; }
  // The part of parameter i in shard r, as positions in the shard; empty when there is none.
  base::Interval param_in_shard(int64_t i, int64_t r) const;
  // The same part as positions in the flattened parameter.
  base::Interval shard_in_param(int64_t i, int64_t r) const;
  // The stretches of the flat buffer that belong to no parameter.
  std::vector<base::Interval> gaps() const;

 private:
  std::vector<int64_t> numels_;
  std::vector<int64_t> offsets_;
  int64_t num_shards_ = 1;
  int64_t shard_elements_ = 0;
};

}  // namespace tessera::engine

#endif  // ENGINE_LAYOUT_H_
