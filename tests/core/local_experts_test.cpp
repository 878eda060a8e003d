// local_experts: one rank's experts out of weights that hold all, by any map, from stacks and from
// sources, give the bits of the rank's own stacks.
#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "formats/quantize.h"
#include "fusedmoe/fusedmoe.h"
#include "support/layer.h"

namespace fusedmoe {
namespace {

using test::Layer;

// The sum over ranks, in fp32, of what each rank's plan gives.
std::vector<float> sum_of_ranks(const Layer& layer, const ExpertWeights& all,
                                const std::vector<std::vector<std::int32_t>>& maps,
                                const RandomInput& input) {
  std::vector<float> sum(input.hidden().rows * layer.config.hidden_size);
  for (const std::vector<std::int32_t>& map : maps) {
    PlanOptions options;
    options.expert_map = ExpertMap::explicit_map(map);
    const FusedMoe plan = FusedMoe::create(layer.config, local_experts(all, map), options);
    std::vector<float> output(sum.size(), -1.0F);
    plan.apply({output.data(), DType::f32, input.hidden().rows, layer.config.hidden_size},
               input.hidden(), input.topk_weights(), input.topk_ids());
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += output[i];
  }
  return sum;
}

TEST(LocalExperts, ZeroPointsAreStated) {
  Layer layer(test::odd_config(DType::f32));
  const RandomInput input = layer.input(3);
  ExpertWeights all = layer.weights.view();
  std::vector<QuantizedStack> stacks;
  for (WeightTensor* tensor : {&all.w13, &all.w2}) {
    const std::vector<float> values = dequantize(*tensor);
    tensor->format = WeightFormat::int4;
    tensor->layout = WeightLayout::nk;
    tensor->row_stride = tensor->expert_stride = 0;
    tensor->scales = default_scales(WeightFormat::int4);
    stacks.push_back(quantize(values, *tensor, {.zero_points = true}));
    *tensor = stacks.back().tensor;
  }
  std::vector<std::int32_t> identity(layer.config.num_experts);
  std::iota(identity.begin(), identity.end(), 0);
  std::vector<float> whole(input.hidden().rows * layer.config.hidden_size);
  FusedMoe::create(layer.config, all)
      .apply({whole.data(), DType::f32, input.hidden().rows, layer.config.hidden_size},
             input.hidden(), input.topk_weights(), input.topk_ids());
  EXPECT_EQ(sum_of_ranks(layer, all, {identity}, input), whole);
}

TEST(LocalExperts, RanksAddUpToTheWholeLayer) {
  const Layer layer(test::odd_config(DType::f32));
  const RandomInput input = layer.input(9);
  const std::int64_t experts = layer.config.num_experts;
  std::vector<std::int32_t> identity(experts);
  std::iota(identity.begin(), identity.end(), 0);
  const ExpertWeights stacks = layer.weights.view();
  const std::vector<float> whole = sum_of_ranks(layer, stacks, {identity}, input);

  // A source that takes global ids, as a checkpoint has.
  ExpertWeights sourced = stacks;
  sourced.source = [&](std::int64_t global) {
    std::vector<std::int32_t> only(experts, -1);
    only[global] = 0;
    return local_experts(stacks, only).source(0);
  };
  // Uneven ranks, and local ids that do not ascend with the global ones.
  std::vector<std::vector<std::int32_t>> maps(3, std::vector<std::int32_t>(experts, -1));
  maps[0][5] = 0;
  maps[0][1] = 1;
  for (std::int32_t local = 0; const std::int64_t global : {0, 2, 3, 4, 6}) {
    maps[1][global] = 4 - local++;
  }
  for (const ExpertWeights& all : {stacks, sourced}) {
    const std::vector<float> sum = sum_of_ranks(layer, all, maps, input);
    for (std::size_t i = 0; i < sum.size(); ++i) EXPECT_NEAR(sum[i], whole[i], 2e-5F) << i;
  }
}

TEST(LocalExperts, RefusesMapsThatDoNotFit) {
  const Layer layer(test::odd_config(DType::f32));
  const ExpertWeights all = layer.weights.view();
  ExpertWeights fewer = all;
  fewer.w2_bias.experts = 3;
  EXPECT_THROW((void)local_experts(fewer, std::vector<std::int32_t>(7, -1)), Error);
  const auto refused = [&](const std::vector<std::int32_t>& map, const char* text) {
    try {
      (void)local_experts(all, map);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  refused({0, 1}, "an entry for each of the 7 experts");
  refused({0, 1, 1, -1, -1, -1, -1}, "expert_map[2]");
  refused({0, 5, -1, -1, -1, -1, -1}, "expert_map[1]");
}

}  // namespace
}  // namespace fusedmoe
