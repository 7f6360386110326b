#ifndef TRAIN_STRATEGY_H_
#define TRAIN_STRATEGY_H_

// The one flag between replication and sharding, and what each value of it means, as a table.

#include <string>
#include <vector>

#include "engine/schedule.h"

namespace tessera {

enum class Strategy {
  kReplicate,  // DDP: every rank holds everything; gradients are averaged in buckets
  kFullShard,  // FSDP, ZeRO-3: parameters, gradients and optimizer state are sharded
};

namespace train {

struct StrategyRow {
  Strategy strategy;
  const char* name;    // in configurations and messages
  bool shards_params;  // units are fsdp::ShardedUnit per site, else ddp::ReplicatedUnit buckets
                       // of the root
  engine::Rules rules;
};

const std::vector<StrategyRow>& strategy_table();
const StrategyRow& row_of(Strategy strategy);
// Errors: ConfigError that lists the names.
Strategy strategy_of(const std::string& name);

}  // namespace train
}  // namespace tessera

#endif  // TRAIN_STRATEGY_H_
