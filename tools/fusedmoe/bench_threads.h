// A few plain threads for the parts of bench that are not the library: random fills and probes.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace fusedmoe::tool {

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// body(index) for index in [0, threads), all started together. Returns the seconds from the common
// start to the last end. Bodies do not throw.
template <class Body>
double run_together(int threads, const Body& body) {
  std::atomic<int> waiting{threads - 1};
  std::atomic<bool> go{false};
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) {
    others.emplace_back([&, i] {
      waiting.fetch_sub(1);
      while (!go.load(std::memory_order_acquire)) std::this_thread::yield();
      body(i);
    });
  }
  while (waiting.load() > 0) std::this_thread::yield();
  const auto start = std::chrono::steady_clock::now();
  go.store(true, std::memory_order_release);
  body(0);
  for (std::thread& thread : others) thread.join();
  return seconds_since(start);
}

}  // namespace fusedmoe::tool
