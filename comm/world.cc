#include "comm/world.h"

#include <netdb.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "comm/exchange.h"
#include "comm/fake.h"
#include "comm/gloo.h"

namespace tessera::comm {

struct World::Groups {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  bool fake = false;
  c10::intrusive_ptr<c10d::Store> store;  // rank 0's serves the others: kept until the groups close
  std::unique_ptr<Group> gather;
  std::unique_ptr<Group> reduce;
  std::unique_ptr<Group> host;
};

namespace {

using Meeting = std::function<std::shared_ptr<World::Groups>()>;
std::shared_ptr<World::Groups> within_deadline(const Environment& env, const Options& options,
                                               Meeting meet);
c10::intrusive_ptr<c10d::Store> open_store(const Environment& env, const Options& options);
void await_all(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout);

std::shared_ptr<World::Groups> groups_of_one() {
  auto groups = std::make_shared<World::Groups>();
  groups->gather = std::make_unique<Group>("gather");
  groups->reduce = std::make_unique<Group>("reduce");
  groups->host = std::make_unique<Group>("host");
  return groups;
}

// Gloo and the store write to sockets without MSG_NOSIGNAL: a write to a peer that has died would
// end this process by SIGPIPE, without a word, before the error could be raised that names the
// peer. A handler of the user's stays.
void ignore_broken_pipes() {
  struct sigaction action {};
  if (::sigaction(SIGPIPE, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, nullptr);
}

std::shared_ptr<World::Groups> connect_groups(c10::intrusive_ptr<c10d::Store> store, int rank,
                                              int size, const Options& options) {
  if (size == 1) return groups_of_one();
  ignore_broken_pipes();
  await_all(*store, rank, size, options.init_timeout);
  auto groups = std::make_shared<World::Groups>();
  groups->rank = rank;
  groups->size = size;
  groups->store = store;
  const auto make = [&](const char* name) {
    auto prefixed = c10::make_intrusive<c10d::PrefixStore>(std::string("group/") + name, store);
    try {
      return std::make_unique<Group>(name, make_gloo(prefixed, rank, size, options.train_timeout),
                                     Group::Path::kDirect, options.train_timeout);
    } catch (const std::exception& e) {
      throw CommError(base::str("rank ", rank, ": could not connect the ", name, " group of ", size,
                                " ranks: ", reason_of(e),
                                ". Set GLOO_SOCKET_IFNAME when the hosts have several networks."));
    }
  };
  groups->gather = make("gather");
  groups->reduce = make("reduce");
  groups->host = make("host");
  return groups;
}

}  // namespace

World::World(std::shared_ptr<Groups> groups) : groups_(std::move(groups)) {}
int World::rank() const { return groups_->rank; }
int World::size() const { return groups_->size; }
int World::local_rank() const { return groups_->local_rank; }
bool World::is_fake() const { return groups_->fake; }
Group& World::gather() const { return *groups_->gather; }
Group& World::reduce() const { return *groups_->reduce; }
Group& World::host() const { return *groups_->host; }

void World::barrier() const {
  if (host().path() == Group::Path::kNone) return;
  try {
    host().backend().barrier()->wait(host().timeout());
  } catch (const std::exception& e) {
    throw CommError(base::str("rank ", rank(), ": barrier failed: ", reason_of(e)));
  }
}

World init(const Options& options) { return init(detect_environment(), options); }

namespace {

// Also a second world of one rank has keys of its own. Counted per rank and meeting place, not per
// process: ranks may be threads of one.
int next_world_number(const Environment& env) {
  static std::mutex mutex;
  static std::map<std::string, int> made;
  const std::lock_guard<std::mutex> lock(mutex);
  return made[base::str(env.master_host, ":", env.master_port, "/", env.run_id, "/", env.restart,
                        "/", env.rank)]++;
}

}  // namespace

World init(const Environment& env, const Options& options) {
  base::set_log_rank(env.size > 1 ? env.rank : -1);
  if (env.size == 1) return World(groups_of_one());
  return World(within_deadline(env, options, [env, options, number = next_world_number(env)] {
    // Keys of another run, or of this run before a restart, are never read: a launcher may keep one
    // store for all.
    auto store = c10::make_intrusive<c10d::PrefixStore>(
        base::str("tessera/", env.run_id, "/", env.restart, "/", number), open_store(env, options));
    auto groups = connect_groups(store, env.rank, env.size, options);
    groups->local_rank = env.local_rank;
    return groups;
  }));
}

World connect(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const Options& options) {
  TESSERA_CHECK_CONFIG(size >= 1 && rank >= 0 && rank < size, "rank ", rank, " of ", size,
                       ": expected 0 <= rank < size.");
  return World(connect_groups(std::move(store), rank, size, options));
}

World fake_world(int rank, int size) {
  auto groups = std::make_shared<World::Groups>();
  groups->rank = rank;
  groups->size = size;
  groups->fake = true;
  const auto make = [&](const char* name) {
    return std::make_unique<Group>(name, make_fake(rank, size), Group::Path::kNative,
                                   std::chrono::milliseconds(1000));
  };
  groups->gather = make("gather");
  groups->reduce = make("reduce");
  groups->host = make("host");
  return World(std::move(groups));
}

namespace {

// c10d's store waits without a limit for the answer of whatever accepted its connection. So the
// ranks meet on a thread that can be left behind: the process is about to end then. The deadline
// leaves c10d's own limits, of the connection and of the arrivals, time to say more.
std::shared_ptr<World::Groups> within_deadline(const Environment& env, const Options& options,
                                               Meeting meet) {
  std::packaged_task<std::shared_ptr<World::Groups>()> task(std::move(meet));
  std::future<std::shared_ptr<World::Groups>> met = task.get_future();
  std::thread(std::move(task)).detach();
  const auto deadline = 2 * options.init_timeout + std::chrono::seconds(5);
  if (met.wait_for(deadline) == std::future_status::ready) return met.get();
  throw CommError(base::str("rank ", env.rank, ": what listens at ", env.master_host, ":",
                            env.master_port, " accepted the connection and does not answer (",
                            deadline.count() / 1000.0,
                            " s): another program, or a rank 0 that is stopped. Check MASTER_ADDR "
                            "and MASTER_PORT."));
}

bool port_is_taken(const Environment& env) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(env.master_port);
  if (::getaddrinfo(nullptr, port.c_str(), &hints, &found) != 0) return false;
  bool taken = false;
  for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
    const int fd = ::socket(a->ai_family, a->ai_socktype, a->ai_protocol);
    if (fd < 0) continue;
    const int on = 1;
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (::bind(fd, a->ai_addr, a->ai_addrlen) != 0 && errno == EADDRINUSE) taken = true;
    ::close(fd);
    break;
  }
  ::freeaddrinfo(found);
  return taken;
}

// Rank 0 serves the store (unless the launcher does); the others connect, with back-off, until
// init_timeout.
c10::intrusive_ptr<c10d::Store> open_store(const Environment& env, const Options& options) {
  const bool serve = env.rank == 0 && !env.store_is_served;
  // Asked before the store tries, since c10d retries and logs at length; the store's own bind
  // decides.
  TESSERA_CHECK_CONFIG(!serve || !port_is_taken(env), "rank 0 cannot listen at ", env.master_host,
                       ":", env.master_port,
                       ": the port is in use by another process. Set MASTER_PORT to a free port "
                       "(`tessera launch` without --master-port chooses one).");
  c10d::TCPStoreOptions store_options;
  store_options.port = static_cast<std::uint16_t>(env.master_port);
  store_options.isServer = serve;
  store_options.waitWorkers = false;
  store_options.timeout = options.init_timeout;
  try {
    return c10::make_intrusive<c10d::TCPStore>(env.master_host, store_options);
  } catch (const std::exception& e) {
    throw CommError(base::str(
        "rank ", env.rank, ": ",
        serve ? "could not serve the rendezvous at " : "no rank 0 answered at ", env.master_host,
        ":", env.master_port, " within ", options.init_timeout.count() / 1000.0, " s (",
        reason_of(e), "). Check MASTER_ADDR and MASTER_PORT, and that rank 0 runs."));
  }
}

// Waits until all ranks have been here, and names those that have not.
void await_all(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout) {
  const auto key = [](int r) { return "arrived/" + std::to_string(r); };
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(key(r));
  try {
    store.set(key(rank), std::vector<uint8_t>{1});
    store.wait(keys, timeout);
  } catch (const std::exception& e) {
    std::string missing;
    try {
      for (int r = 0; r < size; ++r) {
        if (!store.check({key(r)})) missing += (missing.empty() ? "" : ", ") + std::to_string(r);
      }
    } catch (const std::exception&) {
      missing = "unknown: the store of rank 0 is gone";
    }
    throw CommError(base::str("rank ", rank, ": not all of ", size, " ranks arrived within ",
                              timeout.count() / 1000.0, " s; missing: ", missing, " (",
                              reason_of(e), ")."));
  }
}

}  // namespace
}  // namespace tessera::comm
