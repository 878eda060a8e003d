// Contract 5.2: what becomes of the experts' results. The sum's order and precision, weights of
// zero, skipped slots, duplicates, NaN, and the caller's floating-point settings.
#include <gtest/gtest.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <limits>
#include <numeric>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "contracts/hand_layer.h"
#include "support/runners.h"

namespace fusedmoe::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The sum in fp32 in the order of the contract: ascending local expert id, then k.
float combine_in_order(const std::vector<std::vector<float>>& values, std::size_t column,
                       const std::vector<std::int32_t>& ids, const std::vector<float>& weights,
                       const std::vector<std::int32_t>& map) {
  std::vector<std::size_t> order(ids.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto local = [&](std::size_t k) { return map[static_cast<std::size_t>(ids[k])]; };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return local(a) < local(b); });
  float sum = 0;
  bool first = true;
  for (const std::size_t k : order) {
    if (local(k) < 0) continue;
    const float term = values[static_cast<std::size_t>(local(k))][column] * weights[k];
    sum = first ? term : sum + term;
    first = false;
  }
  return sum;
}

TEST(ContractNumbers, N9_CombineAddsInAscendingLocalIdThenK) {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  // Terms of very different size: another order gives other bits nearly always.
  std::vector<std::vector<float>> values(6, std::vector<float>(37));
  for (auto& row : values) {
    for (float& v : row) v = normal(random) * std::ldexp(1.0F, static_cast<int>(random() % 24));
  }
  const HandLayer layer(values, 5);
  const std::vector<std::int32_t> identity = {0, 1, 2, 3, 4, 5};
  const std::vector<std::int32_t> reversed = {5, 4, 3, 2, 1, 0};
  const FusedMoe plan = FusedMoe::create(layer.config, layer.weights);
  ApplyContext context;
  int order_mattered = 0;
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<std::int32_t> ids(5);
    std::vector<float> weights(5);
    for (std::size_t k = 0; k < 5; ++k) {
      ids[k] = static_cast<std::int32_t>(random() % 6);  // the same twice may happen
      weights[k] = normal(random);
    }
    for (const auto& map : {identity, reversed}) {
      context.expert_map = map;
      const std::vector<double> got = layer.run_token(plan, ids, weights, context);
      for (std::size_t h = 0; h < 37; ++h) {
        ASSERT_EQ(static_cast<float>(got[h]), combine_in_order(values, h, ids, weights, map));
      }
    }
    context.expert_map = reversed;
    order_mattered += layer.run_token(plan, ids, weights, context)[7] !=
                      static_cast<double>(combine_in_order(values, 7, ids, weights, identity));
  }
  EXPECT_GT(order_mattered, 10) << "these numbers cannot tell one order from another";
}

TEST(ContractNumbers, N7_DuplicatesCountTwice) {
  const HandLayer layer({{3, 5}, {100, 200}}, 2);
  const FusedMoe plan = FusedMoe::create(layer.config, layer.weights);
  EXPECT_EQ(layer.run_token(plan, {0, 0}, {0.5F, 0.25F}), (std::vector<double>{2.25, 3.75}));
  EXPECT_EQ(layer.run_token(plan, {1, 1}, {1, -1}), (std::vector<double>{0, 0}));
}

TEST(ContractNumbers, N6_AWeightOfZeroIsArithmeticASkippedSlotIsNothing) {
  const HandLayer layer({{3, kNan}, {1, 2}}, 2);
  const FusedMoe plan = FusedMoe::create(layer.config, layer.weights);
  const std::vector<double> zero = layer.run_token(plan, {0, 1}, {0.0F, 1.0F});
  EXPECT_EQ(zero[0], 1.0);
  EXPECT_TRUE(std::isnan(zero[1])) << "0 * NaN is NaN";
  EXPECT_EQ(layer.run_token(plan, {-1, 1}, {0.0F, 1.0F}), (std::vector<double>{1, 2}));
  EXPECT_EQ(layer.run_token(plan, {-1, 1}, {kNan, 1.0F}), (std::vector<double>{1, 2}));
  EXPECT_EQ(layer.run_token(plan, {-1, -1}, {kNan, kNan}), (std::vector<double>{0, 0}));
  EXPECT_TRUE(std::isnan(layer.run_token(plan, {1, 0}, {kNan, 1.0F})[0]));
  // An expert of another rank is skipped as well.
  const std::vector<std::int32_t> map = {-1, 0};
  const HandLayer half({{1, 2}}, 1);
  MoeConfig config = half.config;
  config.num_experts = config.top_k = 2;
  PlanOptions options;
  options.expert_map = ExpertMap::explicit_map(map);
  const FusedMoe rank = FusedMoe::create(config, half.weights, options);
  EXPECT_EQ(layer.run_token(rank, {0, 1}, {kNan, 1.0F}), (std::vector<double>{1, 2}));
}

