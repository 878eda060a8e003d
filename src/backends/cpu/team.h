// The threads of one call: the engine's runner, or the library's pool, or the caller alone.
#pragma once

#include <algorithm>

#include "backends/cpu/thread_pool.h"
#include "fusedmoe/execution.h"

namespace fusedmoe::cpu {

class Team {
 public:
  // Holds the pool from here on, unless a runner is given or another call has it.
  Team(const ThreadRunner* runner, int max_threads) : runner_(runner) {
    if (runner != nullptr) {
      size_ = std::min(runner->num_threads, max_threads);
    } else {
      ThreadPool& pool = ThreadPool::instance();
      const int available = std::min(max_threads, pool.size());
      if (available > 1 && pool.try_acquire()) {
        acquired_ = true;
        size_ = std::min(available, pool.size());
      }
    }
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team() {
    if (acquired_) ThreadPool::instance().release();
  }

  int size() const { return size_; }
  // All bodies of a run execute at the same time: barriers inside are safe.
  bool gang() const { return runner_ == nullptr || runner_->gang; }

  // body(index) for index in [0, count), count <= size().
  template <class Body>
  void run(int count, const Body& body) const {
    const auto call = [](void* argument, int index) {
      (*static_cast<const Body*>(argument))(index);
    };
    void* argument = const_cast<void*>(static_cast<const void*>(&body));
    if (count == 1) {
      body(0);
    } else if (runner_ != nullptr) {
      runner_->run(runner_->self, count, call, argument);
    } else {
      ThreadPool::instance().run(count, call, argument);
    }
  }

 private:
  const ThreadRunner* runner_;
  int size_ = 1;
  bool acquired_ = false;
};

}  // namespace fusedmoe::cpu
