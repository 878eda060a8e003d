// The layers that bench runs: plans with random weights, as many as it takes that no cache holds
// what one step reads.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench_random.h"
#include "format_spec.h"
#include "fusedmoe/fused_moe.h"
#include "model_shapes.h"

namespace fusedmoe::tool {

// Long enough for a median that repeats within 2 % on a quiet machine.
inline constexpr double kDefaultSeconds = 1.5;

struct BenchSetup {
  ModelShape shape;  // its config with the dtype that was asked for
  FormatSpec format;
  PlanOptions options;               // with the shape's expert map
  double seconds = kDefaultSeconds;  // to time each row
  int threads = 1;  // for probes and random numbers; plans have options.max_threads
};

// The narrowest operands that multiply the weights exactly, in the mode that was asked for: what
// the machine's best peak is measured with.
DType narrowest_operands(const BenchSetup& setup);

// Weights of one layer, made up one expert at a time or held as whole stacks. Views point into this
// object.
class RandomExperts {
 public:
  // experts: how many it holds memory for: 1 for as_source, num_local_experts for stacks.
  RandomExperts(const BenchSetup& setup, std::int64_t experts);
  // Fresh random numbers for each expert; the weights depend on the seed only.
  ExpertWeights as_source(std::uint64_t seed);
  ExpertWeights stacks(std::uint64_t seed);
  // Spent on random numbers, not on packing.
  double fill_seconds() const { return fill_seconds_; }

 private:
  ExpertWeights view(std::int64_t experts, bool with_data);
  void fill(std::uint64_t seed);

  const BenchSetup& setup_;
  std::int64_t experts_;
  RandomStack w13_, w2_;
  std::vector<std::uint64_t> w13_bias_, w2_bias_;  // f32
  double fill_seconds_ = 0;
};

struct BenchLayers {
  std::vector<FusedMoe> plans;
  std::string why;  // this many: for people
};

// What the runs to come will need of their layers.
struct LayerNeeds {
  std::optional<int> layers;           // as asked for; unset = choose
  std::int64_t fewest_tokens = 1;      // of one apply
  std::int64_t copies = 1;             // of the weights: ours, and one for each peer
  std::int64_t tokens_of_scratch = 0;  // 0 = layers have no workspace of their own
};

// Throws what create throws, and out_of_memory before it starts when needs.layers do not fit.
BenchLayers build_layers(const BenchSetup& setup, const LayerNeeds& needs);

}  // namespace fusedmoe::tool
