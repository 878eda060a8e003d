// Thread runners as an engine would bring them: bodies one after another, all on threads of their
// own, or held back at a gate so that a test can look while a call is running.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "fusedmoe/execution.h"

namespace fusedmoe::test {

// Fork-join. Sequential: in descending order on the caller's thread, which deadlocks as soon as
// one body waits for another. Otherwise each body on a thread of its own; with `gang` that is
// promised. Any number of threads may run it at once.
class TestRunner {
 public:
  enum class Kind { sequential, threads, gang };

  TestRunner(Kind kind, int num_threads) : kind_(kind) {
    view_.run = [](void* self, int count, void (*body)(void*, int), void* argument) {
      static_cast<TestRunner*>(self)->run(count, body, argument);
    };
    view_.self = this;
    view_.num_threads = num_threads;
    view_.gang = kind == Kind::gang;
  }
  TestRunner(const TestRunner&) = delete;
  TestRunner& operator=(const TestRunner&) = delete;
  virtual ~TestRunner() = default;

  const ThreadRunner* view() const { return &view_; }
  int runs() const { return runs_; }
  int most_bodies() const { return most_bodies_; }

 protected:
  virtual void run(int count, void (*body)(void*, int), void* argument) {
    ++runs_;
    for (int most = most_bodies_; most < count;) {
      if (most_bodies_.compare_exchange_weak(most, count)) break;
    }
    if (kind_ == Kind::sequential) {
      for (int i = count - 1; i >= 0; --i) body(argument, i);
      return;
    }
    std::vector<std::thread> threads;
    for (int i = 1; i < count; ++i) threads.emplace_back(body, argument, i);
    body(argument, 0);
    for (std::thread& thread : threads) thread.join();
  }

 private:
  ThreadRunner view_;
  Kind kind_;
  std::atomic<int> runs_ = 0;
  std::atomic<int> most_bodies_ = 0;
};

// The first run waits until open(): the call is then known to be in the middle of its work.
class GateRunner final : public TestRunner {
 public:
  GateRunner() : TestRunner(Kind::sequential, 2) {}
  void wait_until_running() {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(60), [&] { return running_; })) {
      ADD_FAILURE() << "the call never asked its runner: too little work for two threads?";
    }
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  void run(int count, void (*body)(void*, int), void* argument) override {
    {
      std::unique_lock lock(mutex_);
      running_ = true;
      changed_.notify_all();
      changed_.wait(lock, [&] { return open_; });
    }
    TestRunner::run(count, body, argument);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool running_ = false;
  bool open_ = false;
};

}  // namespace fusedmoe::test
