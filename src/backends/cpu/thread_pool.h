// The library's own threads, one team for the process: started when a plan without a runner is
// created, parked between calls. A plan with a runner in its options never touches them.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace fusedmoe::cpu {

// Meeting point of the threads of one call; spins briefly, then sleeps.
class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  void wait() noexcept;

 private:
  const int count_;
  std::atomic<int> arrived_{0};
  std::atomic<std::uint32_t> phase_{0};
};

class ThreadPool {
 public:
  // Lives until the process ends.
  static ThreadPool& instance();

  // Makes sure that run() can use `threads`, the caller's included. Throws out_of_memory when the
  // system starts no more. Safe from any thread.
  void ensure(int threads);

  // The team serves one call at a time; a call that comes while it is taken runs on its caller's
  // thread alone, with the same bits, instead of waiting behind work that has all cores already.
  bool try_acquire() noexcept { return !taken_.exchange(true, std::memory_order_acquire); }
  void release() noexcept { taken_.store(false, std::memory_order_release); }
  // Threads that run() can use; 1 in a process that was forked after they were started.
  int size() const noexcept { return size_.load(std::memory_order_acquire); }

  // body(argument, i) for i in [0, count), all at the same time, 0 on the caller's thread;
  // count <= size(), and the team must be acquired. Bodies do not throw.
  void run(int count, void (*body)(void* argument, int index), void* argument) noexcept;

 private:
  ThreadPool() = default;
  void worker(int index) noexcept;
  static void before_fork() noexcept;
  static void after_fork_in_parent() noexcept;
  static void after_fork_in_child() noexcept;

  std::mutex mutex_;  // ensure()
  std::atomic<int> size_{1};
  std::atomic<bool> taken_{false};
  // Number of the current job << 16 | its count. A worker below count owes it a call.
  std::atomic<std::uint64_t> job_{0};
  std::atomic<int> remaining_{0};
  // Written before job_, read by those that owe a call.
  void (*body_)(void*, int) = nullptr;
  void* argument_ = nullptr;
};

}  // namespace fusedmoe::cpu
