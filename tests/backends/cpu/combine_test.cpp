// combine: bias, router weight, the sum over a token's rows, and the one rounding into the output.
#include "backends/cpu/float_environment.h"
#include "kernel_inputs.h"

namespace fusedmoe::cpu {
namespace {

class CombineTest : public IsaTest {};

constexpr std::int64_t kTokens = 5;
constexpr std::int64_t kSumsStride = 37;
constexpr std::int64_t kOutputStride = 41;

// Five tokens with 1, 2, 3, 0 and 1 rows, in tiles of a few rows; the sums in scratch or, for fp32,
// in the output itself.
TEST_P(CombineTest, SumsRowsInOrderWithEveryTail) {
  const FloatEnvironment environment;
  const std::vector<std::vector<RowTarget>> tiles = {
      {{0, 0.5F, true, true}, {1, 1.25F, true, false}, {2, -0.75F, true, false}},
      {{2, 2.0F, false, false}, {1, 0.3F, false, true}},
      {{2, 0.1F, false, true}, {4, 0.0F, true, true}}};
  for (const DType dtype : kDtypes) {
    for (int which = 0; which < 8; ++which) {
      const bool with_bias = (which & 1) != 0;
      const bool with_scale = (which & 2) != 0;
      const bool with_row_scale = (which & 4) != 0;
      for (int outputs = 1; outputs <= kPanelOutputs; ++outputs) {
        const std::vector<float> bias = numbers(kPanelOutputs, 8);
        const std::vector<float> scale = numbers(kPanelOutputs, 9);
        const std::vector<float> row_scale = numbers(3, 10);
        std::vector<std::byte> output(kTokens * kOutputStride * bytes_of(dtype), std::byte{0xff});
        std::vector<float> sums(kTokens * kSumsStride, kNaN);
        const bool in_output = dtype == DType::f32;
        std::vector<float> expected(kTokens * kPanelOutputs, 0.0F);
        unsigned seed = 20;
        for (const std::vector<RowTarget>& tile : tiles) {
          const int rows = static_cast<int>(tile.size());
          const std::vector<float> accumulators = numbers(rows * kPanelOutputs, ++seed);
          for (int r = 0; r < rows; ++r) {
            for (int n = 0; n < kPanelOutputs; ++n) {
              float value = accumulators[r * kPanelOutputs + n];
              if (with_scale) value *= scale[n];
              if (with_row_scale) value *= row_scale[r];
              if (with_bias) value += bias[n];
              value *= tile[r].weight;
              float& sum = expected[tile[r].token * kPanelOutputs + n];
              sum = tile[r].first ? value : sum + value;
            }
          }
          kernels().combine(
              {accumulators.data(), rows, outputs, with_row_scale ? row_scale.data() : nullptr,
               with_scale ? scale.data() : nullptr, with_bias ? bias.data() : nullptr, tile.data(),
               in_output ? reinterpret_cast<float*>(output.data()) : sums.data(),
               in_output ? kOutputStride : kSumsStride, output.data(), dtype, kOutputStride});
        }
        for (std::int64_t t = 0; t < kTokens; ++t) {
          for (std::int64_t n = 0; n < kOutputStride; ++n) {
            const std::int64_t at = t * kOutputStride + n;
            char element[4];
            if (t == 3 || n >= outputs) {  // no row, or beyond the tail: as it was
              std::memset(element, 0xff, 4);
            } else {
              store(element, dtype, 0, expected[t * kPanelOutputs + n]);
            }
            ASSERT_EQ(std::memcmp(output.data() + at * bytes_of(dtype), element,
                                  static_cast<std::size_t>(bytes_of(dtype))),
                      0)
                << to_string(dtype) << " outputs " << outputs << " at " << t << ", " << n;
          }
        }
        if (in_output) continue;
        for (std::int64_t t = 0; t < kTokens; ++t) {  // sums: only of tokens with several rows
          for (std::int64_t n = 0; n < kSumsStride; ++n) {
            const bool used = (t == 1 || t == 2) && n < outputs;
            ASSERT_EQ(std::isnan(sums[t * kSumsStride + n]), !used) << t << ", " << n;
          }
        }
      }
    }
  }
}

// A token with one row needs no sums at all.
TEST_P(CombineTest, ASingleRowLeavesSumsAlone) {
  const std::vector<float> accumulators = numbers(2 * kPanelOutputs, 3);
  const RowTarget targets[] = {{1, 1.5F, true, true}, {0, 0.5F, true, true}};
  std::vector<std::uint16_t> output(2 * 32);
  kernels().combine({accumulators.data(), 2, 32, nullptr, nullptr, nullptr, targets, nullptr, 0,
                     output.data(), DType::bf16, 32});
  for (int n = 0; n < 32; ++n) {
    EXPECT_EQ(output[n], f32_to_bf16(accumulators[32 + n] * 0.5F));
    EXPECT_EQ(output[32 + n], f32_to_bf16(accumulators[n] * 1.5F));
  }
}

// One row through combine with weight 1: `values` rounded to dtype.
std::vector<std::uint16_t> rounded(const RowKernels& kernels, const std::vector<float>& values,
                                   DType dtype) {
  std::vector<std::uint16_t> result(values.size());
  const RowTarget target{0, 1.0F, true, true};
  for (std::size_t i = 0; i + kPanelOutputs <= values.size(); i += kPanelOutputs) {
    kernels.combine({&values[i], 1, kPanelOutputs, nullptr, nullptr, nullptr, &target, nullptr, 0,
                     &result[i], dtype, 0});
  }
  return result;
}

// Every upper half with the lower halves around a tie: nearest even, NaN stays NaN, overflow gives
// infinity, f16 subnormals keep their value.
TEST_P(CombineTest, RoundsToNearestEven) {
  const FloatEnvironment environment;
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 65536; ++high) {
    for (const std::uint32_t low : {0x0000U, 0x0001U, 0x0fffU, 0x1000U, 0x1001U, 0x3000U, 0x7fffU,
                                    0x8000U, 0x8001U, 0xf000U, 0xffffU}) {
      values.push_back(std::bit_cast<float>(high << 16 | low));
    }
  }
  const std::vector<std::uint16_t> bf16 = rounded(kernels(), values, DType::bf16);
  const std::vector<std::uint16_t> f16 = rounded(kernels(), values, DType::f16);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float value = values[i];
    // fp32 subnormals are zero in the kernels' environment.
    const std::uint32_t magnitude = bits(value) & 0x7fffffffU;
    const bool tiny = magnitude != 0 && magnitude < 0x00800000U;
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(bf16_to_f32(bf16[i]))) << std::hex << bits(value);
      ASSERT_TRUE(std::isnan(f16_to_f32(f16[i]))) << std::hex << bits(value);
    } else if (tiny) {
      ASSERT_EQ(bf16_to_f32(bf16[i]), 0.0F);
      ASSERT_EQ(f16_to_f32(f16[i]), 0.0F);
    } else {
      ASSERT_EQ(bf16[i], f32_to_bf16(value)) << std::hex << bits(value);
      ASSERT_EQ(f16[i], f32_to_f16(value)) << std::hex << bits(value);
    }
  }
}

