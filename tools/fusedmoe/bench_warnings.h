// What makes the figures of bench doubtful, and the cure.
#pragma once

#include <string>
#include <vector>

#include "bench_step.h"

namespace fusedmoe::tool {

// Of one model and number of tokens.
struct WarningFacts {
  std::string where;     // "tiny, 8 tokens"
  double drift = 0;      // of the probes around the row
  double spread = 0;     // the median step over the fastest: the largest of all workspace modes
  double others = 0;     // share of the CPUs' time that other programs took
  std::string unparked;  // a peer whose threads, or ours beside it, still ran in the other's turn
  double caches = 0;     // what a step reads, in last-level caches
  int threads = 1;
};
WarningFacts warning_facts(const BenchSetup& setup, const StepResult& result);

// For people, each with the worst row and the cure; without "warning:" in front. Empty when nothing
// is doubtful.
std::vector<std::string> warnings(const std::vector<WarningFacts>& rows);

}  // namespace fusedmoe::tool
