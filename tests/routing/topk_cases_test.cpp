// Faults that other systems' routers had, each as its smallest input: kind and number of the case.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "fusedmoe/config.h"
#include "fusedmoe/error.h"
#include "fusedmoe/routing.h"
#include "routing/permutation.h"
#include "routing_oracle.h"

namespace fusedmoe {
namespace {

using Ids = std::vector<std::int64_t>;

TEST(RoutingCases, T0_B002_ZeroTokensReadNothing) {
  const ConstMatrixView logits(nullptr, DType::bf16, 0, 512);
  const MatrixView weights(nullptr, DType::f32, 0, 10);
  const MatrixView ids(nullptr, DType::i32, 0, 10);
  RoutingConfig config{.top_k = 10};
  config.selection_bias = {nullptr, DType::f32, 1, 512};
  EXPECT_NO_THROW(topk_softmax(config, logits, weights, ids));
  EXPECT_NO_THROW(topk_sigmoid(config, logits, weights, ids));
  EXPECT_NO_THROW(topk_softplus_sqrt(config, logits, weights, ids));
  config.num_groups = 8;
  config.topk_group = 4;
  EXPECT_NO_THROW(grouped_topk(config, logits, weights, ids));
}

TEST(RoutingCases, NE_B011_EveryPairOfExpertsAndTopK) {
  std::uint64_t seed = 11;
  for (const std::int64_t num_experts :
       {8, 16, 30, 48, 60, 64, 72, 96, 128, 144, 160, 192, 256, 257, 384, 512}) {
    const auto bias = random_matrix(DType::f32, 1, num_experts, -0.25F, 0.25F, ++seed);
    const auto logits = random_matrix(DType::f32, 5, num_experts, -5.0F, 5.0F, ++seed);
    for (std::int64_t top_k = 1; top_k <= std::min<std::int64_t>(num_experts, 16); ++top_k) {
      for (const auto score : {ScoreFunction::softmax, ScoreFunction::sigmoid}) {
        for (const auto rule : {Renormalise::none, Renormalise::sum}) {
          for (const bool biased : {false, true}) {
            RoutingConfig config{.score_function = score, .top_k = top_k, .renormalise = rule};
            if (biased) config.selection_bias = bias.view();
            TestMatrix weights(DType::f32, 5, top_k);
            TestMatrix ids(DType::i32, 5, top_k);
            route(config, logits.view(), weights.view(), ids.view());
            expect_oracle(config, logits, biased ? bias.row(0) : std::vector<double>{}, weights,
                          ids, "E " + std::to_string(num_experts) + " K " + std::to_string(top_k));
          }
        }
      }
    }
  }
}

TEST(RoutingCases, NE_B012_MoreThanAllExperts) {
  const auto logits = random_matrix(DType::f32, 2, 8, -1.0F, 1.0F, 12);
  TestMatrix weights(DType::f32, 2, 9);
  TestMatrix ids(DType::i32, 2, 9);
  try {
    topk_softmax({.top_k = 9}, logits.view(), weights.view(), ids.view());
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("top_k: expected 1..num_experts=8, got 9"),
              std::string::npos)
        << error.what();
  }
  EXPECT_TRUE(weights.untouched());
  EXPECT_TRUE(ids.untouched());
}

TEST(RoutingCases, NE_B013_ExpertCountsOffAnyGrid) {
  for (const std::int64_t num_experts : {30, 257}) {
    const auto logits = random_matrix(DType::bf16, 7, num_experts, -4.0F, 4.0F, 13);
    const RoutingConfig config{.score_function = ScoreFunction::softmax, .top_k = 6};
    TestMatrix weights(DType::f32, 7, 6);
    TestMatrix ids(DType::i64, 7, 6);
    route(config, logits.view(), weights.view(), ids.view());
    expect_oracle(config, logits, {}, weights, ids, "E " + std::to_string(num_experts));
    EXPECT_FALSE(routing::find_bad_id(ids.view(), num_experts));
  }
}

TEST(RoutingCases, DU_B027_RowsOfNanAndInfinity) {
  auto logits = random_matrix(DType::f32, 3, 128, -4.0F, 4.0F, 27);
  TestMatrix first(DType::f32, 1, 128);
  for (std::int64_t e = 0; e < 128; ++e) {
    first.set(0, e, static_cast<float>(logits.get(0, e)));
    logits.set(1, e, NAN);
    logits.set(2, e, std::numeric_limits<float>::infinity());
  }
  const RoutingConfig config{
      .score_function = ScoreFunction::softmax, .top_k = 8, .renormalise = Renormalise::sum};
  TestMatrix weights(DType::f32, 3, 8);
  TestMatrix ids(DType::i32, 3, 8);
  route(config, logits.view(), weights.view(), ids.view());
  const Ids in_order = {0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_EQ(ids.id_row(1), in_order);
  EXPECT_EQ(ids.id_row(2), in_order);
  TestMatrix first_weights(DType::f32, 1, 8);
  TestMatrix first_ids(DType::i32, 1, 8);
  route(config, first.view(), first_weights.view(), first_ids.view());
  EXPECT_EQ(ids.id_row(0), first_ids.id_row(0));
  EXPECT_EQ(weights.row(0), first_weights.row(0));
}

TEST(RoutingCases, RW_B070_AllScoresUnderflow) {
  const auto logits = matrix_of(DType::f32, {std::vector<float>(16, -110.0F)});
  const auto bias = matrix_of(DType::f32, {std::vector<float>(16, 1.0F)});
  for (const auto score : {ScoreFunction::sigmoid, ScoreFunction::softplus_sqrt}) {
    for (const auto rule :
         {Renormalise::sum, Renormalise::sum_epsilon, Renormalise::max_sum_epsilon}) {
      TestMatrix weights(DType::f32, 1, 4);
      TestMatrix ids(DType::i32, 1, 4);
      route({.score_function = score,
             .top_k = 4,
             .selection_bias = bias.view(),
             .renormalise = rule,
             .scaling_factor = 2.5F},
            logits.view(), weights.view(), ids.view());
      EXPECT_EQ(ids.id_row(0), (Ids{0, 1, 2, 3}));
      EXPECT_EQ(weights.row(0), std::vector<double>(4, 0.0)) << to_string(rule);
    }
  }
}

template <typename Config>
concept HasScalingFactor = requires(Config config) {
  config.scaling_factor;
};

TEST(RoutingCases, RW_B071_OneScalingFactor) {
  static_assert(HasScalingFactor<RoutingConfig>);
  static_assert(!HasScalingFactor<MoeConfig> && !HasScalingFactor<PlanOptions>);
  const auto logits = random_matrix(DType::f32, 3, 16, -3.0F, 3.0F, 71);
  TestMatrix weights(DType::f32, 3, 4);
  TestMatrix ids(DType::i32, 3, 4);
  topk_sigmoid({.top_k = 4, .renormalise = Renormalise::sum_epsilon, .scaling_factor = 2.5F},
               logits.view(), weights.view(), ids.view());
  for (std::int64_t r = 0; r < 3; ++r) {
    const auto row = weights.row(r);
    EXPECT_NEAR(std::accumulate(row.begin(), row.end(), 0.0), 2.5, 1e-6);
  }
}

TEST(RoutingCases, RW_B072_ScalingTimesRenormaliseTimesBias) {
  const auto logits = random_matrix(DType::f32, 4, 20, -3.0F, 3.0F, 72);
  const auto bias = random_matrix(DType::f32, 1, 20, -0.5F, 0.5F, 73);
  for (const auto score : {ScoreFunction::softmax, ScoreFunction::sigmoid}) {
    for (const auto rule : {Renormalise::none, Renormalise::sum}) {
      for (const float factor : {1.0F, 1.5F}) {
        for (const bool biased : {false, true}) {
          RoutingConfig config{
              .score_function = score, .top_k = 4, .renormalise = rule, .scaling_factor = factor};
          if (biased) config.selection_bias = bias.view();
          TestMatrix weights(DType::f32, 4, 4);
          TestMatrix ids(DType::i32, 4, 4);
          route(config, logits.view(), weights.view(), ids.view());
          expect_oracle(config, logits, biased ? bias.row(0) : std::vector<double>{}, weights, ids,
                        to_string(score));
          if (rule == Renormalise::none) continue;
          const auto row = weights.row(0);
          EXPECT_NEAR(std::accumulate(row.begin(), row.end(), 0.0), static_cast<double>(factor),
                      1e-6);
        }
      }
    }
  }
}

TEST(RoutingCases, GT_B075_MaskedGroupsStayOut) {
  const auto logits = matrix_of(DType::f32, {std::vector<float>(8, 0.0F)});
  const auto bias =
      matrix_of(DType::f32, {{-0.6F, -0.7F, -0.8F, -0.9F, -1.0F, -1.1F, -1.2F, -1.3F}});
  TestMatrix weights(DType::f32, 1, 2);
  TestMatrix ids(DType::i32, 1, 2);
  grouped_topk({.top_k = 2,
                .selection_bias = bias.view(),
                .renormalise = Renormalise::sum_epsilon,
                .num_groups = 4,
                .topk_group = 1},
               logits.view(), weights.view(), ids.view());
  EXPECT_EQ(ids.id_row(0), (Ids{0, 1}));
  EXPECT_EQ(weights.row(0), (std::vector<double>{0.5, 0.5}));
}

TEST(RoutingCases, GT_B076_BiasStaysOutOfWeights) {
  const auto logits = matrix_of(DType::f32, {{0.0F, 0.0F, 0.0F, 0.0F}});
  const auto bias = matrix_of(DType::f32, {{0.3F, 0.2F, 0.0F, 0.0F}});
  TestMatrix weights(DType::f32, 1, 2);
  TestMatrix ids(DType::i32, 1, 2);
  topk_sigmoid({.top_k = 2, .selection_bias = bias.view()}, logits.view(), weights.view(),
               ids.view());
  EXPECT_EQ(ids.id_row(0), (Ids{0, 1}));
  EXPECT_EQ(weights.row(0), (std::vector<double>{0.5, 0.5}));
}

TEST(RoutingCases, GT_B077_TiesGoToTheLowerId) {
  for (const std::int64_t num_experts : {8, 60, 384, 2000}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      TestMatrix logits(dtype, 1, num_experts);
      for (std::int64_t e = 0; e < num_experts; ++e) logits.set(0, e, e % 3 == 0 ? 0.0F : -0.0F);
      for (const auto score : {ScoreFunction::softmax, ScoreFunction::softmax_of_chosen,
                               ScoreFunction::sigmoid, ScoreFunction::softplus_sqrt}) {
        for (const std::int64_t num_groups : {1, 4}) {
          TestMatrix weights(DType::f32, 1, 8);
          TestMatrix ids(DType::i32, 1, 8);
          route({.score_function = score,
                 .top_k = 8,
                 .num_groups = num_groups,
                 .topk_group = num_groups},
                logits.view(), weights.view(), ids.view());
          EXPECT_EQ(ids.id_row(0), (Ids{0, 1, 2, 3, 4, 5, 6, 7})) << num_experts;
        }
      }
    }
  }
  // Groups tie as well.
  const auto logits = matrix_of(DType::f32, {std::vector<float>(12, 1.0F)});
  TestMatrix weights(DType::f32, 1, 3);
  TestMatrix ids(DType::i32, 1, 3);
  grouped_topk({.top_k = 3, .num_groups = 6, .topk_group = 2}, logits.view(), weights.view(),
               ids.view());
  EXPECT_EQ(ids.id_row(0), (Ids{0, 1, 2}));
}

TEST(RoutingCases, GT_B078_AnyDtypeOfBias) {
  for (const DType logit_type : {DType::f32, DType::f16, DType::bf16}) {
    for (const DType bias_type : {DType::f32, DType::bf16}) {
      const auto logits = random_matrix(logit_type, 5, 32, -3.0F, 3.0F, 78);
      const auto bias = random_matrix(bias_type, 1, 32, -0.5F, 0.5F, 79);
      const RoutingConfig config{.score_function = ScoreFunction::sigmoid,
                                 .top_k = 4,
                                 .selection_bias = bias.view(),
                                 .renormalise = Renormalise::sum};
      TestMatrix weights(DType::f32, 5, 4);
      TestMatrix ids(DType::i32, 5, 4);
      route(config, logits.view(), weights.view(), ids.view());
      expect_oracle(config, logits, bias.row(0), weights, ids, to_string(logit_type));
    }
  }
}

}  // namespace
}  // namespace fusedmoe
