// Conversions of quantised blocks against the definitions of the formats, written here once more:
// element by element, from the bit where it lies.
#include "checkpoint/unpack.h"

#include <gtest/gtest.h>

#include <functional>

#include "formats/float_bits.h"
#include "test_files.h"

namespace fusedmoe::checkpoint {
namespace {

using Bytes = std::vector<std::byte>;

// Copies to an address that is aligned for nothing, with room for nothing more.
class Input {
 public:
  Input(std::int64_t size, std::uint32_t seed) : text_("x" + random_bytes(size, seed)) {}
  const std::byte* data() const { return reinterpret_cast<const std::byte*>(text_.data()) + 1; }
  unsigned byte(std::int64_t i) const { return static_cast<unsigned char>(text_[i + 1]); }
  // Bits first .. first + 3 of little-endian words of 32.
  int nibble(std::int64_t word, int index) const {
    return static_cast<int>(byte(4 * word + index / 2) >> (index % 2 * 4) & 15U);
  }

 private:
  std::string text_;
};

int nibble_of(const Bytes& rows, std::int64_t row, std::int64_t k, std::int64_t inputs) {
  const auto byte = std::to_integer<int>(rows[(row * inputs + k) / 2]);
  return k % 2 == 0 ? byte & 15 : byte >> 4;
}

TEST(Unpack, Gptq) {
  for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{8, 8}, {24, 32}, {40, 16}}) {
    const Input in(k * n / 2, 1);
    Bytes out(n * k / 2);
    unpack_gptq(in.data(), n, k, out.data());
    for (std::int64_t row = 0; row < n; ++row) {
      for (std::int64_t i = 0; i < k; ++i) {
        ASSERT_EQ(nibble_of(out, row, i, k), in.nibble(i / 8 * n + row, static_cast<int>(i % 8)))
            << row << ", " << i;
      }
    }
  }
}

TEST(Unpack, GptqZeros) {
  const std::int64_t groups = 3;
  const std::int64_t n = 16;
  const Input in(groups * n / 2, 2);
  for (const int offset : {0, 1}) {
    Bytes out(groups * n);
    unpack_gptq_zeros(in.data(), groups, n, offset, out.data());
    for (std::int64_t g = 0; g < groups; ++g) {
      for (std::int64_t row = 0; row < n; ++row) {
        ASSERT_EQ(std::to_integer<int>(out[g * n + row]),
                  in.nibble(g * n / 8 + row / 8, static_cast<int>(row % 8)) + offset);
      }
    }
  }
}

// Which nibble of a word holds the column j of its eight: the inverse of 0, 2, 4, 6, 1, 3, 5, 7.
constexpr int kAwqNibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};

TEST(Unpack, Awq) {
  for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{8, 2}, {24, 32}, {160, 6}}) {
    const Input in(k * n / 2, 3);
    Bytes out(n * k / 2);
    unpack_awq(in.data(), n, k, out.data());
    for (std::int64_t row = 0; row < n; ++row) {
      for (std::int64_t i = 0; i < k; ++i) {
        ASSERT_EQ(nibble_of(out, row, i, k), in.nibble(i * n / 8 + row / 8, kAwqNibble[row % 8]));
      }
    }
    Bytes zeros(k * n);
    unpack_awq_zeros(in.data(), k, n, zeros.data());
    for (std::int64_t g = 0; g < k; ++g) {
      for (std::int64_t row = 0; row < n; ++row) {
        ASSERT_EQ(std::to_integer<int>(zeros[g * n + row]),
                  in.nibble(g * n / 8 + row / 8, kAwqNibble[row % 8]));
      }
    }
  }
}

TEST(Unpack, CompressedTensors) {
  const std::int64_t groups = 3;
  for (const std::int64_t n : {8, 16, 13}) {
    const Input in((n + 7) / 8 * groups * 4, 4);
    Bytes out(n * groups);
    unpack_ct_zeros(in.data(), n, groups, out.data());
    for (std::int64_t row = 0; row < n; ++row) {
      for (std::int64_t g = 0; g < groups; ++g) {
        ASSERT_EQ(std::to_integer<int>(out[row * groups + g]),
                  in.nibble(row / 8 * groups + g, static_cast<int>(row % 8)));
      }
    }
  }
  for (const std::int64_t k : {4, 8, 7, 1}) {
    const std::int64_t n = 5;
    const std::int64_t words = (k + 3) / 4;
    const Input in(n * words * 4, 5);
    Bytes out(n * k);
    unpack_ct_int8(in.data(), n, k, out.data());
    for (std::int64_t row = 0; row < n; ++row) {
      for (std::int64_t i = 0; i < k; ++i) {
        const int stored = static_cast<int>(in.byte(4 * (row * words + i / 4) + i % 4));
        ASSERT_EQ(static_cast<std::int8_t>(std::to_integer<int>(out[row * k + i])), stored - 128);
      }
    }
  }
}

// Element j of a block's 32 in 16 bytes: the first half in low nibbles.
int q4_0_element(const Input& in, std::int64_t first_byte, int j) {
  const unsigned byte = in.byte(first_byte + j % 16);
  return static_cast<int>(j < 16 ? byte & 15U : byte >> 4U);
}

