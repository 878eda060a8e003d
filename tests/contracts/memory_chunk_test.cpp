// Contract 5.1.3 and 5.1.4: less scratch means chunks, more is fine, too little throws; one
// workspace serves plans of any shape; two spans and allocation per call are the same call.
#include <gtest/gtest.h>

#include "support/layer.h"

namespace fusedmoe::test {
namespace {

TEST(ContractMemory, M3_ChunksGiveTheSameBits) {
  for (const DType output_dtype : {DType::bf16, DType::f32}) {
    MoeConfig config = odd_config();
    config.output_dtype = output_dtype;
    const Layer layer(config);
    const FusedMoe plan = layer.plan({.max_threads = 2});
    for (const std::int64_t num_tokens : {2, 3, 64, 101, 17}) {
      RandomInput input = layer.input(num_tokens);
      const Bytes whole = run_exact(plan, input);
      expect_oracle(config, layer.weights.view(), input);
      for (const std::int64_t chunk : {std::int64_t{1}, num_tokens / 2, num_tokens - 1}) {
        Scratch scratch(plan.workspace_size(chunk).bytes);
        EXPECT_EQ(run(plan, input, scratch), whole) << num_tokens << " tokens by " << chunk;
        Scratch odd(plan.workspace_size(chunk + 1).bytes - 1);  // still chunks of `chunk`
        EXPECT_EQ(run(plan, input, odd), whole) << num_tokens << " tokens by " << chunk;
      }
      const FusedMoe::TwoSpans small = plan.workspace_sizes_13_2(1);
      const FusedMoe::TwoSpans large = plan.workspace_sizes_13_2(num_tokens);
      Scratch small13(small.workspace13.bytes), small2(small.workspace2.bytes);
      Scratch large13(large.workspace13.bytes), large2(large.workspace2.bytes);
      EXPECT_EQ(run(plan, input, {large13.span(), large2.span()}), whole);
      EXPECT_EQ(run(plan, input, {small13.span(), large2.span()}), whole);
      EXPECT_EQ(run(plan, input, {large13.span(), small2.span()}), whole);
      EXPECT_EQ(run(plan, input, {small13.span(), small2.span()}), whole);
    }
  }
}

TEST(ContractMemory, M3_ChunksKnowIdsMapsAndCountersOfTheWholeCall) {
  const Layer layer;
  FusedMoe plan = layer.plan({.counters = true});
  RandomInput input = layer.input(40);
  const Bytes whole = run_exact(plan, input);
  const Counters expected = plan.counters();
  plan.reset_counters();
  Scratch scratch(plan.min_workspace_size().bytes);
  EXPECT_EQ(run(plan, input, scratch), whole);
  const Counters got = plan.counters();
  EXPECT_EQ(got.calls, expected.calls);
  EXPECT_EQ(got.calls, 1U);
  EXPECT_EQ(got.tokens, expected.tokens);
  EXPECT_EQ(got.rows_per_expert, expected.rows_per_expert);

  // An id out of range in the last chunk is found before the first is written.
  input.set_id(39, 2, 7);
  input.dirty_output();
  expect_contains(error_of(ErrorCode::invalid_argument,
                           [&] {
                             plan.apply(input.output(), input.hidden(), input.topk_weights(),
                                        input.topk_ids(), scratch);
                           }),
                  {"topk_ids", "got 7 at [39, 2]"});
  EXPECT_TRUE(untouched(input));
}

TEST(ContractMemory, M3_BelowTheMinimumThrowsWithNeedAndHave) {
  const Layer layer;
  const FusedMoe plan = layer.plan();
  RandomInput input = layer.input(5);
  const std::int64_t need = plan.min_workspace_size().bytes;
  const std::int64_t all = plan.workspace_size(5).bytes;
  for (const std::int64_t have : {std::int64_t{0}, std::int64_t{1}, need - 1}) {
    Scratch scratch(have);
    expect_contains(error_of(ErrorCode::workspace_too_small, [&] { run(plan, input, scratch); }),
                    {"workspace", std::to_string(need), "got " + std::to_string(have),
                     std::to_string(all), "num_tokens=5"});
    EXPECT_TRUE(untouched(input));
  }
  const FusedMoe::TwoSpans two = plan.workspace_sizes_13_2(1);
  for (const int which : {0, 1}) {
    Scratch first(two.workspace13.bytes - (which == 0 ? 1 : 0));
    Scratch second(two.workspace2.bytes - (which == 1 ? 1 : 0));
    expect_contains(error_of(ErrorCode::workspace_too_small,
                             [&] {
                               run(plan, input, {first.span(), second.span()});
                             }),
                    {"workspace", std::to_string(two.workspace13.bytes) + " + " +
                                      std::to_string(two.workspace2.bytes)});
    EXPECT_TRUE(untouched(input));
  }
  run_exact(plan, input);
  expect_oracle(layer.config, layer.weights.view(), input);
}

TEST(ContractMemory, M3_OneWorkspaceServesEverySmallerCall) {
  const Layer layer;
  const FusedMoe plan = layer.plan();
  Scratch scratch(plan.workspace_size(150).bytes);
  for (const std::int64_t num_tokens : {150, 1, 149, 2, 77, 3, 150}) {
    RandomInput input = layer.input(num_tokens, static_cast<std::uint64_t>(num_tokens));
    const Bytes expected = run_exact(plan, input);
    EXPECT_EQ(run(plan, input, scratch), expected) << num_tokens;
  }
}

TEST(ContractMemory, M4_OneWorkspaceServesPlansOfAnyShape) {
  std::vector<Layer> layers;
  std::vector<FusedMoe> plans;
  std::int64_t bytes = 0;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const std::int64_t size : {1, 33, 190}) {
      MoeConfig config = odd_config(dtype);
      config.hidden_size = size;
      config.intermediate_size = 191 - size;
      config.num_experts = 3 + size % 5;
      config.top_k = 1 + size % 3;
      layers.emplace_back(config, static_cast<std::uint64_t>(size));
      plans.push_back(layers.back().plan({.max_threads = 1 + static_cast<int>(size % 3)}));
      bytes = std::max(bytes, plans.back().workspace_size(30).bytes);
    }
  }
  Scratch scratch(bytes);
  for (int round = 0; round < 2; ++round) {
    for (std::size_t i = 0; i < plans.size(); ++i) {
      RandomInput input = layers[i].input(round == 0 ? 30 : 4, i);
      const Bytes expected = run_exact(plans[i], input);
      EXPECT_EQ(run(plans[i], input, scratch), expected);
      expect_oracle(layers[i].config, layers[i].weights.view(), input);
    }
  }
}