TEST_P(CombineTest, KeepsNaNAndOverflowsToInfinity) {
  std::vector<float> values(kPanelOutputs, 1.0F);
  values[0] = kNaN;
  values[1] = std::bit_cast<float>(0x7f800001U);  // its payload is in the bits that fall away
  values[2] = std::bit_cast<float>(0xffffffffU);
  values[3] = kInf;
  values[9] = -kInf;
  values[10] = 65519.0F;  // below half way from 65504 to what would come next
  values[11] = 65520.0F;
  values[12] = -1e30F;
  values[13] = 3.4028235e38F;
  const std::vector<std::uint16_t> f16 = rounded(kernels(), values, DType::f16);
  const std::vector<std::uint16_t> bf16 = rounded(kernels(), values, DType::bf16);
  for (const int i : {0, 1, 2}) {
    EXPECT_TRUE(std::isnan(f16_to_f32(f16[i]))) << i;
    EXPECT_TRUE(std::isnan(bf16_to_f32(bf16[i]))) << i;
  }
  EXPECT_EQ(f16[3], 0x7c00);
  EXPECT_EQ(f16[9], 0xfc00);
  EXPECT_EQ(f16[10], 0x7bff);
  EXPECT_EQ(f16[11], 0x7c00);
  EXPECT_EQ(f16[12], 0xfc00);
  EXPECT_EQ(bf16[3], 0x7f80);
  EXPECT_EQ(bf16[9], 0xff80);
  EXPECT_EQ(bf16[13], 0x7f80);
  EXPECT_EQ(f16[4], 0x3c00);
  EXPECT_EQ(bf16[4], 0x3f80);
}

FUSEDMOE_FOR_EVERY_ISA(CombineTest);

}  // namespace
}  // namespace fusedmoe::cpu
