// The parts of `verify --random`: drawing is repeatable and bounded, and what it uses to catch
// faults does catch them.
#include "random_case.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <set>

#include "formats/format.h"
#include "fusedmoe/fused_moe.h"
#include "verify_layer.h"

namespace fusedmoe::tool {
namespace {

const std::vector<std::string> kScalar = {"scalar"};

TEST(RandomCase, TheSameSeedGivesTheSameCase) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const RandomCase a = draw_case(seed, {}, kScalar);
    const RandomCase b = draw_case(seed, {}, kScalar);
    EXPECT_EQ(describe(a), describe(b));
    EXPECT_EQ(tags(a), tags(b));
    EXPECT_EQ(a.call_map, b.call_map);
  }
}

TEST(RandomCase, SizesStayInTheirLimits) {
  const SizeLimits tiny = {.max_multiply_adds = 1,
                           .max_weights = 1,
                           .max_hidden = 1,
                           .max_intermediate = 1,
                           .max_experts = 1,
                           .max_tokens = 0};
  for (const SizeLimits& limits : {SizeLimits{}, tiny}) {
    for (std::uint64_t seed = 0; seed < 2000; ++seed) {
      const RandomCase drawn = draw_case(seed, limits, kScalar);
      const MoeConfig& config = drawn.config;
      ASSERT_LE(config.hidden_size, limits.max_hidden);
      ASSERT_LE(config.intermediate_size, limits.max_intermediate);
      ASSERT_LE(config.num_experts, limits.max_experts);
      ASSERT_LE(drawn.input.num_tokens, limits.max_tokens);
      ASSERT_LE(config.top_k, config.num_experts);
      ASSERT_GE(config.top_k, 1);
      ASSERT_GE(config.hidden_size, 1);
      ASSERT_NE(drawn.runs[0].threads, drawn.runs[1].threads);
      ASSERT_NE(drawn.runs[0].workspace, drawn.runs[1].workspace);
    }
  }
}

// Each direction passes a tile of every kernel somewhere.
TEST(RandomCase, CoversEveryValueOfEveryDimension) {
  std::set<std::pair<std::string, std::string>> seen;
  for (std::uint64_t seed = 0; seed < 4000; ++seed) {
    for (const auto& tag : tags(draw_case(seed, {}, kScalar))) seen.insert(tag);
  }
  const std::pair<std::string, std::string> expected[] = {{"hidden_size", "1"},
                                                          {"hidden_size", "1025.."},
                                                          {"hidden_size", "257..512"},
                                                          {"intermediate_size", "1"},
                                                          {"intermediate_size", "1025.."},
                                                          {"num_tokens", "0"},
                                                          {"num_tokens", "49..300"},
                                                          {"num_experts", "129..300"},
                                                          {"top_k", "5..12"},
                                                          {"top_k", "all"},
                                                          {"rows per expert", "49..300"},
                                                          {"expert_map", "empty"},
                                                          {"expert_map", "round_robin"},
                                                          {"map of the call", "yes"},
                                                          {"skipped slots", "all"},
                                                          {"workspace", "between"},
                                                          {"runner", "gang"},
                                                          {"weight storage", "adopt"},
                                                          {"in place", "yes"},
                                                          {"w13 format", "nvfp4"},
                                                          {"w2 format", "q6_k"},
                                                          {"w13 scales", "tensor"},
                                                          {"w2 scales", "channel"},
                                                          {"w13 scales", "block"},
                                                          {"w2 scales", "group"},
                                                          {"w13 scale type", "bf16"},
                                                          {"w2 scale type", "e4m3"},
                                                          {"w13 scale parts", "halves"},
                                                          {"w13 scale parts", "interleaved"},
                                                          {"w13 groups", "last one partial"},
                                                          {"w2 groups", "one"},
                                                          {"w13 groups", "whole"},
                                                          {"scales transposed", "yes"},
                                                          {"zero points", "yes"},
                                                          {"mode", "a8"},
                                                          {"activation", "situ"},
                                                          {"threads", "8"}};
  for (const auto& tag : expected) {
    EXPECT_TRUE(seen.contains(tag)) << tag.first << " " << tag.second;
  }
}