TEST(ContractNumbers, B151_ExpertOutputBeyondF16IsSummedInF32) {
  const HandLayer layer({{80000, 1}, {0, 1}, {0, 1}, {0, 1}}, 4, DType::f16);
  const FusedMoe plan = FusedMoe::create(layer.config, layer.weights);
  EXPECT_EQ(layer.run_token(plan, {0, 1, 2, 3}, {0.25F, 0.25F, 0.25F, 0.25F}),
            (std::vector<double>{20000, 1}));
  EXPECT_EQ(layer.run_token(plan, {3, 0, 2, 1}, {1, 1, 1, 1})[0],
            std::numeric_limits<double>::infinity());
}

TEST(ContractNumbers, B152_TheSumOverKIsNotKeptInBf16) {
  std::vector<std::vector<float>> values(8, {1.0F});
  values[0] = {256.0F};
  const HandLayer layer(values, 8, DType::bf16);
  const FusedMoe plan = FusedMoe::create(layer.config, layer.weights);
  const std::vector<float> ones(8, 1.0F);
  EXPECT_EQ(layer.run_token(plan, {0, 1, 2, 3, 4, 5, 6, 7}, ones)[0], 264.0);
  EXPECT_EQ(layer.run_token(plan, {7, 3, 5, 1, 0, 2, 6, 4}, ones)[0], 264.0);
}

TEST(ContractNumbers, N1_TheIntermediateIsRoundedOnceToTheComputeDtype) {
  // (1 + 2^-7)^2 = 1 + 2^-6 + 2^-14: the last term is lost in bf16, not in f16 (a tie: 2^-14 is
  // below half of its 2^-10) and not in f32. Twice the result has no other rounding.
  constexpr float kRoot = 1.0F + 0x1p-7F;
  for (const auto& [dtype, expected] : {std::pair{DType::f32, 1 + 0x1p-6 + 0x1p-14},
                                        {DType::bf16, 1 + 0x1p-6},
                                        {DType::f16, 1 + 0x1p-6}}) {
    const HandLayer layer({{2.0F}}, 1);
    MoeConfig config = layer.config;
    config.dtype = dtype;
    config.output_dtype = DType::f32;
    const float w13 = kRoot;
    ExpertWeights weights = layer.weights;
    weights.w13.data = &w13;
    const FusedMoe plan = FusedMoe::create(config, weights);
    const std::uint16_t one = dtype == DType::f16 ? 0x3c00 : 0x3f80;
    const float wide = 1.0F;
    const void* x = dtype == DType::f32 ? static_cast<const void*>(&wide) : &one;
    const std::int32_t id = 0;
    float output = 0;
    plan.apply({&output, DType::f32, 1, 1}, {x, dtype, 1, 1}, {&wide, DType::f32, 1, 1},
               {&id, DType::i32, 1, 1});
    EXPECT_EQ(static_cast<double>(output), 2 * expected) << to_string(dtype);
  }
}

TEST(ContractNumbers, N1_TheOutputIsRoundedOnce) {
  // 1 + 3 * 2^-9: each term alone is below half of bf16's spacing 2^-7, their sum is above it.
  const HandLayer layer({{1.0F}, {0x1p-9F}, {0x1p-9F}, {0x1p-9F}}, 4, DType::bf16);
  const FusedMoe plan = FusedMoe::create(layer.config, layer.weights);
  EXPECT_EQ(layer.run_token(plan, {0, 1, 2, 3}, {1, 1, 1, 1})[0], 1 + 0x1p-7);
}

TEST(ContractNumbers, N1_RouterWeightOnTheInputComesBeforeTheBias) {
  // x = 1, w13 = 1, bias -1.5, weight 2: (1 * 2 - 1.5)^2 = 0.25; on the output it would be 0.
  const HandLayer layer({{1.0F}}, 1);
  MoeConfig config = layer.config;
  config.apply_router_weight_on_input = true;
  ExpertWeights weights = layer.weights;
  const float bias = -1.5F;
  weights.w13_bias = {&bias, DType::f32, 1, 1};
  const FusedMoe plan = FusedMoe::create(config, weights);
  EXPECT_EQ(layer.run_token(plan, {0}, {2.0F})[0], 0.25);
}

TEST(ContractNumbers, B038_NanAndInfinityStayInTheirRows) {
  const Layer layer;
  const FusedMoe plan = layer.plan({.max_threads = 3});
  for (const double hot : {0.0, 1.0}) {
    RandomInput input(layer.config, {.num_tokens = 128, .hot_share = hot}, 3);
    const Bytes clean = run_exact(plan, input);
    auto* rows = static_cast<std::uint16_t*>(const_cast<void*>(input.hidden().data));
    std::fill_n(rows + 77 * 131, 131, std::uint16_t{0x7fc0});  // NaN
    rows[78 * 131 + 5] = 0x7f80;                               // +infinity
    const Bytes got = run_exact(plan, input);
    for (std::int64_t t = 0; t < 128; ++t) {
      const bool spoilt = t == 77 || t == 78;
      if (!spoilt) {
        EXPECT_TRUE(
            std::equal(got.begin() + t * 262, got.begin() + (t + 1) * 262, clean.begin() + t * 262))
            << "row " << t;
        continue;
      }
      for (std::int64_t h = 0; h < 131; ++h) {
        EXPECT_FALSE(std::isfinite(element(input.output(), t, h))) << t << ", " << h;
      }
    }
  }
}

