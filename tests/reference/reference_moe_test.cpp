// The oracle against a layer worked out by hand, in every way to store the same weights.
#include "reference/reference_moe.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "reference/tolerance.h"

namespace fusedmoe {
namespace {

// Two experts, hidden_size 2, intermediate_size 1, silu, one token x = [1, 2].
//
//   expert 0: gate row [ln 3, 0], up row [1, 1], no biases, w2 = [[1], [2]]
//     g = ln 3, sigmoid(g) = 3/4, silu = 0.75 * 1.0986122887 = 0.8239592165
//     u = 1 + 2 = 3, act = 2.4718776496, y = [2.4718776496, 4.9437552991]
//   expert 1: gate row [0, 0] with bias -ln 3, up row [0, 1], w2 = [[-2], [4]] with bias [1, 0]
//     g = -ln 3, sigmoid(g) = 1/4, silu = -0.2746530722
//     u = 2, act = -0.5493061443, y = [2.0986122887, -2.1972245773]
//   weights 0.5 for expert 0, 0.25 for expert 1:
//     0.5 * 2.4718776496 + 0.25 * 2.0986122887    = 1.7605918970
//     0.5 * 4.9437552991 + 0.25 * (-2.1972245773) = 1.9225715052
class HandWorked : public testing::Test {
 protected:
  HandWorked() {
    config.hidden_size = 2;
    config.intermediate_size = 1;
    config.num_experts = 2;
    config.top_k = 2;
    config.dtype = DType::f32;
    const WeightTensor f32{.format = WeightFormat::f32, .experts = 2};
    weights.w13 = f32;
    weights.w13.data = w13.data();
    weights.w13.outputs = weights.w13.inputs = 2;
    weights.w2 = f32;
    weights.w2.data = w2.data();
    weights.w2.outputs = 2;
    weights.w2.inputs = 1;
    weights.w13_bias = {b13.data(), DType::f32, 2, 2};
    weights.w2_bias = {b2.data(), DType::f32, 2, 2};
  }
  std::vector<double> run(std::vector<std::int32_t> ids = {0, 1},
                          std::vector<std::int32_t> map = {}) {
    return reference_moe(config, weights, {x.data(), DType::f32, 1, 2},
                         {router.data(), DType::f32, 1, 2}, {ids.data(), DType::i32, 1, 2}, map);
  }
  static void expect(const std::vector<double>& got, double first, double second) {
    ASSERT_EQ(got.size(), 2U);
    EXPECT_NEAR(got[0], first, 1e-6);
    EXPECT_NEAR(got[1], second, 1e-6);
  }