// What the library refuses is never drawn.
TEST(RandomCase, EveryCaseIsLegal) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    const RandomCase drawn = draw_case(seed, {}, kScalar);
    ExpertWeights weights = stated_weights(drawn.config, drawn.num_local, drawn.weights);
    weights.source = [](std::int64_t) { return ExpertWeights(); };
    PlanOptions options;
    options.expert_map = drawn.expert_map;
    options.isa = drawn.isa;
    options.mode = drawn.mode;
    const Support support = FusedMoe::supports(drawn.config, weights, options);
    EXPECT_TRUE(support.ok) << seed << ": " << support.reason << "\n" << describe(drawn);
  }
}

// Each format, so that a format whose kernels or packing are wrong cannot pass.
TEST(RandomCase, FewCasesOfEachFormatPass) {
  std::map<std::pair<WeightFormat, bool>, int> left;
  for (const FormatInfo& info : all_formats()) {
    left[{info.format, false}] = left[{info.format, true}] = 3;
  }
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    const RandomCase drawn = draw_case(seed, {.max_multiply_adds = 16'000'000}, kScalar);
    int& w13 = left[{drawn.weights.w13_format, false}];
    int& w2 = left[{drawn.weights.w2_format, true}];
    if (w13 <= 0 && w2 <= 0) continue;
    --w13;
    --w2;
    const CaseResult result = run_case(drawn);
    EXPECT_TRUE(result.pass()) << seed << ": " << result.problem << "\n" << describe(drawn);
  }
  for (const auto& [format, count] : left) {
    EXPECT_LE(count, 0) << to_string(format.first) << (format.second ? " of w2" : " of w13");
  }
}

TEST(RandomCase, AnErrorIsAFailureWithItsText) {
  RandomCase drawn = draw_case(1, {}, kScalar);
  drawn.isa = "mmx";
  const CaseResult result = run_case(drawn);
  EXPECT_FALSE(result.pass());
  EXPECT_NE(result.problem.find("invalid_argument"), std::string::npos) << result.problem;
}

TEST(CheckedMemory, GuardsSeeWritesOnBothSides) {
  for (const std::int64_t offset : {0, 3}) {
    GuardedMemory memory(100, 64, offset);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.span().data()) % 64,
              static_cast<std::uintptr_t>(offset));
    EXPECT_TRUE(memory.guards_untouched());
    memory.span()[0] = std::byte{1};
    memory.span()[99] = std::byte{1};
    EXPECT_TRUE(memory.guards_untouched());
    std::byte* const data = memory.span().data();
    data[100] = std::byte{0};
    EXPECT_FALSE(memory.guards_untouched());
    data[100] = std::byte{0xa5};
    EXPECT_TRUE(memory.guards_untouched());
    data[-1] = std::byte{0};
    EXPECT_FALSE(memory.guards_untouched());
  }
}

TEST(CheckedMemory, AMatrixSeesWritesIntoItsPadding) {
  CheckedMatrix matrix(DType::f32, 3, 5, 2, 1);
  EXPECT_EQ(matrix.bytes(), std::vector<std::byte>(60, std::byte{0xff}));
  auto* data = static_cast<float*>(matrix.view().data);
  data[7 + 4] = 1.0F;
  EXPECT_TRUE(matrix.surroundings_untouched());
  data[7 + 5] = 1.0F;
  EXPECT_FALSE(matrix.surroundings_untouched());
  const CheckedMatrix copy(std::as_const(matrix).view(), 2);
  EXPECT_EQ(copy.bytes(), matrix.bytes());
  EXPECT_FALSE(copy.surroundings_untouched());
}

TEST(VerifyLayer, TheToleranceIsThatOfTheLoosestFormat) {
  MoeConfig config;
  config.dtype = DType::bf16;
  const WeightFormat formats[] = {WeightFormat::f32, WeightFormat::bf16};
  const Errors limit = tolerance_of(config, formats, ComputeMode::a16);
  const Errors bf16 = tolerance(WeightFormat::bf16, DType::bf16, DType::bf16, ComputeMode::a16);
  EXPECT_EQ(limit.rel_l2, bf16.rel_l2);
  EXPECT_EQ(limit.max_error, bf16.max_error);
}

}  // namespace
}  // namespace fusedmoe::tool
