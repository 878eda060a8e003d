// Ranks of expert parallelism made from one whole layer (bf16, dense): their weights, their plans,
// and the check that what they compute adds up.
#pragma once

#include "case_layer.h"

namespace fusedmoe::cases {

using Map = std::vector<std::int32_t>;

inline std::int64_t num_local(const Map& map) {
  return std::count_if(map.begin(), map.end(), [](std::int32_t local) { return local >= 0; });
}

// The experts of a rank, in order of their local ids, out of the whole stack.
inline ExpertWeights of_rank(const ExpertWeights& whole, const Map& map) {
  ExpertWeights result = whole;
  const auto slice = [](WeightTensor tensor, std::int64_t expert) {
    tensor.data =
        static_cast<const std::byte*>(tensor.data) + expert * tensor.outputs * tensor.inputs * 2;
    tensor.experts = 1;
    return tensor;
  };
  for (WeightTensor* tensor : {&result.w13, &result.w2}) {
    tensor->data = nullptr;
    tensor->experts = num_local(map);
  }
  result.source = [whole, map, slice](std::int64_t local) {
    const auto global = std::find(map.begin(), map.end(), local) - map.begin();
    ExpertWeights one;
    one.w13 = slice(whole.w13, global);
    one.w2 = slice(whole.w2, global);
    return one;
  };
  return result;
}

inline FusedMoe rank_plan(const MoeConfig& config, const Weights& weights, const ExpertMap& map) {
  PlanOptions options = with_isa("", 2);
  options.expert_map = map;
  return FusedMoe::create(config, of_rank(weights.view(), map.resolve(config.num_experts)),
                          options);
}

// Runs every rank, checks each against the oracle with its map, and the sum against the whole.
inline void expect_sum_is_whole(const MoeConfig& config, const Weights& weights, Call call,
                                const std::vector<ExpertMap>& ranks) {
  const std::int64_t m = call.hidden.rows();
  const std::int64_t h_size = config.hidden_size;
  std::vector<double> sum(m * h_size, 0.0);
  std::int64_t experts = 0;
  for (const ExpertMap& rank : ranks) {
    const Map map = rank.resolve(config.num_experts);
    const FusedMoe plan = rank_plan(config, weights, rank);
    ASSERT_EQ(plan.num_local_experts(), num_local(map));
    experts += plan.num_local_experts();
    call.apply(plan);
    EXPECT_TRUE(is_right(config, of_rank(weights.view(), map), call, map));
    for (std::int64_t i = 0; i < m * h_size; ++i) {
      sum[i] += call.output.get(i / h_size, i % h_size);
    }
  }
  ASSERT_EQ(experts, config.num_experts);
  call.output.fill([&](std::int64_t t, std::int64_t h) { return sum[t * h_size + h]; });
  EXPECT_TRUE(is_right(config, weights.view(), call));
}

}  // namespace fusedmoe::cases
