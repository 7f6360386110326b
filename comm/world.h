#ifndef COMM_WORLD_H_
#define COMM_WORLD_H_

// The World is this process's place among the ranks of a run, and the groups they talk over:
//
//   gather()   all-gathers of parameters   } separate groups, so that a gather for the next unit
//   reduce()   reductions of gradients     } overlaps with the reduction of the last one
//   host()     small agreements: errors, norms, maps of used parameters; never on the device
//
// A handle: copies share the groups. The groups close when the last copy goes.

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>

#include "comm/environment.h"
#include "comm/group.h"

namespace c10d {
class Store;
}

namespace tessera::comm {

struct Options {
  std::chrono::milliseconds init_timeout{300'000};   // for all ranks to arrive
  std::chrono::milliseconds train_timeout{100'000};  // for one collective
};

class World {
 public:
  int rank() const;
  int size() const;
  int local_rank() const;

  Group& gather() const;
  Group& reduce() const;
  Group& host() const;

  // True when the groups move nothing (fake_world): results of collectives are then whatever was in
  // the buffers.
  bool is_fake() const;

  // Returns when all ranks have called it.
  // Collective: yes, on host().
  void barrier() const;

  struct Groups;  // world.cc and the functions below
  explicit World(std::shared_ptr<Groups> groups);

 private:
  std::shared_ptr<Groups> groups_;
};

// The world that the environment describes (see environment.h). One process alone needs no network.
//
// Ensures:    SIGPIPE is ignored where there are peers and nothing else was set for it: a peer's
//             death is an exception.
// Collective: yes, all ranks of the run, before any other collective.
// Errors:     ConfigError when the environment is contradictory or the port is taken; CommError
//             when ranks do not arrive within init_timeout (the message lists them).
World init(const Options& options = {});
World init(const Environment& environment, const Options& options);

// The world of `size` ranks that meet in `store` (for tests: threads of one process over a
// HashStore).
//
// Collective: yes.
World connect(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
              const Options& options = {});

// A world whose collectives return at once and move nothing: for dry runs and for measuring host
// time.
World fake_world(int rank, int size);

}  // namespace tessera::comm

#endif  // COMM_WORLD_H_
