// Contract 5.2.4 for real: more elements than 2^31 in hidden times top_k, in the gathered rows and
// in the intermediate. Minutes and 5 GiB: not in the default run. Cases B006 and B008.
#include <gtest/gtest.h>

#include <memory>

#include "support/layer.h"

namespace fusedmoe::test {
namespace {

struct Big {
  MoeConfig config;
  std::int64_t num_tokens, num_local;
  ExpertMap map = {};
};

// Memory that is not written before it is used: bf16 values in [-1, 1) from a cheap generator.
struct Input {
  std::unique_ptr<std::uint16_t[]> hidden, output;
  std::vector<float> weights;
  std::vector<std::int32_t> ids;

  Input(const Big& big, std::uint64_t seed) {
    const MoeConfig& c = big.config;
    const auto elements = static_cast<std::size_t>(big.num_tokens * c.hidden_size);
    hidden.reset(new std::uint16_t[elements]);
    output.reset(new std::uint16_t[elements]);
    std::uint64_t state = seed;
    for (std::size_t i = 0; i < elements; ++i) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      // Sign, exponent 2^-1 to 2^-4, any mantissa.
      hidden[i] =
          static_cast<std::uint16_t>((state >> 48 & 0x807f) | ((123 + (state >> 40 & 3)) << 7));
      output[i] = 0xffff;
    }
    std::mt19937_64 random(seed);
    for (std::int64_t i = 0; i < big.num_tokens * c.top_k; ++i) {
      weights.push_back(0.05F + static_cast<float>(random() % 1000) / 4000);
    }
    for (std::int64_t t = 0; t < big.num_tokens; ++t) {
      const auto first = static_cast<std::int64_t>(random() % big.num_local);
      for (std::int64_t k = 0; k < c.top_k; ++k) {  // distinct, all local
        ids.push_back(static_cast<std::int32_t>((first + k) % big.num_local));
      }
    }
  }
};

void check(const Big& big) {
  const MoeConfig& config = big.config;
  const std::int64_t tokens = big.num_tokens;
  const RandomWeights weights(config, big.num_local, {}, 5);
  PlanOptions options;
  options.expert_map = big.map;
  const FusedMoe plan = FusedMoe::create(config, weights.view(), options);
  Input input(big, 9);
  const std::int64_t hidden_size = config.hidden_size;
  const auto apply = [&](Workspace workspace) {
    plan.apply({input.output.get(), DType::bf16, tokens, hidden_size},
               {input.hidden.get(), DType::bf16, tokens, hidden_size},
               {input.weights.data(), DType::f32, tokens, config.top_k},
               {input.ids.data(), DType::i32, tokens, config.top_k}, workspace);
  };
  // 64 rows: the last 8 and others all over.
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < 56; ++i) rows.push_back(i * (tokens - 9) / 55);
  for (std::int64_t i = 8; i > 0; --i) rows.push_back(tokens - i);
  const auto sample = [&] {
    std::vector<std::uint16_t> got;
    for (const std::int64_t t : rows) {
      got.insert(got.end(), &input.output[t * hidden_size], &input.output[(t + 1) * hidden_size]);
    }
    return got;
  };
  apply({});
  const std::vector<std::uint16_t> whole = sample();

  std::vector<std::uint16_t> x;
  std::vector<float> w;
  std::vector<std::int32_t> ids;
  for (const std::int64_t t : rows) {
    x.insert(x.end(), &input.hidden[t * hidden_size], &input.hidden[(t + 1) * hidden_size]);
    w.insert(w.end(), &input.weights[t * config.top_k], &input.weights[t * config.top_k] + 8);
    ids.insert(ids.end(), &input.ids[t * config.top_k], &input.ids[t * config.top_k] + 8);
  }
  const std::vector<double> expected = reference_moe(
      config, weights.view(), {x.data(), DType::bf16, 64, hidden_size},
      {w.data(), DType::f32, 64, config.top_k}, {ids.data(), DType::i32, 64, config.top_k});
  const Errors errors = compare({whole.data(), DType::bf16, 64, hidden_size}, expected);
  EXPECT_TRUE(
      within(errors, tolerance(WeightFormat::bf16, DType::bf16, DType::bf16, ComputeMode::a16)))
      << errors.rel_l2 << ", " << errors.max_error;

  std::fill_n(input.output.get(), tokens * hidden_size, std::uint16_t{0xffff});
  Scratch small(plan.workspace_size(1000).bytes);
  apply(small);
  EXPECT_EQ(sample(), whole) << "in chunks";
}

TEST(LongOverflow, B006_TokensTimesTopKTimesHidden) {
  const Big big{
      .config = {.hidden_size = 7168, .intermediate_size = 64, .num_experts = 8, .top_k = 8},
      .num_tokens = 37450,
      .num_local = 8};
  ASSERT_GT(big.num_tokens * 8 * 7168, std::int64_t{1} << 31);
  check(big);
}

TEST(LongOverflow, B008_RowsTimesIntermediate) {
  // 65,536 tokens as reported: 2^31 unfused; then so many that the fused intermediate, too, has
  // more than 2^31 elements.
  for (const std::int64_t tokens : {65536, 105000}) {
    check(
        {.config = {.hidden_size = 128, .intermediate_size = 2560, .num_experts = 256, .top_k = 8},
         .num_tokens = tokens,
         .num_local = 32,
         .map = ExpertMap::linear(0, 8)});
  }
  ASSERT_GT(std::int64_t{105000} * 8 * 2560, std::int64_t{1} << 31);
}

}  // namespace
}  // namespace fusedmoe::test
