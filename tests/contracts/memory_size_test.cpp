// Contract 5.1 and section 4: how large the scratch is. Affine, exact, 64-bit, tight.
#include <gtest/gtest.h>

#include <limits>

#include "support/layer.h"

namespace fusedmoe::test {
namespace {

// A plan of any shape without any weights: a rank that holds none of the experts.
FusedMoe plan_without_weights(const MoeConfig& config, int threads = 1) {
  const std::vector<std::int32_t> none(static_cast<std::size_t>(config.num_experts), -1);
  return FusedMoe::create(config, {}, with_map(ExpertMap::explicit_map(none), threads));
}

MoeConfig shape(std::int64_t hidden, std::int64_t inter, std::int64_t experts, std::int64_t top_k) {
  MoeConfig config;
  config.hidden_size = hidden;
  config.intermediate_size = inter;
  config.num_experts = experts;
  config.top_k = top_k;
  return config;
}

constexpr std::int64_t kMiB = 1 << 20;

void expect_sound_sizes(const FusedMoe& plan, int threads) {
  const WorkspaceFormula formula = plan.workspace_formula();
  EXPECT_EQ(formula.alignment, 64);
  EXPECT_GE(formula.per_token, 0);
  EXPECT_EQ(formula.per_token % 64, 0);
  EXPECT_EQ(formula.fixed % 64, 0);
  EXPECT_LT(formula.fixed, kMiB + 2 * kMiB * threads);
  std::int64_t last = -1;
  for (std::int64_t n = 0; n <= 8192; ++n) {
    const WorkspaceSize size = plan.workspace_size(n);
    ASSERT_EQ(size.bytes, formula.fixed + formula.per_token * n);
    ASSERT_EQ(size.alignment, formula.alignment);
    ASSERT_GE(size.bytes, last);
    last = size.bytes;
    const FusedMoe::TwoSpans two = plan.workspace_sizes_13_2(n);
    ASSERT_EQ(two.workspace13.bytes + two.workspace2.bytes, size.bytes);
    ASSERT_EQ(two.workspace13.alignment, 64);
    ASSERT_EQ(two.workspace2.alignment, 64);
  }
  EXPECT_EQ(plan.min_workspace_size().bytes, plan.workspace_size(1).bytes);
}

TEST(ContractMemory, M4_B096_SizeIsAffineAndNeverDecreases) {
  const MoeConfig config = shape(7168, 2048, 256, 8);
  expect_sound_sizes(plan_without_weights(config), 1);
  // EP 8 of a layer that is small enough to have weights here.
  const MoeConfig small = shape(71, 19, 256, 8);
  for (const int size : {1, 8}) {
    const Layer layer(small, 1, 256 / size);
    expect_sound_sizes(layer.plan(with_map(ExpertMap::linear(0, size), 2)), 2);
  }
}

TEST(ContractMemory, M5_FixedPartStaysBelowOneMiBAndTwoPerThread) {
  for (const std::int64_t size : {1, 63, 129, 8192}) {
    for (const std::int64_t top_k : {1, 3, 16}) {
      for (const int threads : {1, 2, 7}) {
        const FusedMoe plan = plan_without_weights(shape(size, 8193 - size, 2048, top_k), threads);
        EXPECT_LT(plan.workspace_formula().fixed, kMiB + 2 * kMiB * threads);
        EXPECT_EQ(plan.num_threads(), threads);
      }
    }
  }
  // The most experts that a plan takes: tables by expert are in the fixed part.
  const Layer layer(shape(1, 1, 65536, 2), 1, -1, false);
  EXPECT_LT(layer.plan({.max_threads = 1}).workspace_formula().fixed, 3 * kMiB);
}

TEST(ContractMemory, M5_BytesPerTokenAreNearTheGoal) {
  struct Model {
    const char* name;
    std::int64_t hidden, inter, experts, top_k;
  };
  for (const Model& m :
       {Model{"qwen3-30b-a3b", 2048, 768, 128, 8}, Model{"qwen3.6-35b-a3b", 2048, 512, 256, 8},
        Model{"gpt-oss-20b", 2880, 2880, 32, 4}, Model{"deepseek-v3", 7168, 2048, 256, 8},
        Model{"mixtral-8x7b", 4096, 14336, 8, 2}}) {
    const FusedMoe plan = plan_without_weights(shape(m.hidden, m.inter, m.experts, m.top_k));
    const std::int64_t goal = 2 * m.top_k * m.inter + 4 * m.hidden;
    const std::int64_t unfused = 2 * m.top_k * std::max(m.hidden + 2 * m.inter, 3 * m.inter);
    EXPECT_LE(plan.workspace_formula().per_token, goal + 16 * m.top_k + 192) << m.name;
    EXPECT_LT(plan.workspace_formula().per_token, unfused) << m.name;
  }
}

TEST(ContractMemory, M4_B099_SizesAre64Bit) {
  const FusedMoe plan = plan_without_weights(shape(7168, 2048, 256, 8));
  const WorkspaceFormula formula = plan.workspace_formula();
  constexpr std::int64_t kTokens = 1 << 20;
  EXPECT_EQ(plan.workspace_size(kTokens).bytes, formula.fixed + kTokens * formula.per_token);
  EXPECT_GT(plan.workspace_size(kTokens).bytes, std::int64_t{1} << 32);
  EXPECT_EQ(plan.workspace_size(kTokens << 10).bytes,
            formula.fixed + (kTokens << 10) * formula.per_token);
  const FusedMoe::TwoSpans two = plan.workspace_sizes_13_2(kTokens);
  EXPECT_EQ(two.workspace13.bytes + two.workspace2.bytes, plan.workspace_size(kTokens).bytes);
}

TEST(ContractMemory, M4_SizesThatNoCallCanHaveAreRefused) {
  const FusedMoe plan = plan_without_weights(shape(7168, 2048, 256, 8));
  for (const std::int64_t n : {std::int64_t{-1}, std::numeric_limits<std::int64_t>::min(),
                               std::numeric_limits<std::int64_t>::max()}) {
    expect_contains(error_of(ErrorCode::invalid_argument, [&] { (void)plan.workspace_size(n); }),
                    {"num_tokens", "expected", "got " + std::to_string(n)});
    expect_contains(
        error_of(ErrorCode::invalid_argument, [&] { (void)plan.workspace_sizes_13_2(n); }),
        {"num_tokens", "expected", "got " + std::to_string(n)});
  }
}

TEST(ContractMemory, M4_SizeDoesNotDependOnTheDataAndIsPure) {
  const Layer layer;
  const FusedMoe plan = layer.plan({.max_threads = 2});
  const std::int64_t before = plan.workspace_size(100).bytes;
  // All routings fit: everything to one expert, nothing at all, all different.
  Scratch scratch(before);
  for (const double hot : {0.0, 1.0}) {
    for (const double skip : {0.0, 1.0}) {
      RandomInput input(
          layer.config,
          {.num_tokens = 100, .skip_share = skip, .hot_share = hot, .repeated_ids = true}, 4);
      run(plan, input, scratch);
      expect_oracle(layer.config, layer.weights.view(), input);
    }
  }
  EXPECT_EQ(plan.workspace_size(100).bytes, before);
}

}  // namespace
}  // namespace fusedmoe::test
