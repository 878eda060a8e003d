// Scales and offsets of a segment as vectors of 16 outputs: what segments.h defines, for AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "backends/cpu/kernels/kernels.h"
#include "formats/float_bits.h"

namespace fusedmoe::cpu {

// Sixteen e4m3 as f16, whose exponent has another bias, times 2^8; 0x7f and 0xff are NaN.
FUSEDMOE_INLINE __m512 e4m3_vector(__m128i codes) {
  const __m256i words = _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8);
  const __m256i sign = _mm256_and_si256(words, _mm256_set1_epi16(static_cast<short>(0x8000)));
  const __m256i magnitude =
      _mm256_andnot_si256(_mm256_set1_epi16(static_cast<short>(0x8000)), words);
  const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f00)),
                                       _mm256_set1_epi16(0x7e00));
  const __m256i half = _mm256_or_si256(_mm256_or_si256(sign, nan), _mm256_srli_epi16(magnitude, 1));
  return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0F));
}

FUSEDMOE_INLINE __m128i load_bytes(const std::byte* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
FUSEDMOE_INLINE __m512 half_vector(const std::byte* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

FUSEDMOE_INLINE __m512 scale_vector(SegmentLayout::Scale type, const std::byte* record,
                                    const std::byte* super, int half) {
  using Scale = SegmentLayout::Scale;
  switch (type) {
    case Scale::f32:
      return _mm512_loadu_ps(reinterpret_cast<const float*>(record) + half * 16);
    case Scale::f16:
      return half_vector(record + half * 32);
    case Scale::bf16: {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(record + half * 32));
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    case Scale::e8m0: {  // 0 comes out as zero, as subnormals do here; 255 is NaN, not infinity
      const __m512i code = _mm512_cvtepu8_epi32(load_bytes(record + half * 16));
      const __mmask16 nan = _mm512_cmpeq_epi32_mask(code, _mm512_set1_epi32(255));
      return _mm512_castsi512_ps(
          _mm512_mask_mov_epi32(_mm512_slli_epi32(code, 23), nan, _mm512_set1_epi32(0x7fc00000)));
    }
    case Scale::e4m3:
      return e4m3_vector(load_bytes(record + half * 16));
    case Scale::six_bits:
      return _mm512_mul_ps(
          half_vector(super + half * 32),
          _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_bytes(record + half * 16))));
    case Scale::signed_bits:
      return _mm512_mul_ps(
          half_vector(super + half * 32),
          _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes(record + half * 16))));
    case Scale::one:
      break;
  }
  return _mm512_set1_ps(1.0F);
}

// Scales and offsets of some segments as fp32, before the rows need them: [segments][2][32].
class SegmentScales {
 public:
  static constexpr std::int64_t kMost = 32;  // 8 KiB, in L1

  // Segments [first, first + count) of a piece.
  FUSEDMOE_INLINE void load(const Segments& segments, std::int64_t first, std::int64_t count) {
    using Scale = SegmentLayout::Scale;
    switch (segments.layout.scale) {  // outside of the loop
      case Scale::one:
        return load<Scale::one>(segments, first, count);
      case Scale::f32:
        return load<Scale::f32>(segments, first, count);
      case Scale::f16:
        return load<Scale::f16>(segments, first, count);
      case Scale::bf16:
        return load<Scale::bf16>(segments, first, count);
      case Scale::e8m0:
        return load<Scale::e8m0>(segments, first, count);
      case Scale::e4m3:
        return load<Scale::e4m3>(segments, first, count);
      case Scale::six_bits:
        return load<Scale::six_bits>(segments, first, count);
      case Scale::signed_bits:
        return load<Scale::signed_bits>(segments, first, count);
    }
  }
  const float* data() const { return values_; }

 private:
  template <SegmentLayout::Scale kScale>
  FUSEDMOE_INLINE void load(const Segments& segments, std::int64_t first, std::int64_t count) {
    const SegmentLayout layout = segments.layout;
    const std::int64_t record_bytes = layout.record_bytes();
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t index = first + i;
      const std::byte* record = segments.records + index * record_bytes;
      const std::byte* super =
          segments.supers + index * layout.k / SegmentLayout::kSuperK * layout.super_bytes();
      const std::byte* more = record + record_bytes - kPanelOutputs;
      for (int half = 0; half < 2; ++half) {
        const __m512 scale = layout.per_half
                                 ? _mm512_set1_ps(reinterpret_cast<const float*>(record)[half])
                                 : scale_vector(kScale, record, super, half);
        float* to = values_ + i * 64 + half * 16;
        _mm512_store_ps(to, scale);
        if (layout.has_offsets()) {
          _mm512_store_ps(to + 32, offset_vector(layout.offset, scale, more, super, half));
        }
      }
    }
  }

  FUSEDMOE_INLINE static __m512 offset_vector(SegmentLayout::Offset type, __m512 scale,
                                              const std::byte* more, const std::byte* super,
                                              int half) {
    const __m512 code = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_bytes(more + half * 16)));
    const __m512 unit =
        type == SegmentLayout::Offset::minima ? half_vector(super + 64 + half * 32) : scale;
    return _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(code, unit));
  }

  alignas(64) float values_[kMost * 64];
};

}  // namespace fusedmoe::cpu
