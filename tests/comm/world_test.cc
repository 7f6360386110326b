// Goal: ranks find each other, or say who is missing; and they agree on small things so that a
// fault on one ends all. Method: ranks as threads, over Gloo and over a TCPStore on a free port.

#include "comm/world.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <exception>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "base/error.h"
#include "base/stopwatch.h"
#include "comm/agreement.h"
#include "tests/base/thrown.h"
#include "tests/harness/ranks.h"

namespace tessera::comm {
namespace {

using harness::run_ranks;

// A port of all interfaces that this test holds while it lives: in use for everybody else.
class HeldPort {
 public:
  HeldPort() : fd_(::socket(AF_INET6, SOCK_STREAM, 0)) {
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_addr = in6addr_any;
    socklen_t size = sizeof(address);
    if (::bind(fd_, reinterpret_cast<sockaddr*>(&address), size) != 0 || ::listen(fd_, 1) != 0 ||
        ::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
      throw std::runtime_error("cannot hold a port");
    }
    port_ = ntohs(address.sin6_port);
  }
  ~HeldPort() { ::close(fd_); }
  int port() const { return port_; }

 private:
  int fd_;
  int port_ = 0;
};

int free_port() { return HeldPort().port(); }

Environment environment(int rank, int size, int port) {
  Environment env;
  env.source = "test";
  env.rank = rank;
  env.size = size;
  env.local_rank = rank;
  env.local_size = size;
  env.master_host = "127.0.0.1";
  env.master_port = port;
  return env;
}

Options seconds(int init, int train = 20) {
  Options options;
  options.init_timeout = std::chrono::seconds(init);
  options.train_timeout = std::chrono::seconds(train);
  return options;
}

// Runs fn(rank) in a thread per rank. An exception of one is a failure of the test.
void in_threads(int size, const std::function<void(int)>& fn) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&fn, rank] {
      try {
        fn(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(RendezvousTest, RanksMeetAtThePortOfRank0) {
  const int port = free_port();
  in_threads(3, [&](int rank) {
    const World world = init(environment(rank, 3, port), seconds(20));
    EXPECT_EQ(world.rank(), rank);
    EXPECT_EQ(world.size(), 3);
    EXPECT_EQ(world.local_rank(), rank);
    EXPECT_FALSE(world.is_fake());
    EXPECT_EQ(sum_over_ranks(world, rank + 1.0), 6.0);
    world.barrier();
  });
}

TEST(RendezvousTest, OneProcessNeedsNoNetwork) {
  const World world = init(Environment{}, seconds(1));
  EXPECT_EQ(world.size(), 1);
  world.barrier();
  EXPECT_EQ(world.gather().path(), Group::Path::kNone);
}

TEST(RendezvousTest, APortInUseIsAConfigErrorThatNamesHostAndPort) {
  const HeldPort held;
  const std::string text =
      thrown<ConfigError>([&] { init(environment(0, 2, held.port()), seconds(2)); });
  EXPECT_TRUE(contains(text, "127.0.0.1:" + std::to_string(held.port()))) << text;
  EXPECT_TRUE(contains(text, "in use")) << text;
}

TEST(RendezvousTest, MissingRanksAreListedWithinTheTimeLimit) {
  const int port = free_port();
  const base::Stopwatch watch;
  in_threads(2, [&](int thread) {
    const int rank = thread == 0 ? 0 : 2;  // 1 and 3 stay away.
    const std::string text =
        thrown<CommError>([&] { init(environment(rank, 4, port), seconds(2)); });
    EXPECT_TRUE(contains(text, "rank " + std::to_string(rank) + ": ")) << text;
    // Rank 0's store goes with rank 0, so the other may find it gone.
    if (rank == 0) {
      EXPECT_TRUE(contains(text, "not all of 4 ranks arrived within 2 s")) << text;
      EXPECT_TRUE(contains(text, "missing: 1, 3 ")) << text;
    }
  });
  EXPECT_GE(watch.seconds(), 1.5);
  EXPECT_LT(watch.seconds(), 12.0);
}

TEST(RendezvousTest, ARankWithoutARank0GivesUpWithinTheTimeLimitAndNamesThePlace) {
  const int port = free_port();
  const base::Stopwatch watch;
  const std::string text = thrown<CommError>([&] { init(environment(1, 2, port), seconds(2)); });
  EXPECT_TRUE(contains(text, "no rank 0 answered at 127.0.0.1:" + std::to_string(port))) << text;
  EXPECT_LT(watch.seconds(), 15.0);
}

TEST(RendezvousTest, AListenerThatDoesNotAnswerIsNamedWithinTheDeadline) {
  const HeldPort silent;
  const base::Stopwatch watch;
  const std::string text =
      thrown<CommError>([&] { init(environment(1, 2, silent.port()), seconds(1)); });
  EXPECT_TRUE(contains(text, "127.0.0.1:" + std::to_string(silent.port()))) << text;
  EXPECT_LT(watch.seconds(), 15.0);
}

// A launcher that serves one store for all runs and restarts: what an earlier one left is not read.
TEST(RendezvousTest, KeysOfAnotherRunOrRestartAreNotRead) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto served = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const int port = served->getPort();
  const auto environment_of = [&](int rank, const std::string& run, int restart) {
    Environment env = environment(rank, 2, port);
    env.store_is_served = true;
    env.run_id = run;
    env.restart = restart;
    return env;
  };
  const auto meet = [&](const std::string& run, int restart) {
    in_threads(2, [&](int rank) {
      const World world = init(environment_of(rank, run, restart), seconds(20));
      EXPECT_EQ(sum_over_ranks(world, 1.0), 2.0);
      world.barrier();
    });
  };
  meet("a", 0);
  EXPECT_TRUE(served->check({"tessera/a/0/0/arrived/0", "tessera/a/0/0/arrived/1"}));
  meet("a", 0);  // A second world of the same run.
  meet("a", 1);  // Stale addresses of restart 0 would fail to connect.
  meet("b", 0);
  EXPECT_TRUE(served->check({"tessera/a/1/0/arrived/1", "tessera/b/0/0/arrived/1"}));
  const std::string text = thrown<CommError>([&] { init(environment_of(0, "a", 2), seconds(1)); });
  EXPECT_TRUE(contains(text, "missing: 1 ")) << text;
}

// ---- agreements

class OwnType : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

TEST(AgreementTest, AFaultOnOneRankIsThrownByAllAndKeepsItsTypeWhereItHappened) {
  for (int size = 1; size <= 4; ++size) {
    for (int culprit = 0; culprit < size; ++culprit) {
      run_ranks(size, [&](World& world) {
        const auto work = [&] {
          all_or_none(world, [&] {
            if (world.rank() == culprit) throw OwnType("no such file");
          });
        };
        if (world.rank() == culprit) {
          EXPECT_EQ(thrown<OwnType>(work), "no such file");
        } else {
          const std::string expected = "rank " + std::to_string(culprit) + " failed: no such file";
          EXPECT_EQ(thrown<ConfigError>(work), expected);
        }
        // The group still works.
        EXPECT_EQ(sum_over_ranks(world, 1.0), size);
      });
    }
  }
}

TEST(AgreementTest, OfSeveralFaultsTheFirstRanksIsTold) {
  run_ranks(4, [](World& world) {
    const auto work = [&] {
      all_or_none(world, [&] {
        if (world.rank() % 2 == 1) throw ConfigError("fault " + std::to_string(world.rank()));
      });
    };
    const std::string text = thrown<ConfigError>(work);
    const std::string expected =
        world.rank() % 2 == 1 ? "fault " + std::to_string(world.rank()) : "rank 1 failed: fault 1";
    EXPECT_EQ(text, expected);
  });
}

TEST(AgreementTest, FaultsWithoutATextOrOfNoStandardTypeAreFaultsToo) {
  run_ranks(2, [](World& world) {
    const auto empty = [&] {
      all_or_none(world, [&] {
        if (world.rank() == 0) throw OwnType("");
      });
    };
    if (world.rank() == 0) {
      EXPECT_EQ(thrown<OwnType>(empty), "");
    } else {
      EXPECT_TRUE(contains(thrown<ConfigError>(empty), "rank 0 failed: "));
    }
    const auto number = [&] {
      all_or_none(world, [&] {
        if (world.rank() == 1) throw 5;
      });
    };
    if (world.rank() == 1) {
      EXPECT_THROW(number(), int);
    } else {
      EXPECT_TRUE(contains(thrown<ConfigError>(number), "rank 1 failed: "));
    }
  });
}

TEST(AgreementTest, NothingIsThrownWhenNothingFailed) {
  run_ranks(3, [](World& world) {
    bool ran = false;
    all_or_none(world, [&] { ran = true; });
    EXPECT_TRUE(ran);
  });
}

TEST(AgreementTest, TextsOfAnyLengthArriveWhole) {
  for (int size = 1; size <= 4; ++size) {
    run_ranks(size, [&](World& world) {
      const auto text_of = [](int rank) {
        return rank == 1 ? std::string() : std::string(rank * 1000 + 1, 'a') + '\0' + "end";
      };
      const std::vector<std::string> texts = texts_of_ranks(world, text_of(world.rank()));
      ASSERT_EQ(texts.size(), static_cast<size_t>(size));
      for (int r = 0; r < size; ++r) EXPECT_EQ(texts[r], text_of(r));
      for (const std::string& text : texts_of_ranks(world, "")) EXPECT_EQ(text, "");
    });
  }
}

TEST(AgreementTest, RanksThatDisagreeAllLearnWhoAndInWhichLine) {
  run_ranks(3, [](World& world) {
    EXPECT_NO_THROW(check_same(world, "the options", "steps 1\nlr 2\n"));
    const auto differ = [&] {
      check_same(world, "the options", world.rank() == 2 ? "steps 1\nlr 3\n" : "steps 1\nlr 2\n");
    };
    const std::string text = thrown<ConfigError>(differ);
    EXPECT_TRUE(contains(text,
                         "disagree on the options: rank 0 has 'lr 2' where rank 2 has "
                         "'lr 3'"))
        << text;
    const auto longer = [&] {
      check_same(world, "the options", world.rank() == 1 ? "steps 1\nmore\n" : "steps 1\n");
    };
    const std::string more = thrown<ConfigError>(longer);
    EXPECT_TRUE(contains(more, "rank 0 has nothing where rank 1 has 'more'")) << more;
  });
}

// 1, 2^53, -2^53 and 1 more: only the sum in rank order gives 1.
TEST(AgreementTest, SumsAreTakenInRankOrderWithTheSameBitsOnEveryRank) {
  const double huge = 0x1p53;
  const std::vector<double> values = {1.0, huge, -huge, 1.0};
  run_ranks(4, [&](World& world) {
    EXPECT_EQ(sum_over_ranks(world, values[world.rank()]), ((1.0 + huge) - huge) + 1.0);
    const std::vector<double> sums = sum_over_ranks(world, {1.0 * world.rank(), 0.5, -1.0});
    EXPECT_EQ(sums, (std::vector<double>{6.0, 2.0, -4.0}));
    EXPECT_TRUE(sum_over_ranks(world, std::vector<double>{}).empty());
  });
}

TEST(AgreementTest, OneRanksNanOrInfinityReachesAll) {
  run_ranks(3, [](World& world) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    EXPECT_TRUE(std::isnan(sum_over_ranks(world, world.rank() == 1 ? nan : 1.0)));
    const double infinity = std::numeric_limits<double>::infinity();
    EXPECT_EQ(sum_over_ranks(world, world.rank() == 2 ? infinity : 1.0), infinity);
  });
}

TEST(AgreementTest, AFlagIsSetForAllWhereAnyRankHasIt) {
  for (int size = 1; size <= 4; ++size) {
    run_ranks(size, [&](World& world) {
      std::vector<uint8_t> flags(size + 2, 0);
      flags[world.rank()] = 1;
      flags[size] = world.rank() == 0 ? 1 : 0;
      any_over_ranks(world, flags);
      std::vector<uint8_t> expected(size + 2, 1);
      expected[size + 1] = 0;
      EXPECT_EQ(flags, expected);
      std::vector<uint8_t> none;
      any_over_ranks(world, none);
      EXPECT_TRUE(none.empty());
    });
  }
}

TEST(AgreementTest, ARankThatStaysAwayFailsTheOthersByName) {
  run_ranks(
      2,
      [](World& world) {
        if (world.rank() == 1) return;
        const base::Stopwatch watch;
        const std::string text = thrown<CommError>([&] { all_or_none(world, [] {}); });
        EXPECT_TRUE(contains(text, "rank 0: agreement on")) << text;
        EXPECT_TRUE(contains(text, "rank 1")) << text;
        EXPECT_LT(watch.seconds(), 10.0);
      },
      std::chrono::seconds(1));
}

TEST(AgreementTest, AFakeWorldAgreesWithItself) {
  const World world = fake_world(1, 4);
  EXPECT_EQ(sum_over_ranks(world, 3.0), 3.0);
  EXPECT_EQ(texts_of_ranks(world, "x"), std::vector<std::string>(4, "x"));
  EXPECT_THROW(all_or_none(world, [] { throw OwnType("x"); }), OwnType);
}

}  // namespace
}  // namespace tessera::comm
