// load_rows: every value of every dtype, every length, any address, and nothing written beyond.
#include "kernel_inputs.h"

namespace fusedmoe::cpu {
namespace {

class LoadRowsTest : public IsaTest {};

TEST_P(LoadRowsTest, EveryLengthOffsetAndAddress) {
  for (const DType dtype : kDtypes) {
    const std::vector<float> values = numbers(140, 3, dtype);
    const std::int64_t element = bytes_of(dtype);
    for (std::int64_t k = 0; k <= 70; ++k) {
      for (const std::int64_t k0 : {0, 1, 7, 64}) {
        // Three rows at addresses of their own, each ending where its memory ends.
        std::vector<std::vector<std::byte>> memory;
        std::vector<const void*> from;
        for (int r = 0; r < 3; ++r) {
          memory.emplace_back((r + k0 + k) * element, std::byte{0xff});
          for (std::int64_t i = 0; i < k0 + k; ++i) {
            store(memory[r].data(), dtype, r + i, values[(i + 11 * r) % 140]);
          }
          from.push_back(memory[r].data() + r * element);
        }
        std::vector<float> to(3 * 75, -7.0F);
        kernels().load_rows({from.data(), dtype, k0, k, 3, to.data(), 75});
        for (int r = 0; r < 3; ++r) {
          for (std::int64_t i = 0; i < 75; ++i) {
            const float expected = i < k ? values[(k0 + i + 11 * r) % 140] : -7.0F;
            ASSERT_EQ(bits(to[r * 75 + i]), bits(expected))
                << to_string(dtype) << " k0 " << k0 << " k " << k << " at " << r << ", " << i;
          }
        }
      }
    }
  }
}

// All 65536 bit patterns: subnormals, infinities and NaN among them, in vector bodies and in tails.
TEST_P(LoadRowsTest, EveryPatternOfTheHalfTypes) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    std::vector<std::uint16_t> patterns(65536 + 5);
    for (std::size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<std::uint16_t>(i);
    for (const std::int64_t length : {std::int64_t{65541}, std::int64_t{3}}) {
      std::vector<float> to(65541);
      for (std::int64_t at = 0; at + length <= 65541; at += length) {
        const void* from = patterns.data();
        kernels().load_rows({&from, dtype, at, length, 1, to.data() + at, 0});
      }
      for (std::size_t i = 0; i < 65536; ++i) {
        const auto pattern = static_cast<std::uint16_t>(i);
        const float expected = dtype == DType::f16 ? f16_to_f32(pattern) : bf16_to_f32(pattern);
        if (std::isnan(expected)) {
          ASSERT_TRUE(std::isnan(to[i])) << i;
        } else {
          ASSERT_EQ(bits(to[i]), bits(expected)) << to_string(dtype) << " " << i;
        }
      }
    }
  }
}

FUSEDMOE_FOR_EVERY_ISA(LoadRowsTest);

}  // namespace
}  // namespace fusedmoe::cpu
