#ifndef TESTS_HARNESS_RANKS_H_
#define TESTS_HARNESS_RANKS_H_

// Ranks as threads of one process, each with its own world over Gloo: quick to start, and a
// debugger sees them all. What LibTorch keeps per thread (grad mode, autocast) is each rank's own,
// and a backward on CPU runs in the thread that calls it. What it keeps per process is shared,
// above all the generator: make models by seed, not in a race.

#include <chrono>
#include <functional>

#include "comm/world.h"

namespace tessera::harness {

// Runs fn on `size` ranks and returns when all have ended.
//
// Ensures: ends within about `timeout` after a rank has ended early, since collectives that wait
//          for it fail.
// Errors:  std::runtime_error with the texts of all ranks that threw, in the order in which they
//          threw: the first is the cause, the others mostly waited for it.
void run_ranks(int size, const std::function<void(comm::World&)>& fn,
               std::chrono::milliseconds timeout = std::chrono::seconds(20));

}  // namespace tessera::harness

#endif  // TESTS_HARNESS_RANKS_H_
