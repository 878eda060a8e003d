// formats/float_bits.h against values computed apart from it: all patterns of f16 and bf16, and
// every place where rounding a float changes its result.
#include "formats/float_bits.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace fusedmoe {
namespace {

struct Type {
  int mantissa, min_exponent;  // bits; exponent of the smallest subnormal
  std::uint16_t infinity;
  float (*widen)(std::uint16_t);
  std::uint16_t (*narrow)(float);
};

const Type kTypes[] = {
    {10, -24, 0x7c00, [](std::uint16_t b) { return f16_to_f32(b); },
     [](float v) { return f32_to_f16(v); }},
    {7, -133, 0x7f80, [](std::uint16_t b) { return bf16_to_f32(b); },
     [](float v) { return f32_to_bf16(v); }},
};

// By the definition of the format, in long double; finite patterns only.
long double value_of(const Type& t, std::uint16_t bits) {
  const int exponent = (bits & 0x7fff) >> t.mantissa;
  const int fraction = bits & ((1 << t.mantissa) - 1);
  const long double magnitude =
      exponent == 0 ? std::ldexp(static_cast<long double>(fraction), t.min_exponent)
                    : std::ldexp(static_cast<long double>(fraction + (1 << t.mantissa)),
                                 t.min_exponent + exponent - 1);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

bool is_nan(const Type& t, std::uint16_t bits) { return (bits & 0x7fff) > t.infinity; }

void check_all_patterns() {
  for (const Type& t : kTypes) {
    for (std::uint32_t i = 0; i < 65536; ++i) {
      const auto bits = static_cast<std::uint16_t>(i);
      const float wide = t.widen(bits);
      const auto wide_bits = std::bit_cast<std::uint32_t>(wide);
      ASSERT_EQ(wide_bits >> 31, i >> 15) << "sign of " << i;
      if (is_nan(t, bits)) {
        ASSERT_GT(wide_bits & 0x7fffffff, 0x7f800000U) << i;
        ASSERT_TRUE(is_nan(t, t.narrow(wide))) << i;
        ASSERT_EQ(t.narrow(wide) & 0x8000, bits & 0x8000) << i;
        continue;
      }
      if ((bits & 0x7fff) == t.infinity) {
        ASSERT_EQ(wide_bits & 0x7fffffff, 0x7f800000U);
      } else {
        // Compared as patterns: comparing floats could flush them.
        ASSERT_EQ(wide_bits, std::bit_cast<std::uint32_t>(static_cast<float>(value_of(t, bits))))
            << i;
      }
      ASSERT_EQ(t.narrow(wide), bits) << "not itself after a round trip";
    }
  }
}

TEST(FloatBits, AllPatternsBothWays) { check_all_patterns(); }

TEST(FloatBits, EveryRoundingBoundary) {
  for (const Type& t : kTypes) {
    for (std::uint16_t bits = 0; bits < t.infinity; ++bits) {
      const auto next = static_cast<std::uint16_t>(bits + 1);
      // The middle between two neighbours is a float (the last one's upper neighbour is what
      // would follow it, were it not infinity).
      const long double low = value_of(t, bits);
      const long double high =
          next == t.infinity ? 2 * low - value_of(t, bits - 1) : value_of(t, next);
      const auto middle = static_cast<float>((low + high) / 2);
      ASSERT_EQ(static_cast<long double>(middle), (low + high) / 2);
      const float below = std::nextafter(middle, 0.0F);
      const float above = std::nextafter(middle, std::numeric_limits<float>::infinity());
      const std::uint16_t even = bits % 2 == 0 ? bits : next;
      ASSERT_EQ(t.narrow(middle), even) << bits;
      ASSERT_EQ(t.narrow(below), bits);
      ASSERT_EQ(t.narrow(above), next);
      ASSERT_EQ(t.narrow(-middle), even | 0x8000);
      ASSERT_EQ(t.narrow(-below), bits | 0x8000);
      ASSERT_EQ(t.narrow(-above), next | 0x8000);
    }
  }
}

TEST(FloatBits, OverflowUnderflowAndNan) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kMax = std::numeric_limits<float>::max();
  EXPECT_EQ(f32_to_f16(65504.0F), 0x7bff);
  EXPECT_EQ(f32_to_f16(65519.996F), 0x7bff);
  EXPECT_EQ(f32_to_f16(65520.0F), 0x7c00);
  EXPECT_EQ(f32_to_f16(kMax), 0x7c00);
  EXPECT_EQ(f32_to_f16(-kInf), 0xfc00);
  EXPECT_EQ(f32_to_f16(0x1p-25F), 0x0000);  // a tie, to even
  EXPECT_EQ(f32_to_f16(0x1.000002p-25F), 0x0001);
  EXPECT_EQ(f32_to_f16(-0x1p-149F), 0x8000);
  EXPECT_EQ(f32_to_bf16(kMax), 0x7f80);
  EXPECT_EQ(f32_to_bf16(-kInf), 0xff80);
  EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x7f7f7fffU)), 0x7f7f);
  EXPECT_EQ(f32_to_bf16(0x1p-149F), 0x0000);
  // NaN stays NaN and becomes quiet, with its sign, whichever bits its payload has.
  for (std::uint32_t bit = 0; bit < 23; ++bit) {
    for (const std::uint32_t sign : {0U, 0x80000000U}) {
      const float nan = std::bit_cast<float>(sign | 0x7f800000U | 1U << bit);
      for (const Type& t : kTypes) {
        const std::uint16_t got = t.narrow(nan);
        EXPECT_TRUE(is_nan(t, got)) << bit;
        EXPECT_EQ(got >> 15, sign >> 31);
        EXPECT_NE(got & (1 << (t.mantissa - 1)), 0) << "signalling";
      }
    }
  }
}

// Round to nearest even by the current mode of the C library, at the spacing of the format.
std::uint16_t narrow_by_library(const Type& t, float value) {
  const long double magnitude = std::fabs(static_cast<long double>(value));
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int ulp = std::max(exponent - 1 - t.mantissa, t.min_exponent);
  const long double units = std::nearbyint(std::ldexp(magnitude, -ulp));
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  // Units count on from the smallest subnormal's multiples, over a carry as well.
  const auto bits = static_cast<long double>(
      units + static_cast<long double>(ulp - t.min_exponent) * (1 << t.mantissa));
  return static_cast<std::uint16_t>(
      sign | (bits >= t.infinity ? t.infinity : static_cast<std::uint16_t>(bits)));
}

TEST(FloatBits, RandomFloatsAgainstTheLibrary) {
  std::mt19937 random(1);
  for (int i = 0; i < 500000; ++i) {
    const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (!std::isfinite(value)) continue;
    for (const Type& t : kTypes) {
      ASSERT_EQ(t.narrow(value), narrow_by_library(t, value)) << std::hexfloat << value;
    }
  }
}

#if defined(__x86_64__)
TEST(FloatBits, WhateverTheEnvironmentFlushesOrRounds) {
  const unsigned before = _mm_getcsr();
  for (const unsigned settings : {0x9fc0U, 0x3f80U, 0x5f80U, 0x7f80U}) {
    _mm_setcsr(settings);
    check_all_patterns();
    const std::uint16_t tie = f32_to_f16(65520.0F), small = f32_to_bf16(0x1p-133F);
    _mm_setcsr(before);
    EXPECT_EQ(tie, 0x7c00);
    EXPECT_EQ(small, 0x0001);
  }
}
#endif

}  // namespace
}  // namespace fusedmoe
