// A few plain threads for the parts of bench that are not the library: random fills and probes.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace fusedmoe::tool {

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Keeps the calling thread on one of the CPUs that it may use, until the end of the scope. Threads
// that live for milliseconds otherwise share a CPU while another idles: the scheduler would spread
// them later, and a probe of 2 threads then finds half the peak.
class PinnedToCpu {
 public:
  // Does nothing when it is not permitted, or when there are more CPUs than a mask holds.
  explicit PinnedToCpu(int index) {
    CPU_ZERO(&before_);
    if (sched_getaffinity(0, sizeof(before_), &before_) != 0) return;
    int left = index % CPU_COUNT(&before_);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &before_) == 0 || left-- > 0) continue;
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      pinned_ = sched_setaffinity(0, sizeof(one), &one) == 0;
      return;
    }
  }
  PinnedToCpu(const PinnedToCpu&) = delete;
  PinnedToCpu& operator=(const PinnedToCpu&) = delete;
  ~PinnedToCpu() {
    if (pinned_) sched_setaffinity(0, sizeof(before_), &before_);
  }

 private:
  cpu_set_t before_;
  bool pinned_ = false;
};

// body(index) for index in [0, threads), all started together, each on a CPU of its own while there
// are enough. Returns the seconds from the common start to the last end. Bodies do not throw.
template <class Body>
double run_together(int threads, const Body& body) {
  std::atomic<int> waiting{threads - 1};
  std::atomic<bool> go{false};
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) {
    others.emplace_back([&, i] {
      const PinnedToCpu pinned(i);
      waiting.fetch_sub(1);
      while (!go.load(std::memory_order_acquire)) std::this_thread::yield();
      body(i);
    });
  }
  const PinnedToCpu pinned(0);
  while (waiting.load() > 0) std::this_thread::yield();
  const auto start = std::chrono::steady_clock::now();
  go.store(true, std::memory_order_release);
  body(0);
  for (std::thread& thread : others) thread.join();
  return seconds_since(start);
}

}  // namespace fusedmoe::tool