#if defined(__x86_64__)
TEST(ContractNumbers, B153_CallersFloatingPointSettingsNeitherMatterNorChange) {
  for (const std::string& isa : isas()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Layer layer(odd_config(dtype));
      for (const int threads : {1, 3}) {
        const FusedMoe plan = layer.plan({.isa = isa, .max_threads = threads});
        RandomInput input = layer.input(30);
        auto* bytes = static_cast<std::byte*>(const_cast<void*>(input.hidden().data));
        const std::uint32_t subnormal = 0x000ae398;  // 1e-39, also as a pair of bf16
        for (int i = 0; i < 131; i += 2) std::memcpy(bytes + 4 * i, &subnormal, 4);
        const Bytes expected = run_exact(plan, input);
        TestRunner sequential(TestRunner::Kind::sequential, threads);
        ApplyContext with_runner;
        with_runner.runner = sequential.view();
        const unsigned before = _mm_getcsr();
        // Flush to zero, subnormals are zero, the rounding modes, all exceptions unmasked.
        for (const unsigned settings : {0x9fc0U, 0x1f80U, 0x3f80U, 0x5f80U, 0x7f80U, 0xffc0U}) {
          for (const ApplyContext& context : {ApplyContext{}, with_runner}) {
            Scratch scratch(plan.workspace_size(30).bytes);
            input.dirty_output();
            _mm_setcsr(settings);
            plan.apply(input.output(), input.hidden(), input.topk_weights(), input.topk_ids(),
                       scratch, context);
            const unsigned after = _mm_getcsr();
            _mm_setcsr(before);
            EXPECT_EQ(after, settings) << isa;
            EXPECT_EQ(input.output_bytes(), expected) << isa << ", " << std::hex << settings;
          }
        }
        // A refused call leaves them alone, too.
        _mm_setcsr(0x9fc0U);
        EXPECT_THROW(plan.apply({}, input.hidden(), {}, {}), Error);
        const unsigned after = _mm_getcsr();
        _mm_setcsr(before);
        EXPECT_EQ(after, 0x9fc0U);
      }
    }
  }
}

// Subnormal inputs count as zero on every instruction set: none multiplies them, fast or slow.
TEST(ContractNumbers, B153_AllSubnormalIsAllZero) {
  for (const std::string& isa : isas()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Layer layer(odd_config(dtype), 1, -1, false);
      // Weights of about 2^100: what is not taken as zero shows.
      const WeightTensor& w13 = layer.weights.view().w13;
      const std::int64_t size = bytes_per_element(dtype);
      for (std::int64_t i = 0; i < w13.experts * w13.outputs * w13.inputs; ++i) {
        auto* upper = static_cast<std::byte*>(const_cast<void*>(w13.data)) + (i + 1) * size - 2;
        std::uint16_t bits;
        std::memcpy(&bits, upper, 2);
        if ((bits & 0x7f80) != 0) bits = static_cast<std::uint16_t>(bits + (100 << 7));
        std::memcpy(upper, &bits, 2);
      }
      const FusedMoe plan = layer.plan({.isa = isa, .max_threads = 2});
      for (const std::int64_t tokens : {1, 30}) {
        RandomInput input = layer.input(tokens);
        const ConstMatrixView hidden = input.hidden();
        const auto fill = [&](std::uint32_t value) {  // f32, or its upper half
          for (std::int64_t i = 0; i < tokens * hidden.row_stride; ++i) {
            std::memcpy(static_cast<std::byte*>(const_cast<void*>(hidden.data)) + i * size,
                        reinterpret_cast<const std::byte*>(&value) + (4 - size),
                        static_cast<std::size_t>(size));
          }
        };
        const unsigned before = _mm_getcsr();
        fill(0);
        const Bytes zero = run_exact(plan, input);
        fill(0x000ae398);  // 1e-39
        EXPECT_EQ(run_exact(plan, input), zero) << isa << " " << to_string(dtype);
        fill(0x807f0000);  // the largest below zero
        EXPECT_EQ(run_exact(plan, input), zero) << isa << " " << to_string(dtype);
        fill(0x00800000);  // the smallest that is none
        EXPECT_NE(run_exact(plan, input), zero) << isa << " " << to_string(dtype);
        EXPECT_EQ(_mm_getcsr(), before);
      }
    }
  }
}
#endif

}  // namespace
}  // namespace fusedmoe::test
