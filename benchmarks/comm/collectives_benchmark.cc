// The collectives of comm/collectives.h against c10d's own on the same Gloo group and the same
// bytes. Two ranks as threads of one process over the loopback device, fp32.
//
//   ours                  c10d
//   all_gather_in_place   _allgather_base
//   reduce_scatter_mean   _reduce_scatter_base (a sum: Gloo's own division is left out, in its
//   favour) all_reduce_mean       allreduce (likewise)
//
// bytes: of the whole buffer (W * S elements). Both ranks run the same number of calls; the time is
// rank 0's, by the clock on the wall.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <future>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "comm/collectives.h"
#include "comm/world.h"

namespace tessera::comm {
namespace {

constexpr int kRanks = 2;

// One rank's buffers.
struct Buffers {
  at::Tensor full;     // [W * S]
  at::Tensor part;     // [S]
  at::Tensor scratch;  // of ours
};

using Collective = void (*)(Group&, Buffers&);

void our_all_gather(Group& group, Buffers& b) { all_gather_in_place(group, b.full, "a gather"); }

void our_reduce_scatter(Group& group, Buffers& b) {
  reduce_scatter_mean(group, b.full, b.part, b.scratch, "a reduce-scatter");
}

void our_all_reduce(Group& group, Buffers& b) {
  all_reduce_mean(group, b.full, b.scratch, "an all-reduce");
}

void c10d_all_gather(Group& group, Buffers& b) {
  group.backend()._allgather_base(b.full, b.part)->wait();
}

void c10d_reduce_scatter(Group& group, Buffers& b) {
  group.backend()._reduce_scatter_base(b.part, b.full)->wait();
}

void c10d_all_reduce(Group& group, Buffers& b) {
  std::vector<at::Tensor> list{b.full};
  group.backend().allreduce(list)->wait();
}

// The worlds of both ranks, connected once for all benchmarks.
std::vector<World>& worlds() {
  static std::vector<World> connected = [] {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::future<World>> futures;
    for (int rank = 0; rank < kRanks; ++rank) {
      futures.push_back(
          std::async(std::launch::async, [=] { return connect(store, rank, kRanks); }));
    }
    std::vector<World> result;
    for (auto& future : futures) result.push_back(future.get());
    return result;
  }();
  return connected;
}

// Zeros, so that sums of any number of calls stay what they are.
Buffers buffers_of(Group& group, int64_t elements) {
  Buffers buffers;
  buffers.full = at::zeros({elements});
  buffers.part = at::zeros({elements / kRanks});
  const int64_t scratch = std::max(all_reduce_scratch_elements(group, elements),
                                   reduce_scatter_scratch_parts(group) * (elements / kRanks));
  buffers.scratch = at::zeros({scratch});
  return buffers;
}

// Calls per round; within a round neither rank waits for anything but the collectives themselves.
int64_t calls_of(int64_t bytes) { return std::max<int64_t>(1, (16 << 20) / bytes); }

void BM_Collective(benchmark::State& state, Collective collective) {
  at::set_num_threads(1);
  const int64_t bytes = state.range(0);
  const int64_t calls = calls_of(bytes);
  Group& group = worlds()[0].reduce();
  Buffers mine = buffers_of(group, bytes / 4);
  Buffers others = buffers_of(worlds()[1].reduce(), bytes / 4);
  const auto round = [&](Group& g, Buffers& b) {
    for (int64_t i = 0; i < calls; ++i) collective(g, b);
  };
  for (auto _ : state) {
    auto other = std::async(std::launch::async, [&] {
      at::set_num_threads(1);
      round(worlds()[1].reduce(), others);
    });
    round(group, mine);
    other.get();
  }
  state.SetBytesProcessed(state.iterations() * calls * bytes);
  state.counters["calls"] = static_cast<double>(calls);
}

void all_sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgName("bytes")->Arg(256 << 10)->Arg(4 << 20)->Arg(64 << 20);
  benchmark->UseRealTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(BM_Collective, all_gather_ours, our_all_gather)->Apply(all_sizes);
BENCHMARK_CAPTURE(BM_Collective, all_gather_c10d, c10d_all_gather)->Apply(all_sizes);
BENCHMARK_CAPTURE(BM_Collective, reduce_scatter_ours, our_reduce_scatter)->Apply(all_sizes);
BENCHMARK_CAPTURE(BM_Collective, reduce_scatter_c10d, c10d_reduce_scatter)->Apply(all_sizes);
BENCHMARK_CAPTURE(BM_Collective, all_reduce_ours, our_all_reduce)->Apply(all_sizes);
BENCHMARK_CAPTURE(BM_Collective, all_reduce_c10d, c10d_all_reduce)->Apply(all_sizes);

}  // namespace
}  // namespace tessera::comm

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  tessera::comm::worlds().clear();  // while the process is whole
  return 0;
}
