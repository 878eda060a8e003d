// Routing against the fp64 oracle: sizes, dtypes, strides, rules, groups, and rows of NaN.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fusedmoe/routing.h"
#include "routing_oracle.h"

namespace fusedmoe {
namespace {

constexpr ScoreFunction kScores[] = {ScoreFunction::softmax, ScoreFunction::softmax_of_chosen,
                                     ScoreFunction::sigmoid, ScoreFunction::softplus_sqrt};
constexpr Renormalise kRules[] = {Renormalise::none, Renormalise::sum, Renormalise::sum_epsilon,
                                  Renormalise::max_sum_epsilon};
constexpr DType kFloats[] = {DType::f32, DType::f16, DType::bf16};
constexpr float kInfinity = std::numeric_limits<float>::infinity();

void expect_distinct_in_range(const std::vector<std::int64_t>& ids, std::int64_t num_experts) {
  std::vector<bool> seen(static_cast<std::size_t>(num_experts), false);
  for (const auto id : ids) {
    ASSERT_TRUE(id >= 0 && id < num_experts) << id;
    EXPECT_FALSE(seen[static_cast<std::size_t>(id)]) << id << " twice";
    seen[static_cast<std::size_t>(id)] = true;
  }
}

TEST(Routing, EveryScoreAndRuleAtOddSizes) {
  std::uint64_t seed = 1;
  std::int64_t rows = 0;
  std::int64_t clear = 0;
  for (const auto score : kScores) {
    for (const auto rule : kRules) {
      for (const std::int64_t num_experts : {1, 2, 7, 33, 257, 1023, 1025, 1300}) {
        for (const bool biased : {false, true}) {
          RoutingConfig config{.score_function = score,
                               .top_k = std::min<std::int64_t>(num_experts, 5),
                               .renormalise = rule,
                               .epsilon = 1e-3F,
                               .scaling_factor = 1.5F};
          const auto bias = random_matrix(DType::f32, 1, num_experts, -0.5F, 0.5F, ++seed);
          if (biased) config.selection_bias = bias.view();
          const auto logits = random_matrix(DType::f32, 3, num_experts, -6.0F, 6.0F, ++seed, 3);
          TestMatrix weights(DType::f32, 3, config.top_k, 2);
          TestMatrix ids(DType::i32, 3, config.top_k, 1);
          route(config, logits.view(), weights.view(), ids.view());
          rows += 3;
          clear += expect_oracle(config, logits, biased ? bias.row(0) : std::vector<double>{},
                                 weights, ids,
                                 std::string(to_string(score)) + " " + to_string(rule) + " E " +
                                     std::to_string(num_experts));
        }
      }
    }
  }
  EXPECT_GT(clear * 10, rows * 9);
}

TEST(Routing, EveryCombinationOfDtypes) {
  for (const auto score : kScores) {
    for (const DType logit_type : kFloats) {
      for (const DType bias_type : kFloats) {
        for (const DType weight_type : kFloats) {
          for (const DType id_type : {DType::i32, DType::i64}) {
            const auto bias = random_matrix(bias_type, 1, 24, -1.0F, 1.0F, 5, 0, 1);
            const auto logits = random_matrix(logit_type, 7, 24, -4.0F, 4.0F, 6, 5, 1);
            const RoutingConfig config{.score_function = score,
                                       .top_k = 6,
                                       .selection_bias = bias.view(),
                                       .renormalise = Renormalise::sum};
            TestMatrix weights(weight_type, 7, 6, 3, 1);  // one byte off: any alignment will do
            TestMatrix ids(id_type, 7, 6, 4, 1);
            route(config, logits.view(), weights.view(), ids.view());
            expect_oracle(config, logits, bias.row(0), weights, ids, to_string(score));
          }
        }
      }
    }
  }
}

TEST(Routing, EveryTopKUpToAllExperts) {
  const auto logits = random_matrix(DType::f32, 2, 40, -3.0F, 3.0F, 9);
  for (std::int64_t top_k = 1; top_k <= 40; ++top_k) {
    const RoutingConfig config{.top_k = top_k};
    TestMatrix weights(DType::f32, 2, top_k);
    TestMatrix ids(DType::i64, 2, top_k);
    topk_sigmoid(config, logits.view(), weights.view(), ids.view());
    RoutingConfig sigmoid = config;
    sigmoid.score_function = ScoreFunction::sigmoid;
    expect_oracle(sigmoid, logits, {}, weights, ids, "top_k " + std::to_string(top_k));
  }
}

TEST(Routing, Groups) {
  struct Shape {
    std::int64_t num_experts, num_groups, topk_group, top_k;
  };
  // DeepSeek-V3 and V2, groups of one, every group, groups of odd size, more than are cached.
  constexpr Shape kShapes[] = {{256, 8, 4, 8}, {160, 8, 3, 6}, {6, 6, 3, 3},       {12, 4, 4, 12},
                               {21, 7, 2, 5},  {9, 3, 1, 3},   {2560, 1280, 3, 4}, {1030, 5, 2, 8}};
  std::uint64_t seed = 100;
  for (const auto& shape : kShapes) {
    for (const auto score : kScores) {
      for (const auto group_score : {GroupScore::sum_of_two_best, GroupScore::best}) {
        for (const bool biased : {false, true}) {
          RoutingConfig config{.score_function = score,
                               .top_k = shape.top_k,
                               .renormalise = Renormalise::sum_epsilon,
                               .num_groups = shape.num_groups,
                               .topk_group = shape.topk_group,
                               .group_score = group_score,
                               .scaling_factor = 2.5F};
          const auto bias = random_matrix(DType::f32, 1, shape.num_experts, -2.0F, 0.5F, ++seed);
          if (biased) config.selection_bias = bias.view();
          const auto logits = random_matrix(DType::bf16, 3, shape.num_experts, -4.0F, 4.0F, ++seed);
          TestMatrix weights(DType::f32, 3, shape.top_k);
          TestMatrix ids(DType::i32, 3, shape.top_k);
          grouped_topk(config, logits.view(), weights.view(), ids.view());
          expect_oracle(config, logits, biased ? bias.row(0) : std::vector<double>{}, weights, ids,
                        std::string(to_string(score)) + " " + to_string(group_score) + " E " +
                            std::to_string(shape.num_experts));
        }
      }
    }
  }
}

TEST(Routing, LogitsDecideWhereScoresSaturate) {
  const auto logits = matrix_of(DType::f32, {{20.0F, 30.0F, -200.0F, -150.0F}});
  for (const auto score : {ScoreFunction::softmax, ScoreFunction::sigmoid}) {
    TestMatrix weights(DType::f32, 1, 3);
    TestMatrix ids(DType::i32, 1, 3);
    route({.score_function = score, .top_k = 3}, logits.view(), weights.view(), ids.view());
    EXPECT_EQ(ids.id_row(0), (std::vector<std::int64_t>{1, 0, 3}));
  }
}

TEST(Routing, ExtremeLogitsStayFinite) {
  const auto logits = matrix_of(DType::f32, {{3e38F, -3e38F, 0.0F, 88.0F, -95.0F}});
  for (const auto score : kScores) {
    for (const auto rule : kRules) {
      TestMatrix weights(DType::f32, 1, 5);
      TestMatrix ids(DType::i32, 1, 5);
      route({.score_function = score, .top_k = 5, .renormalise = rule}, logits.view(),
            weights.view(), ids.view());
      EXPECT_EQ(ids.id_row(0), (std::vector<std::int64_t>{0, 3, 2, 4, 1}));
      for (const double weight : weights.row(0)) EXPECT_TRUE(std::isfinite(weight));
    }
  }
}

TEST(Routing, NanAndInfinityGiveDistinctIdsInRange) {
  const float values[] = {NAN, kInfinity, -kInfinity, 0.0F, 1.0F};
  TestRandom random(77);
  for (const std::int64_t num_experts : {3, 16, 130, 1500}) {
    TestMatrix logits(DType::f32, 16, num_experts);
    for (std::int64_t r = 0; r < 16; ++r) {
      for (std::int64_t e = 0; e < num_experts; ++e) {
        logits.set(r, e, r < 5 ? values[r] : values[random.next() % 5]);
      }
    }
    auto bias = random_matrix(DType::f32, 1, num_experts, -1.0F, 1.0F, 78);
    bias.set(0, 1, NAN);
    for (const auto score : kScores) {
      for (const bool biased : {false, true}) {
        for (const std::int64_t num_groups : {std::int64_t{1}, num_experts}) {
          RoutingConfig config{.score_function = score,
                               .top_k = 3,
                               .renormalise = Renormalise::sum,
                               .num_groups = num_groups,
                               .topk_group = std::min<std::int64_t>(num_groups, 3)};
          if (biased) config.selection_bias = bias.view();
          TestMatrix weights(DType::f32, 16, 3);
          TestMatrix ids(DType::i32, 16, 3);
          route(config, logits.view(), weights.view(), ids.view());
          for (std::int64_t r = 0; r < 16; ++r) {
            expect_distinct_in_range(ids.id_row(r), num_experts);
          }
        }
      }
    }
  }
}

TEST(Routing, NanComesLast) {
  const auto logits = matrix_of(DType::f32, {{NAN, -kInfinity, 1.0F, NAN, 2.0F}});
  TestMatrix weights(DType::f32, 1, 5);
  TestMatrix ids(DType::i32, 1, 5);
  topk_sigmoid({.top_k = 5}, logits.view(), weights.view(), ids.view());
  EXPECT_EQ(ids.id_row(0), (std::vector<std::int64_t>{4, 2, 1, 0, 3}));
  EXPECT_EQ(weights.get(0, 2), 0.0);
}

TEST(Routing, ATokensResultDependsOnItsLogitsOnly) {
  auto logits = random_matrix(DType::bf16, 9, 64, -4.0F, 4.0F, 31);
  const RoutingConfig config{.top_k = 8, .renormalise = Renormalise::sum};
  TestMatrix weights(DType::f32, 9, 8);
  TestMatrix ids(DType::i32, 9, 8);
  topk_softmax(config, logits.view(), weights.view(), ids.view());
  for (std::int64_t r = 0; r < 9; ++r) {
    TestMatrix one_weights(DType::f32, 1, 8);
    TestMatrix one_ids(DType::i32, 1, 8);
    TestMatrix one(DType::bf16, 1, 64);
    for (std::int64_t e = 0; e < 64; ++e) one.set(0, e, static_cast<float>(logits.get(r, e)));
    topk_softmax(config, one.view(), one_weights.view(), one_ids.view());
    EXPECT_EQ(one_ids.id_row(0), ids.id_row(r));
    EXPECT_EQ(one_weights.row(0), weights.row(r));
  }
}

TEST(Routing, NamedFunctionsAreRoute) {
  const auto logits = random_matrix(DType::f32, 3, 12, -4.0F, 4.0F, 41);
  using Function = void (*)(const RoutingConfig&, ConstMatrixView, MatrixView, MatrixView);
  const auto expect_score = [&](Function function, RoutingConfig config, ScoreFunction score) {
    TestMatrix weights(DType::f32, 3, config.top_k);
    TestMatrix ids(DType::i32, 3, config.top_k);
    function(config, logits.view(), weights.view(), ids.view());
    config.score_function = score;
    expect_oracle(config, logits, {}, weights, ids, to_string(score));
  };
  expect_score(topk_softmax, {.top_k = 3}, ScoreFunction::softmax);
  expect_score(topk_softmax, {.score_function = ScoreFunction::softmax_of_chosen, .top_k = 3},
               ScoreFunction::softmax_of_chosen);
  expect_score(topk_sigmoid, {.top_k = 3}, ScoreFunction::sigmoid);
  expect_score(topk_softplus_sqrt, {.top_k = 3}, ScoreFunction::softplus_sqrt);
  expect_score(grouped_topk, {.top_k = 3, .num_groups = 4, .topk_group = 2},
               ScoreFunction::sigmoid);
  expect_score(grouped_topk,
               {.score_function = ScoreFunction::softmax,
                .top_k = 3,
                .num_groups = 4,
                .topk_group = 2,
                .group_score = GroupScore::best},
               ScoreFunction::softmax);
}

}  // namespace
}  // namespace fusedmoe
