// Mode a8: rows of floats become signed bytes, each row with a scale of its own. One value at a
// time: the definition, for kernels without vectors of their own for it.
#pragma once

#include <cmath>
#include <cstdint>

#include "backends/cpu/kernels/kernels.h"
#include "formats/float_bits.h"

namespace fusedmoe::cpu {

// What a row's bytes stand for, and its inverse. By the largest magnitude of the whole row:
//   scale = largest / 127, byte = x * (127 / largest), to nearest even.
// A row of zeros, or of numbers below 2^-100, gives zeros; one that holds infinity or NaN gives a
// scale of NaN, and so a row of NaN.
struct RowScale {
  float scale, inverse;
};

FUSEDMOE_INLINE RowScale row_scale(float largest) {
  if (!(largest < __builtin_inff())) return {__builtin_nanf(""), 0.0F};
  if (largest < 0x1p-100F) return {0.0F, 0.0F};
  return {largest / 127.0F, 127.0F / largest};
}

FUSEDMOE_INLINE float load_element(const void* row, DType dtype, std::int64_t k) {
  if (dtype == DType::f32) return static_cast<const float*>(row)[k];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(row)[k];
  return dtype == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

FUSEDMOE_INLINE RowScale row_scale(const void* row, DType dtype, std::int64_t row_k) {
  float largest = 0.0F;
  for (std::int64_t k = 0; k < row_k; ++k) {
    const float x = std::fabs(load_element(row, dtype, k));
    if (!(x <= largest)) largest = x;  // NaN stays: nothing is less
    if (x != x) break;
  }
  return row_scale(largest);
}

FUSEDMOE_INLINE std::int8_t quantise(float x, float inverse) {
  // The magic number 1.5 * 2^23 rounds to nearest even; |x * inverse| <= 127.
  const float rounded = (x * inverse + 12582912.0F) - 12582912.0F;
  if (!(std::fabs(rounded) <= 127.0F)) return 0;  // of a row whose scale is NaN
  return static_cast<std::int8_t>(rounded);
}

}  // namespace fusedmoe::cpu
