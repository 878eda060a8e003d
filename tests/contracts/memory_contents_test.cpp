// Contract 5.1: what the workspace and the output held never matters, no more of either is written
// than a call needs, and what belongs to the caller is only read.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "support/layer.h"
#include "support/runners.h"

namespace fusedmoe::test {
namespace {

Bytes run_over(const FusedMoe& plan, RandomInput& input, Scratch& scratch, std::byte output_fill) {
  input.dirty_output();
  const MatrixView output = input.output();
  const std::int64_t size = bytes_per_element(output.dtype);
  for (std::int64_t row = 0; row < output.rows; ++row) {
    std::memset(static_cast<std::byte*>(output.data) + row * output.row_stride * size,
                static_cast<int>(output_fill), static_cast<std::size_t>(output.columns * size));
  }
  plan.apply(output, input.hidden(), input.topk_weights(), input.topk_ids(), scratch);
  EXPECT_TRUE(input.output_padding_untouched());
  return input.output_bytes();
}

TEST(ContractMemory, M2_ResultsDoNotDependOnContents) {
  for (const DType output_dtype : {DType::bf16, DType::f32}) {
    MoeConfig config = odd_config();
    config.output_dtype = output_dtype;
    const Layer layer(config);
    const FusedMoe plan = layer.plan({.max_threads = 3});
    for (const std::int64_t num_tokens : {1, 4, 57}) {
      RandomInput input = layer.input(num_tokens);
      Scratch scratch(plan.workspace_size(num_tokens).bytes);
      const Bytes expected = run_over(plan, input, scratch, std::byte{0xff});
      expect_oracle(layer.config, layer.weights.view(), input);
      for (const std::byte fill : {std::byte{0x00}, std::byte{0xff}, std::byte{0x7f}}) {
        scratch.fill(fill);
        EXPECT_EQ(run_over(plan, input, scratch, fill), expected);
      }
      for (std::uint64_t seed = 0; seed < 3; ++seed) {
        scratch.randomise(seed);
        EXPECT_EQ(run_over(plan, input, scratch, std::byte{0x5a}), expected);
      }
      // What another call left behind.
      RandomInput other = layer.input(num_tokens, 99);
      run_over(plan, other, scratch, std::byte{0});
      EXPECT_EQ(run_over(plan, input, scratch, std::byte{0}), expected);
    }
  }
}

TEST(ContractMemory, M2_TokensWithoutExpertsAreZeroOverDirtyOutput) {
  const Layer layer;
  const FusedMoe plan = layer.plan({.max_threads = 3});
  RandomInput input = layer.input(9);
  for (const std::int64_t token : {0, 4, 8}) {
    for (std::int64_t k = 0; k < layer.config.top_k; ++k) input.set_id(token, k, -1);
  }
  run_exact(plan, input);
  expect_oracle(layer.config, layer.weights.view(), input);
  for (const std::int64_t token : {0, 4, 8}) {
    for (std::int64_t column = 0; column < layer.config.hidden_size; ++column) {
      EXPECT_EQ(element(input.output(), token, column), 0.0);
    }
  }
}

TEST(ContractMemory, M1_WorkspaceBeyondTheNeedIsNotTouched) {
  const Layer layer;
  const FusedMoe plan = layer.plan({.max_threads = 2});
  Scratch scratch(plan.workspace_size(4096).bytes, std::byte{0xa5});
  for (const std::int64_t num_tokens : {1, 7}) {
    RandomInput input = layer.input(num_tokens);
    run(plan, input, scratch);
    const auto beyond = scratch.span().subspan(plan.workspace_size(num_tokens).bytes);
    EXPECT_TRUE(
        std::all_of(beyond.begin(), beyond.end(), [](std::byte b) { return b == std::byte{0xa5}; }))
        << "a call of " << num_tokens << " tokens wrote beyond workspace_size(" << num_tokens
        << "), that is, it fills what it does not need";
  }
}

TEST(ContractMemory, M6_CallersTensorsAreNeverModified) {
  const Layer layer;
  const MoeConfig& config = layer.config;
  const ExpertWeights& weights = layer.weights.view();
  const auto sums = [&] {
    const std::int64_t w13 = 2 * config.intermediate_size * config.hidden_size;
    const std::int64_t experts = config.num_experts;
    return std::array{checksum(weights.w13.data, 2 * experts * w13),
                      checksum(weights.w2.data, experts * w13),
                      checksum(weights.w13_bias.data, 4 * experts * 2 * config.intermediate_size),
                      checksum(weights.w2_bias.data, 4 * experts * config.hidden_size)};
  };
  const auto before = sums();
  RandomInput input = layer.input(33);
  const auto inputs = [&] {
    const std::int64_t rows = input.hidden().rows;
    return std::array{checksum(input.hidden().data, rows * input.hidden().row_stride * 2),
                      checksum(input.topk_weights().data, rows * input.topk_ids().row_stride * 4),
                      checksum(input.topk_ids().data, rows * input.topk_ids().row_stride * 4)};
  };
  const auto inputs_before = inputs();
  for (const WeightStorage storage : {WeightStorage::own, WeightStorage::borrowed}) {
    FusedMoe plan = layer.plan({.weight_storage = storage});
    run_exact(plan, input);
    plan.refresh(weights);
    plan.release_weights();
    plan.refresh(weights);
    run_exact(plan, input);
  }
  EXPECT_EQ(sums(), before);
  EXPECT_EQ(inputs(), inputs_before);
}

TEST(ContractMemory, M2_RowsOfPaddingAreNeitherReadNorWritten) {
  // Padding behind rows of hidden, ids and weights holds NaN and ids that do not exist.
  const Layer layer;
  const FusedMoe plan = layer.plan();
  RandomInput padded(layer.config,
                     {.num_tokens = 21,
                      .ids_dtype = DType::i64,
                      .hidden_padding = 17,
                      .output_padding = 9,
                      .topk_padding = 4},
                     5);
  RandomInput dense(layer.config, {.num_tokens = 21, .ids_dtype = DType::i64}, 5);
  EXPECT_EQ(run_exact(plan, padded), run_exact(plan, dense));
  expect_oracle(layer.config, layer.weights.view(), padded);
}

}  // namespace
}  // namespace fusedmoe::test
