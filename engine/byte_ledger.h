#ifndef ENGINE_BYTE_LEDGER_H_
#define ENGINE_BYTE_LEDGER_H_

// Counts the bytes the engine holds, by what they are for: what is live now and the most there ever
// was. Thread-safe. Counted are the engine's own flat buffers, as they are used (not what its pool
// keeps for reuse).

#include <array>
#include <atomic>
#include <cstdint>

namespace tessera::engine {

enum class Bytes {
  kOwnedParams,  // masters: this rank's shards, or the whole parameters where they are replicated
  kOwnedGrads,   // gradients between steps: like kOwnedParams
  kFullParams,   // gathered parameters, or compute-dtype copies
  kFullGrads,    // gradients of a whole unit on their way into the owned ones
  kScratch,      // what is received from other ranks before it is added
  kCount
};

class ByteLedger {
 public:
  void add(Bytes kind, int64_t bytes) {
    Entry& entry = entries_[static_cast<size_t>(kind)];
    const int64_t live = entry.live.fetch_add(bytes) + bytes;
    int64_t peak = entry.peak.load();
    while (live > peak && !entry.peak.compare_exchange_weak(peak, live)) {
    }
  }
  int64_t live(Bytes kind) const { return entries_[static_cast<size_t>(kind)].live.load(); }
  int64_t peak(Bytes kind) const { return entries_[static_cast<size_t>(kind)].peak.load(); }
  // Peaks start again from what is live.
  void reset_peaks() {
    for (Entry& entry : entries_) entry.peak = entry.live.load();
  }

 private:
  struct Entry {
    std::atomic<int64_t> live{0};
    std::atomic<int64_t> peak{0};
  };
  std::array<Entry, static_cast<size_t>(Bytes::kCount)> entries_;
};

}  // namespace tessera::engine

#endif  // ENGINE_BYTE_LEDGER_H_
