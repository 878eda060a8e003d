// An engine's own threads, and what a single call of apply brings with it: threads, a stream, an
// expert map.
#pragma once

#include <cstdint>
#include <span>

namespace fusedmoe {

// An engine's own threads. `run` calls body(argument, i) once for each i in [0, count), on any
// threads, and returns when all have returned. Bodies never throw. It is called on the thread that
// calls the plan: on several at once when several do.
struct ThreadRunner {
  void (*run)(void* self, int count, void (*body)(void* argument, int index),
              void* argument) = nullptr;
  void* self = nullptr;
  int num_threads = 1;  // how many bodies it can keep busy; the plan's max_threads caps it
  // A promise that all bodies of one run are executed at the same time, so that barriers inside
  // are safe. Then a call is one run; otherwise one run per stage.
  bool gang = false;
};

struct ApplyContext {
  // CPU; null = PlanOptions::runner, or without that the library's own threads.
  const ThreadRunner* runner = nullptr;
  void* queue = nullptr;  // a GPU's stream or queue
  // Wins over the plan's map for this call: [num_experts], local id or -1. It must have as many
  // local experts as the plan. Empty = the plan's map.
  std::span<const std::int32_t> expert_map = {};
};

}  // namespace fusedmoe
