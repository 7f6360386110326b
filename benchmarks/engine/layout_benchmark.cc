// What a Layout costs on the host: its construction, which happens once a unit, and the interval
// queries of a rank, which happen when owned parameters are made. Sizes of parameters are those of
// transformer blocks (a few large matrices, many small vectors), with primes among them so that
// alignment has something to do.

#include <benchmark/benchmark.h>

#include <cstdint>
#include <iterator>
#include <vector>

#include "engine/layout.h"

namespace tessera::engine {
namespace {

std::vector<int64_t> numels_of(int64_t num_params) {
  static constexpr int64_t kNumels[] = {16777216, 4096, 45088768, 1021, 4194304, 127, 32749};
  std::vector<int64_t> numels;
  numels.reserve(static_cast<size_t>(num_params));
  for (int64_t i = 0; i < num_params; ++i) numels.push_back(kNumels[i % std::size(kNumels)]);
  return numels;
}

void BM_LayoutConstruct(benchmark::State& state) {
  const std::vector<int64_t> numels = numels_of(state.range(0));
  for (auto _ : state) {
    const Layout layout(numels, state.range(1));
    benchmark::DoNotOptimize(layout.shard_elements());
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

// All that one rank asks: of every parameter its part, in both coordinates.
void BM_LayoutQueriesOfARank(benchmark::State& state) {
  const Layout layout(numels_of(state.range(0)), state.range(1));
  const int64_t rank = state.range(1) / 2;
  for (auto _ : state) {
    for (int64_t i = 0; i < layout.num_params(); ++i) {
      benchmark::DoNotOptimize(layout.param_in_shard(i, rank));
      benchmark::DoNotOptimize(layout.shard_in_param(i, rank));
    }
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void BM_LayoutGaps(benchmark::State& state) {
  const Layout layout(numels_of(state.range(0)), state.range(1));
  for (auto _ : state) benchmark::DoNotOptimize(layout.gaps());
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void all_sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"params", "world"})->ArgsProduct({{10, 1000, 10000}, {8, 512, 4096}});
}

BENCHMARK(BM_LayoutConstruct)->Apply(all_sizes);
BENCHMARK(BM_LayoutQueriesOfARank)->Apply(all_sizes);
BENCHMARK(BM_LayoutGaps)->Apply(all_sizes);

}  // namespace
}  // namespace tessera::engine

BENCHMARK_MAIN();
