// The layers that bench runs: plans with random weights, as many as it takes that no cache holds
// what one step reads.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fusedmoe/fused_moe.h"
#include "model_shapes.h"

namespace fusedmoe::tool {

// Long enough for a median that repeats within 2 % on a quiet machine.
inline constexpr double kDefaultSeconds = 1.5;

struct BenchSetup {
  ModelShape shape;  // its config with the dtype that was asked for
  WeightFormat format = WeightFormat::bf16;
  PlanOptions options;               // with the shape's expert map
  double seconds = kDefaultSeconds;  // to time each row
  int threads = 1;  // for probes and random numbers; plans have options.max_threads
};

// Random floats of the given format, f32, f16 or bf16: signed, of magnitudes 2^-7 to 2^-5, which
// keeps the outputs of layers of any size near 1. About 8 GB/s per thread.
void fill_random(void* data, std::int64_t count, DType dtype, std::uint64_t seed, int threads);

// Weights of one layer, made up one expert at a time or held as whole stacks. The format is one of
// f32, f16, bf16. Views point into this object.
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
  std::vector<std::uint64_t> w13_, w2_, w13_bias_, w2_bias_;
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