  static constexpr float kLn3 = 1.0986122887F;
  MoeConfig config;
  ExpertWeights weights;
  std::vector<float> x = {1, 2}, router = {0.5F, 0.25F};
  // [expert][gate row, up row][hidden]
  std::vector<float> w13 = {kLn3, 0, 1, 1, 0, 0, 0, 1};
  std::vector<float> b13 = {0, 0, -kLn3, 0};
  std::vector<float> w2 = {1, 2, -2, 4};
  std::vector<float> b2 = {0, 0, 1, 0};
};

TEST_F(HandWorked, Example) { expect(run(), 1.7605918970, 1.9225715052); }

TEST_F(HandWorked, IdsDecide) {
  expect(run({-1, 0}), 0.25 * 2.4718776496, 0.25 * 4.9437552991);
  expect(run({1, -1}), 0.5 * 2.0986122887, 0.5 * -2.1972245773);
  expect(run({0, 0}), 0.75 * 2.4718776496, 0.75 * 4.9437552991);
  expect(run({-1, -1}), 0, 0);
  expect(run({0, 1}, {1, 0}),  // global 0 is local 1
         0.5 * 2.0986122887 + 0.25 * 2.4718776496, 0.5 * -2.1972245773 + 0.25 * 4.9437552991);
  expect(run({0, 1}, {-1, 1}), 0.25 * 2.0986122887, 0.25 * -2.1972245773);
}

TEST_F(HandWorked, LayoutsAndOrders) {
  // One gate and one up row: interleaved is the same memory.
  config.gate_up_layout = GateUpLayout::interleaved;
  expect(run(), 1.7605918970, 1.9225715052);
  config.gate_up_order = GateUpOrder::up_gate;
  w13 = {1, 1, kLn3, 0, 0, 1, 0, 0};
  b13 = {0, 0, 0, -kLn3};
  expect(run(), 1.7605918970, 1.9225715052);
  // [E, K, N]: columns are outputs.
  w13 = {1, kLn3, 1, 0, 0, 0, 1, 0};
  weights.w13.layout = WeightLayout::kn;
  expect(run(), 1.7605918970, 1.9225715052);
}

TEST_F(HandWorked, TwoChannelsInHalvesAndInterleaved) {
  // The same expert twice, as two channels with w2 split in halves: the same result.
  config.intermediate_size = 2;
  weights.w13.outputs = 4;
  weights.w2.inputs = 2;
  weights.w13_bias.size = 4;
  w2 = {0.5F, 0.5F, 1, 1, -1, -1, 2, 2};
  weights.w2.data = w2.data();
  w13 = {kLn3, 0, kLn3, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 0, 1};  // gate, gate, up, up
  b13 = {0, 0, 0, 0, -kLn3, -kLn3, 0, 0};
  weights.w13.data = w13.data();
  weights.w13_bias.data = b13.data();
  expect(run(), 1.7605918970, 1.9225715052);
  config.gate_up_layout = GateUpLayout::interleaved;
  w13 = {kLn3, 0, 1, 1, kLn3, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1};
  b13 = {0, 0, 0, 0, -kLn3, 0, -kLn3, 0};
  expect(run(), 1.7605918970, 1.9225715052);
}

TEST_F(HandWorked, GateAndUpApartAndOneExpertAtATime) {
  const std::vector<float> gate = {kLn3, 0, 0, 0}, up = {1, 1, 0, 1};
  weights.w13.data = gate.data();
  weights.w13.outputs = 1;
  weights.w13_up = weights.w13;
  weights.w13_up.data = up.data();
  expect(run(), 1.7605918970, 1.9225715052);
  ExpertWeights whole = weights;
  weights.source = [whole](std::int64_t e) {
    ExpertWeights one = whole;
    for (WeightTensor* tensor : {&one.w13, &one.w13_up, &one.w2}) {
      tensor->data = static_cast<const float*>(tensor->data) + e * 2;
      tensor->experts = 1;
    }
    for (BiasTensor* bias : {&one.w13_bias, &one.w2_bias}) {
      bias->data = static_cast<const float*>(bias->data) + e * 2;
      bias->experts = 1;
    }
    return one;
  };
  weights.w13.data = weights.w13_up.data = weights.w2.data = nullptr;
  expect(run(), 1.7605918970, 1.9225715052);
}

TEST_F(HandWorked, RouterWeightOnTheInput) {
  // Expert 1 alone, weight 0.25 before the bias: g = 0 * 0.25 - ln 3, u = 2 * 0.25 = 0.5,
  // act = -0.2746530722 * 0.5 = -0.1373265361, y = [0.2746530722 + 1, -0.5493061443].
  config.apply_router_weight_on_input = true;
  expect(run({-1, 1}), 1.2746530722, -0.5493061443);
}

TEST(Compare, ErrorsAreWhatTheyAreCalled) {
  const std::vector<float> got = {3, 4, 0, 0};
  const ConstMatrixView view(got.data(), DType::f32, 2, 2);
  const std::vector<double> expected = {3, 4, 0, 5};
  const Errors errors = compare(view, expected);
  EXPECT_NEAR(errors.rel_l2, 5 / std::sqrt(50.0), 1e-12);
  EXPECT_NEAR(errors.max_error, 1.0, 1e-12);
  EXPECT_FALSE(within(errors, {0.5, 2}));
  EXPECT_FALSE(within(errors, {2, 0.5}));
  EXPECT_TRUE(within(errors, {1, 1}));
  EXPECT_TRUE(within(compare(view, std::vector<double>{3, 4, 0, 0}), {0, 0}));
}

TEST(Compare, NanAndInfinityMustAgree) {
  const float nan = std::nanf(""), inf = INFINITY;
  const std::vector<float> got = {nan, inf, 1};
  const ConstMatrixView view(got.data(), DType::f32, 1, 3);
  EXPECT_TRUE(within(compare(view, std::vector<double>{nan, inf, 1}), {0, 0}));
  for (const std::vector<double>& other :
       {std::vector<double>{0, inf, 1}, {nan, 0, 1}, {nan, -inf, 1}, {nan, inf, nan}}) {
    EXPECT_FALSE(within(compare(view, other), {1e9, 1e9}));
  }
}

}  // namespace
}  // namespace fusedmoe
