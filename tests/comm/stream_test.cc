// Goal: a stream runs closures in order beside its caller, and no error of one is lost. Method:
// closures that note their order or wait for a gate that the test opens, so that nothing depends on
// the clock.

#include "comm/stream.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/base/thrown.h"

namespace tessera::comm {
namespace {

using Kind = Stream::Kind;

// Closures wait for it.
class Gate {
 public:
  void open() { promise_.set_value(); }
  std::function<void()> wait() const {
    return [future = future_] { future.wait(); };
  }

 private:
  std::promise<void> promise_;
  std::shared_future<void> future_ = promise_.get_future().share();
};

std::string error_of(const Event& event) {
  return thrown<std::runtime_error>([&] { event.wait(); });
}

void fail() { throw std::runtime_error("the first error"); }

TEST(StreamTest, ClosuresRunOnceEachInTheOrderTheyWereGiven) {
  for (const Kind kind : {Kind::kInline, Kind::kWorker}) {
    Stream stream("order", kind);
    std::vector<int> order;
    Event last;
    for (int i = 0; i < 1000; ++i) {
      last = stream.run([&order, i] { order.push_back(i); });
    }
    last.wait();
    ASSERT_EQ(order.size(), 1000u);
    for (int i = 0; i < 1000; ++i) EXPECT_EQ(order[i], i);
  }
}

TEST(StreamTest, AWorkerRunsBesideItsCallerInOneThread) {
  Gate gate;
  std::thread::id first, second;
  Stream stream("beside", Kind::kWorker);
  const Event waiting = stream.run(gate.wait());
  const Event a = stream.run([&] { first = std::this_thread::get_id(); });
  const Event b = stream.run([&] { second = std::this_thread::get_id(); });
  EXPECT_FALSE(waiting.done());
  EXPECT_FALSE(b.done());
  gate.open();
  b.wait();
  EXPECT_TRUE(waiting.done());
  EXPECT_TRUE(a.done());
  EXPECT_EQ(first, second);
  EXPECT_NE(first, std::this_thread::get_id());
}

TEST(StreamTest, AnInlineStreamRunsInTheCallerAndIsDoneOnReturn) {
  Stream stream("inline", Kind::kInline);
  std::thread::id thread;
  const Event event = stream.run([&] { thread = std::this_thread::get_id(); });
  EXPECT_EQ(thread, std::this_thread::get_id());
  EXPECT_TRUE(event.done());
  EXPECT_NO_THROW(event.wait());
}

TEST(StreamTest, AnEventThatWasNeverRunIsDone) {
  const Event event;
  EXPECT_TRUE(event.done());
  EXPECT_NO_THROW(event.wait());
}

TEST(StreamTest, AnErrorIsThrownByItsEventAndByAllLaterOnes) {
  Gate gate;
  bool ran = false;
  Stream stream("error", Kind::kWorker);
  const Event before = stream.run(gate.wait());
  const Event failed = stream.run(fail);
  const Event after = stream.run([&] { ran = true; });
  gate.open();
  EXPECT_EQ(error_of(after), "the first error");
  EXPECT_EQ(error_of(failed), "the first error");
  EXPECT_EQ(error_of(failed), "the first error") << "also when asked again";
  EXPECT_NO_THROW(before.wait());
  EXPECT_EQ(error_of(stream.run([&] { ran = true; })), "the first error") << "given later";
  EXPECT_FALSE(ran);
}

TEST(StreamTest, AnInlineStreamThrowsAtOnceAndStaysBroken) {
  Stream stream("error", Kind::kInline);
  bool ran = false;
  EXPECT_EQ(thrown<std::runtime_error>([&] { stream.run(fail); }), "the first error");
  const auto later = [&] { stream.run([&] { ran = true; }); };
  EXPECT_EQ(thrown<std::runtime_error>(later), "the first error");
  EXPECT_FALSE(ran);
}

// The waiting closures would take ten seconds together; the destructor comes long before.
TEST(StreamTest, TheDestructorWaitsForTheRunningClosureAndDropsTheOthers) {
  std::promise<void> started;
  std::atomic<bool> first_ended{false};
  auto held = std::make_shared<int>(0);
  const std::weak_ptr<int> watched = held;
  Event running, last;
  {
    Stream stream("closing", Kind::kWorker);
    running = stream.run([&] {
      started.set_value();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      first_ended = true;
    });
    for (int i = 0; i < 10'000; ++i) {
      last = stream.run([held] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); });
    }
    held.reset();
    started.get_future().wait();
  }
  EXPECT_TRUE(first_ended);
  EXPECT_NO_THROW(running.wait());
  EXPECT_EQ(error_of(last), "the stream was closed");
  EXPECT_TRUE(watched.expired());
}

TEST(StreamTest, WhatAClosureHoldsIsGoneWhenItsEventIsDone) {
  Stream stream("held", Kind::kWorker);
  for (int i = 0; i < 200; ++i) {
    auto held = std::make_shared<int>(i);
    const std::weak_ptr<int> watched = held;
    const Event event = stream.run([held = std::move(held)] {});
    event.wait();
    EXPECT_TRUE(watched.expired());
  }
}

}  // namespace
}  // namespace tessera::comm
