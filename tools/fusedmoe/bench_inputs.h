// Hidden states and routings for the steps of bench: random, prepared outside the timed part.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "bench_floor.h"
#include "bench_layers.h"

namespace fusedmoe::tool {

// One call's router choice.
struct Routing {
  std::vector<std::int32_t> topk_ids;  // [num_tokens, top_k], distinct within a token
  std::vector<float> topk_weights;     // [num_tokens, top_k], sum 1 per token
  Work work;
};

class BenchInputs {
 public:
  BenchInputs(const BenchSetup& setup, std::int64_t num_tokens, std::int64_t num_layers);

  ConstMatrixView hidden() const;
  ConstMatrixView topk_ids(const Routing& routing) const;
  ConstMatrixView topk_weights(const Routing& routing) const;
  // Differs from layer to layer and from step to step. A step takes the routings of one set, each
  // once, in rotating order: so with 8 layers or more all steps move the same bytes.
  const Routing& routing(std::int64_t step, std::int64_t layer) const;
  // Its place among routings().
  std::int64_t routing_index(std::int64_t step, std::int64_t layer) const;
  const std::vector<Routing>& routings() const { return routings_; }

 private:
  std::int64_t num_tokens_;
  std::int64_t num_layers_;
  std::int64_t top_k_;
  std::int64_t hidden_size_;
  DType dtype_;
  std::vector<std::uint64_t> hidden_;
  std::vector<Routing> routings_;  // sets of num_layers
};

}  // namespace fusedmoe::tool
