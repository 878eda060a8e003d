// Mode a8: rows of floats as signed bytes, with AVX-512: what quantise_rows.h defines.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstdint>

#include "backends/cpu/kernels/kernels.h"
#include "backends/cpu/kernels/quantise_rows.h"
#include "formats/float_bits.h"

namespace fusedmoe::cpu {

// Sixteen values of a row; zeros where mask has none.
FUSEDMOE_INLINE __m512 widened(const void* row, DType dtype, std::int64_t k, __mmask16 mask) {
  if (dtype == DType::f32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(row) + k);
  const __m256i half = _mm256_maskz_loadu_epi16(mask, static_cast<const std::uint16_t*>(row) + k);
  if (dtype == DType::f16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

FUSEDMOE_INLINE __mmask16 first(std::int64_t count) {
  return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1U << count) - 1);
}

// Rows as bytes, four to a unit.
struct ByteRows {
  static constexpr int kUnits = 4;
  static constexpr int kMostRows = 256;
  const LoadRows& rows;
  float inverse[kMostRows];

  FUSEDMOE_INLINE explicit ByteRows(const LoadRows& all) : rows(all) {
    for (int r = 0; r < rows.rows; ++r) {
      // Compared as integers, so that a NaN is the largest of all.
      __m512i largest = _mm512_setzero_si512();
      for (std::int64_t k = 0; k < rows.row_k; k += 16) {
        const __m512 x = _mm512_abs_ps(widened(rows.from[r], rows.dtype, k, first(rows.row_k - k)));
        largest = _mm512_max_epi32(largest, _mm512_castps_si512(x));
      }
      const int bits = _mm512_reduce_max_epi32(largest);
      const RowScale scale = row_scale(std::bit_cast<float>(bits));
      rows.scales[r] = scale.scale;
      inverse[r] = scale.inverse;
    }
  }
  FUSEDMOE_INLINE __m512i load(int row, std::int64_t k, std::int64_t left) const {
    __m128i bytes[4];
    for (int i = 0; i < 4; ++i) {
      const __m512 x = widened(rows.from[row], rows.dtype, k + 16 * i, first(left - 16 * i));
      const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverse[row])));
      bytes[i] = _mm512_cvtsepi32_epi8(whole);
    }
    const __m256i low = _mm256_set_m128i(bytes[1], bytes[0]);
    const __m256i high = _mm256_set_m128i(bytes[3], bytes[2]);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
};

}  // namespace fusedmoe::cpu
