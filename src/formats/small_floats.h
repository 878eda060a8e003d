// Floats of four and eight bits as codes: scalar conversions, the definition of what a code is
// worth and of how a number becomes one. Forced inline, as float_bits.h is, and for the same
// reason.
//
// Encoding rounds to nearest even, ties to the even code, and saturates: beyond the largest finite
// value it gives that value, with its sign; NaN stays NaN where there is one, else it becomes zero.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "formats/float_bits.h"

namespace fusedmoe {

// A sign, kExponent bits, kMantissa bits; kMax is the largest finite code without its sign.
template <int kExponent, int kMantissa, int kBias, unsigned kMax>
struct SmallFloat {
  static constexpr unsigned kSign = 1U << (kExponent + kMantissa);
  static constexpr int kSmallest = 1 - kBias;  // exponent of the smallest normal and of subnormals

  // Of a finite code.
  FUSEDMOE_INLINE static constexpr float finite(unsigned code) noexcept {
    const unsigned exponent = (code & (kSign - 1)) >> kMantissa;
    unsigned mantissa = code & ((1U << kMantissa) - 1);
    if (exponent != 0) mantissa |= 1U << kMantissa;
    const int power = (exponent == 0 ? 1 : static_cast<int>(exponent)) - kBias - kMantissa;
    const float scale = std::bit_cast<float>(static_cast<std::uint32_t>(power + 127) << 23);
    const float value = static_cast<float>(mantissa) * scale;
    return (code & kSign) != 0 ? -value : value;
  }

  // Of anything but NaN.
  FUSEDMOE_INLINE static unsigned nearest(double value) noexcept {
    const unsigned sign = std::signbit(value) ? kSign : 0;
    const double magnitude = std::fabs(value);
    if (!(magnitude > 0)) return sign;
    if (magnitude >= static_cast<double>(finite(kMax))) return sign | kMax;
    int exponent = std::ilogb(magnitude);
    if (exponent < kSmallest) exponent = kSmallest;
    const double steps = std::ldexp(magnitude, kMantissa - exponent);
    auto whole = static_cast<unsigned>(steps);
    const double rest = steps - whole;
    if (rest > 0.5 || (rest == 0.5 && (whole & 1U) != 0)) ++whole;
    const unsigned code = (static_cast<unsigned>(exponent - kSmallest) << kMantissa) + whole;
    return sign | (code > kMax ? kMax : code);
  }
};

using E4m3 = SmallFloat<4, 3, 7, 0x7e>;   // no infinity; 0x7f and 0xff are NaN
using E5m2 = SmallFloat<5, 2, 15, 0x7b>;  // infinity and NaN as IEEE has them
using E2m1 = SmallFloat<2, 1, 1, 0x7>;    // 0, 0.5, 1, 1.5, 2, 3, 4, 6: neither

FUSEDMOE_INLINE constexpr float e4m3_to_f32(std::uint8_t code) noexcept {
  if ((code & 0x7fU) == 0x7fU) return std::bit_cast<float>(0x7fc00000U);
  return E4m3::finite(code);
}
FUSEDMOE_INLINE constexpr float e5m2_to_f32(std::uint8_t code) noexcept {
  return f16_to_f32(static_cast<std::uint16_t>(code << 8));
}
FUSEDMOE_INLINE float e2m1_to_f32(std::uint8_t code) noexcept { return E2m1::finite(code & 0xfU); }

// 2^(code - 127); 255 is NaN. Code 0 is a subnormal of fp32: 2^-127.
FUSEDMOE_INLINE float e8m0_to_f32(std::uint8_t code) noexcept {
  if (code == 0xff) return std::bit_cast<float>(0x7fc00000U);
  if (code == 0) return std::bit_cast<float>(0x00400000U);
  return std::bit_cast<float>(static_cast<std::uint32_t>(code) << 23);
}

inline std::uint8_t f64_to_e4m3(double value) noexcept {
  if (std::isnan(value)) return 0x7f;
  return static_cast<std::uint8_t>(E4m3::nearest(value));
}
inline std::uint8_t f64_to_e5m2(double value) noexcept {
  if (std::isnan(value)) return 0x7f;
  return static_cast<std::uint8_t>(E5m2::nearest(value));
}
inline std::uint8_t f64_to_e2m1(double value) noexcept {
  if (std::isnan(value)) return 0;
  return static_cast<std::uint8_t>(E2m1::nearest(value));
}
// The scale of a group of elements, as the OCP Microscaling specification (1.0, section 6.3) says:
// the largest power of two in it, over the largest power of two of an element.
inline std::uint8_t e8m0_scale(double largest, int largest_element_exponent) noexcept {
  if (std::isnan(largest)) return 0xff;
  if (!(largest > 0)) return 127;  // nothing but zeros: 1
  if (std::isinf(largest)) return 0xfe;
  const int exponent = std::ilogb(largest) - largest_element_exponent;
  return static_cast<std::uint8_t>(exponent < -127 ? 0 : exponent > 127 ? 254 : exponent + 127);
}

}  // namespace fusedmoe
