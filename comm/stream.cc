#include "comm/stream.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace tessera::comm {

struct Event::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr error;

  void finish(std::exception_ptr e) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      done = true;
      error = std::move(e);
    }
    changed.notify_all();
  }
};

bool Event::done() const {
  if (!state_) return true;
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->done;
}

void Event::wait() const {
  if (!state_) return;
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->done; });
  if (state_->error) std::rethrow_exception(state_->error);
}

struct Stream::Worker {
  struct Job {
    std::function<void()> closure;
    std::shared_ptr<Event::State> state;
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Job> jobs;
  bool stop = false;
  std::thread thread;

  void loop() {
    std::exception_ptr broken;
    for (;;) {
      Job job;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return stop || !jobs.empty(); });
        if (stop) return;
        job = std::move(jobs.front());
        jobs.pop_front();
      }
      if (!broken) {
        try {
          job.closure();
        } catch (...) {
          broken = std::current_exception();
        }
      }
      job.closure = nullptr;  // Its tensors go before the event says that it is done.
      job.state->finish(broken);
    }
  }
};

Stream::Stream(std::string name, Kind kind) {
  if (kind == Kind::kInline) return;
  worker_ = std::make_unique<Worker>();
  worker_->thread = std::thread([worker = worker_.get(), name = name.substr(0, 15)] {
    pthread_setname_np(pthread_self(), name.c_str());
    worker->loop();
  });
}

Stream::~Stream() {
  if (!worker_) return;
  std::deque<Worker::Job> dropped;
  {
    std::lock_guard<std::mutex> lock(worker_->mutex);
    worker_->stop = true;
    dropped.swap(worker_->jobs);
  }
  worker_->changed.notify_all();
  worker_->thread.join();
  for (auto& job : dropped) {
    job.state->finish(std::make_exception_ptr(std::runtime_error("the stream was closed")));
  }
}

Event Stream::run(std::function<void()> closure) {
  Event event;
  if (!worker_) {
    if (broken_) std::rethrow_exception(broken_);
    try {
      closure();
    } catch (...) {
      broken_ = std::current_exception();
      throw;
    }
    return event;
  }
  event.state_ = std::make_shared<Event::State>();
  {
    std::lock_guard<std::mutex> lock(worker_->mutex);
    worker_->jobs.push_back({std::move(closure), event.state_});
  }
  worker_->changed.notify_one();
  return event;
}

}  // namespace tessera::comm