TEST(ContractMemory, M4_AllocateModeIsTheSameCall) {
  const Layer layer;
  const FusedMoe plan = layer.plan();
  for (const std::int64_t num_tokens : {1, 90, 2, 33, 1}) {
    RandomInput input = layer.input(num_tokens);
    EXPECT_EQ(run(plan, input), run_exact(plan, input)) << num_tokens;
  }
}

TEST(ContractMemory, M4_MisalignedBaseIsRefused) {
  const Layer layer;
  const FusedMoe plan = layer.plan();
  RandomInput input = layer.input(3);
  const std::int64_t bytes = plan.workspace_size(3).bytes;
  for (const std::int64_t beyond : {1, 16, 32, 63}) {
    Scratch scratch(bytes, kDirt, beyond);
    expect_contains(error_of(ErrorCode::invalid_argument, [&] { run(plan, input, scratch); }),
                    {"workspace", "multiple of 64", std::to_string(beyond)});
    EXPECT_TRUE(untouched(input));
    Scratch aligned(bytes);
    expect_contains(error_of(ErrorCode::invalid_argument,
                             [&] {
                               run(plan, input, {scratch.span(), aligned.span()});
                             }),
                    {"workspace13", "multiple of 64"});
    EXPECT_TRUE(untouched(input));
  }
}

TEST(ContractMemory, M4_AnEmptyFirstSpanMeansOneSpan) {
  // An engine may hand over an empty slice of its arena, whose address is not null.
  const Layer layer;
  const FusedMoe plan = layer.plan();
  RandomInput input = layer.input(3);
  const Bytes expected = run_exact(plan, input);
  Scratch arena(256, std::byte{0x3c});
  Scratch scratch(plan.workspace_size(3).bytes);
  EXPECT_EQ(run(plan, input, {arena.span().subspan(64, 0), scratch.span()}), expected);
  for (const std::byte byte : arena.span()) EXPECT_EQ(byte, std::byte{0x3c});
}

}  // namespace
}  // namespace fusedmoe::test
