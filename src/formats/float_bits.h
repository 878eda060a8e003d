// f16 and bf16 as bit patterns: scalar conversions by integer arithmetic, so that they hold
// whatever the floating-point environment flushes. Every function is forced inline: units for
// different instruction sets include this file, and none may hand its copy to the others.
#pragma once

#include <bit>
#include <cstdint>

namespace fusedmoe {

#define FUSEDMOE_INLINE [[gnu::always_inline]] inline

FUSEDMOE_INLINE float bf16_to_f32(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// Round to nearest even; NaN stays NaN, quiet.
FUSEDMOE_INLINE std::uint16_t f32_to_bf16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>(bits >> 16 | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

FUSEDMOE_INLINE constexpr float f16_to_f32(std::uint16_t bits) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
  const std::uint32_t exponent = bits >> 10 & 0x1fU;
  std::uint32_t mantissa = bits & 0x3ffU;
  if (exponent == 0x1f) {  // infinity and NaN
    return std::bit_cast<float>(sign | 0x7f800000U | mantissa << 13 |
                                (mantissa != 0 ? 0x400000U : 0U));
  }
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  if (mantissa == 0) return std::bit_cast<float>(sign);
  // Subnormal in f16, normal in f32: shift its leading bit to where it is implied.
  const int shift = std::countl_zero(mantissa) - 21;
  mantissa = mantissa << shift & 0x3ffU;
  return std::bit_cast<float>(sign | static_cast<std::uint32_t>(113 - shift) << 23 |
                              mantissa << 13);
}

// Round to nearest even; overflow gives infinity, NaN stays NaN, quiet.
FUSEDMOE_INLINE std::uint16_t f32_to_f16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) {
    return static_cast<std::uint16_t>(sign | 0x7e00U | (magnitude >> 13 & 0x3ffU));
  }
  if (magnitude >= 0x477ff000U) return static_cast<std::uint16_t>(sign | 0x7c00U);
  if (magnitude >= 0x38800000U) {  // normal in f16
    const std::uint32_t rounded = magnitude + 0xfffU + (magnitude >> 13 & 1U);
    return static_cast<std::uint16_t>(sign | (rounded - 0x38000000U) >> 13);
  }
  if (magnitude <= 0x33000000U) return sign;  // at most half of the smallest subnormal
  const int shift = 126 - static_cast<int>(magnitude >> 23);
  const std::uint32_t mantissa = (magnitude & 0x7fffffU) | 0x800000U;
  const std::uint32_t half = 1U << (shift - 1);
  const std::uint32_t odd = mantissa >> shift & 1U;
  return static_cast<std::uint16_t>(sign | (mantissa + half - 1 + odd) >> shift);
}

}  // namespace fusedmoe
