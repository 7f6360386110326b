#include "train/strategy.h"

#include "base/error.h"

namespace tessera::train {

const std::vector<StrategyRow>& strategy_table() {
  using Drop = engine::Rules::Drop;
  static const std::vector<StrategyRow> table = {
      // strategy, name, shards_params,
      //     {drop_after_forward, drop_in_backward, reduce_every_micro_batch, prefetch}
      {Strategy::kReplicate, "ddp", false, {Drop::kNever, false, false, false}},
      {Strategy::kFullShard, "fsdp", true, {Drop::kDefault, true, true, true}},
  };
  return table;
}

const StrategyRow& row_of(Strategy strategy) {
  for (const StrategyRow& row : strategy_table()) {
    if (row.strategy == strategy) return row;
  }
  throw InternalError("a strategy without a row in the table");
}

Strategy strategy_of(const std::string& name) {
  std::string names;
  for (const StrategyRow& row : strategy_table()) {
    if (row.name == name) return row.strategy;
    names += (names.empty() ? "'" : ", '") + std::string(row.name) + "'";
  }
  throw ConfigError(base::str("strategy '", name, "': expected one of ", names, "."));
}

}  // namespace tessera::train
