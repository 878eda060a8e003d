#include "backends/cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <string>
#include <system_error>
#include <thread>

#include "backends/cpu/numa.h"
#include "fusedmoe/error.h"

namespace fusedmoe::cpu {
namespace {

// 25 us on Zen 4: longer than the gap between two layers' calls, short against the 60 us that a
// call takes when a parked thread has to be woken.
constexpr int kSpins = 1000;
// The one waited for may need this very core: with both threads on one, a call of 4 us took 61 us
// without yields, 15 with one after 100 spins, and 11 after 10, which cost 1 us on cores of their
// own.
constexpr int kSpinsPerYield = 100;

inline void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Until value != old: spins, then sleeps.
template <class T>
void wait_while_equal(const std::atomic<T>& value, T old) noexcept {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    if (i % kSpinsPerYield == kSpinsPerYield - 1) {
      sched_yield();
    } else {
      pause();
    }
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

void Barrier::wait() noexcept {
  if (count_ == 1) return;
  const std::uint32_t phase = phase_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1);  // sequentially consistent: notify looks for waiters after it
    phase_.notify_all();
  } else {
    wait_while_equal(phase_, phase);
  }
}

ThreadPool& ThreadPool::instance() {
  // Never destroyed: its threads may outlive the destructors of static objects.
  static ThreadPool* pool = [] {
    auto* created = new ThreadPool();
    pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
    return created;
  }();
  return *pool;
}

void ThreadPool::ensure(int threads) {
  const std::lock_guard lock(mutex_);
  while (size_.load() < threads) {
    const int index = size_.load();
    try {
      std::thread([this, index] { worker(index); }).detach();
    } catch (const std::system_error&) {
      throw Error(ErrorCode::out_of_memory,
                  "options.max_threads: expected to start " + std::to_string(threads) +
                      " threads, got " + std::to_string(index) +
                      " from the system; lower max_threads, or raise the limit");
    }
    size_.store(index + 1);
  }
}

void ThreadPool::worker(int index) noexcept {
  bind_thread(index);
  std::uint64_t seen = 0;
  for (;;) {
    wait_while_equal(job_, seen);
    seen = job_.load(std::memory_order_acquire);
    if (index >= static_cast<int>(seen & 0xffff)) continue;
    body_(argument_, index);
    if (remaining_.fetch_sub(1, std::memory_order_acq_rel) == 1) remaining_.notify_one();
  }
}

void ThreadPool::run(int count, void (*body)(void*, int), void* argument) noexcept {
  if (count > 1) {
    body_ = body;
    argument_ = argument;
    remaining_.store(count - 1, std::memory_order_relaxed);
    const std::uint64_t next = (job_.load(std::memory_order_relaxed) >> 16) + 1;
    job_.store(next << 16 | static_cast<std::uint64_t>(count));  // as in Barrier::wait
    job_.notify_all();
  }
  body(argument, 0);
  if (count > 1) {
    int left = remaining_.load(std::memory_order_acquire);
    while (left != 0) {
      wait_while_equal(remaining_, left);
      left = remaining_.load(std::memory_order_acquire);
    }
  }
}

// The mutex is held over a fork, so that the child finds it in a known state.
void ThreadPool::before_fork() noexcept { instance().mutex_.lock(); }
void ThreadPool::after_fork_in_parent() noexcept { instance().mutex_.unlock(); }
void ThreadPool::after_fork_in_child() noexcept {
  ThreadPool& pool = instance();
  pool.size_.store(1);  // the threads stayed with the parent; ensure() starts new ones
  pool.taken_.store(false);
  pool.job_.store(0);
  pool.remaining_.store(0);
  pool.mutex_.unlock();
}

}  // namespace fusedmoe::cpu
