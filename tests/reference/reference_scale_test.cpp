// reference_scale: the size of a result that happens to cancel.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "reference/random_layer.h"
#include "reference/reference_moe.h"
#include "reference/tolerance.h"

namespace fusedmoe {
namespace {

// relu2 without a gate: x = w13 * hidden, output = weight * w2 * x^2, one number at a time.
TEST(ReferenceScale, IsByHandWhatTheTermsAre) {
  MoeConfig config{.hidden_size = 2, .intermediate_size = 1, .num_experts = 1, .top_k = 1};
  config.activation.kind = Activation::relu2;
  config.dtype = DType::f32;
  const float w13[] = {3.0F, -3.0F};
  const float w2[] = {2.0F, -1.0F};
  ExpertWeights weights;
  weights.w13 = {.data = w13, .format = WeightFormat::f32, .experts = 1, .outputs = 1, .inputs = 2};
  weights.w2 = {.data = w2, .format = WeightFormat::f32, .experts = 1, .outputs = 2, .inputs = 1};
  const float hidden[] = {1.0F, 1.0F};  // 3 - 3 = 0
  const float router = 0.5F;
  const std::int32_t id = 0;
  const std::vector<double> expected =
      reference_moe(config, weights, {hidden, DType::f32, 1, 2}, {&router, DType::f32, 1, 1},
                    {&id, DType::i32, 1, 1});
  EXPECT_EQ(expected, (std::vector<double>{0, 0}));
  const std::vector<double> scale =
      reference_scale(config, weights, {hidden, DType::f32, 1, 2}, {&router, DType::f32, 1, 1},
                      {&id, DType::i32, 1, 1});
  // sqrt(9 + 9)^2 = 18
  EXPECT_NEAR(scale[0], 18.0, 1e-12);
  EXPECT_NEAR(scale[1], 9.0, 1e-12);

  // An error of 1e-5 is large against nothing, and small against 18.
  const float got[] = {1e-5F, 0.0F};
  EXPECT_EQ(compare({got, DType::f32, 1, 2}, expected).rel_l2, INFINITY);
  const Errors errors = compare({got, DType::f32, 1, 2}, expected, scale);
  EXPECT_LT(errors.rel_l2, 1e-6);
  EXPECT_LT(errors.max_error, 1e-6);
}

TEST(ReferenceScale, IsAboutTheResultWhereThereAreManyTerms) {
  for (const Activation kind : {Activation::silu, Activation::gelu, Activation::gelu_tanh,
                                Activation::swigluoai, Activation::swiglustep, Activation::relu2}) {
    MoeConfig config{.hidden_size = 96, .intermediate_size = 80, .num_experts = 4, .top_k = 2};
    config.activation.kind = kind;
    config.dtype = DType::f32;
    const RandomWeights weights(config, 4, {.w13_bias = true}, 5);
    const RandomInput input(config, {.num_tokens = 20}, 6);
    const auto norm = [](const std::vector<double>& values) {
      double sum = 0;
      for (const double value : values) sum += value * value;
      return std::sqrt(sum);
    };
    const double ratio = norm(reference_scale(config, weights.view(), input.hidden(),
                                              input.topk_weights(), input.topk_ids())) /
                         norm(reference_moe(config, weights.view(), input.hidden(),
                                            input.topk_weights(), input.topk_ids()));
    EXPECT_GT(ratio, 0.3) << to_string(kind);
    EXPECT_LT(ratio, 3.0) << to_string(kind);
  }
}

}  // namespace
}  // namespace fusedmoe
