// Threads that an engine would bring, for random cases: they make no more promises than
// fusedmoe::ThreadRunner asks for.
#pragma once

#include <thread>
#include <vector>

#include "fusedmoe/execution.h"
#include "random_case.h"

namespace fusedmoe::tool {

class CaseRunner {
 public:
  // one_by_one: fork-join bodies run one after the other, the last first, instead of on threads.
  CaseRunner(RunnerKind kind, int num_threads, bool one_by_one) : kind_(kind) {
    runner_.run = one_by_one && kind == RunnerKind::fork_join ? &run_backwards : &run_on_threads;
    runner_.self = this;
    runner_.num_threads = num_threads;
    runner_.gang = kind == RunnerKind::gang;
  }
  CaseRunner(const CaseRunner&) = delete;
  CaseRunner& operator=(const CaseRunner&) = delete;

  // Null when the library's own threads are to be used.
  const ThreadRunner* get() const { return kind_ == RunnerKind::none ? nullptr : &runner_; }

 private:
  static void run_backwards(void*, int count, void (*body)(void*, int), void* argument) {
    for (int i = count - 1; i >= 0; --i) body(argument, i);
  }
  static void run_on_threads(void*, int count, void (*body)(void*, int), void* argument) {
    std::vector<std::jthread> threads;
    for (int i = 1; i < count; ++i) threads.emplace_back(body, argument, i);
    body(argument, 0);
  }

  RunnerKind kind_;
  ThreadRunner runner_;
};

}  // namespace fusedmoe::tool