TEST(Unpack, Q4_0AndMxfp4) {
  const std::int64_t count = 6;
  const Input in(18 * count, 6);
  Bytes out(16 * count);
  Bytes scales(2 * count);
  split_q4_0(in.data(), count, out.data(), {scales.data(), false, 1});
  for (std::int64_t b = 0; b < count; ++b) {
    EXPECT_EQ(std::to_integer<unsigned>(scales[2 * b]), in.byte(18 * b));
    EXPECT_EQ(std::to_integer<unsigned>(scales[2 * b + 1]), in.byte(18 * b + 1));
    for (int j = 0; j < 32; ++j) {
      ASSERT_EQ(nibble_of(out, b, j, 32), q4_0_element(in, 18 * b + 2, j));
    }
  }
  const Input mx(17 * count, 7);
  split_mxfp4(mx.data(), count, out.data(), scales.data());
  for (std::int64_t b = 0; b < count; ++b) {
    EXPECT_EQ(std::to_integer<unsigned>(scales[b]), mx.byte(17 * b));
    for (int j = 0; j < 32; ++j) {
      ASSERT_EQ(nibble_of(out, b, j, 32), q4_0_element(mx, 17 * b + 1, j));
    }
  }
}

TEST(Unpack, Q8_0WithAndWithoutAFactor) {
  const std::int64_t count = 3;
  std::string text = "x";
  for (std::int64_t b = 0; b < count; ++b) {
    const std::uint16_t d = f32_to_f16(0.25F * static_cast<float>(b + 1));
    text += bytes_of<std::uint16_t>({d}) + random_bytes(32, 8);
  }
  const auto* const in = reinterpret_cast<const std::byte*>(text.data()) + 1;
  Bytes out(32 * count);
  Bytes scales(4 * count + 1);
  split_q8_0(in, count, out.data(), {scales.data() + 1, false, 1});
  for (std::int64_t b = 0; b < count; ++b) {
    EXPECT_EQ(std::memcmp(out.data() + 32 * b, in + 34 * b + 2, 32), 0);
    EXPECT_EQ(std::memcmp(scales.data() + 1 + 2 * b, in + 34 * b, 2), 0);
  }
  split_q8_0(in, count, out.data(), {scales.data() + 1, true, 3.0F});
  for (std::int64_t b = 0; b < count; ++b) {
    float scale = 0;
    std::memcpy(&scale, scales.data() + 1 + 4 * b, 4);
    EXPECT_EQ(scale, 0.75F * static_cast<float>(b + 1));
  }
}

// 4 scales, then 4 times 8 bytes with 16 elements each.
TEST(Unpack, Nvfp4) {
  const std::int64_t count = 5;
  const Input in(36 * count, 9);
  Bytes out(32 * count);
  Bytes scales(4 * count);
  split_nvfp4(in.data(), count, out.data(), scales.data());
  for (std::int64_t b = 0; b < count; ++b) {
    for (int j = 0; j < 4; ++j) {
      const unsigned code = in.byte(36 * b + j) & 127U;
      EXPECT_EQ(std::to_integer<unsigned>(scales[4 * b + j]), code == 127 ? 0 : code);
      for (int i = 0; i < 16; ++i) {
        const unsigned byte = in.byte(36 * b + 4 + 8 * j + i % 8);
        ASSERT_EQ(nibble_of(out, b, 16 * j + i, 64),
                  static_cast<int>(i < 8 ? byte & 15U : byte >> 4U));
      }
    }
  }
  // ggml's code for NaN is zero to it, and it knows no sign.
  std::string special(36, '\0');
  special[0] = '\x7f';
  special[1] = '\xff';
  special[2] = '\xb8';
  split_nvfp4(reinterpret_cast<const std::byte*>(special.data()), 1, out.data(), scales.data());
  EXPECT_EQ(scales[0], std::byte{0});
  EXPECT_EQ(scales[1], std::byte{0});
  EXPECT_EQ(scales[2], std::byte{0x38});
}

TEST(Unpack, LargestZeros) {
  for (int nibble = 0; nibble < 8; ++nibble) {
    std::vector<std::uint32_t> words = {0x77777777U, 0x12345670U, 0xeeeeeeeeU};
    const auto* const data = reinterpret_cast<const std::byte*>(words.data());
    EXPECT_FALSE(has_largest_zero(data, 3));
    words[1] |= 15U << (4 * nibble);
    EXPECT_TRUE(has_largest_zero(data, 3));
    EXPECT_FALSE(has_largest_zero(data, 1));
  }
  // Four ones across two nibbles are none.
  const std::vector<std::uint32_t> across = {0x3cU};
  EXPECT_FALSE(has_largest_zero(reinterpret_cast<const std::byte*>(across.data()), 1));
}

TEST(Unpack, GroupOrder) {
  std::vector<std::int32_t> indices = {0, 0, 0, 1, 1, 1, 2, 2};
  const auto in_order = [&](std::int64_t group) {
    return is_group_order(reinterpret_cast<const std::byte*>(indices.data()), 8, group);
  };
  EXPECT_TRUE(in_order(3));
  EXPECT_FALSE(in_order(2));
  EXPECT_FALSE(in_order(8));
  std::swap(indices[2], indices[3]);
  EXPECT_FALSE(in_order(3));
}

}  // namespace
}  // namespace fusedmoe::checkpoint
