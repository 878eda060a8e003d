// Codes of eight and four bits as vectors of bf16, which holds each of them exactly: by table, with
// the byte shuffles of AVX-512 VBMI. Pairs of k of outputs 0 to 15, and of 16 to 31.
#pragma once

#include <immintrin.h>

#include <array>
#include <bit>
#include <cstdint>

#include "backends/cpu/kernels/codes.h"
#include "backends/cpu/kernels/kernels.h"
#include "formats/float_bits.h"
#include "formats/small_floats.h"

namespace fusedmoe::cpu {

constexpr std::uint16_t bf16_bits(float value) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}

// The halves of bf16 of codes [0, 128) and [128, 256).
struct ByteTables {
  alignas(64) std::array<std::uint8_t, 256> low{};
  alignas(64) std::array<std::uint8_t, 256> high{};
};
template <class Value>
constexpr ByteTables byte_tables(const Value& value) {
  ByteTables tables;
  for (unsigned code = 0; code < 256; ++code) {
    const std::uint16_t bits = bf16_bits(value(static_cast<std::uint8_t>(code)));
    tables.low[code] = static_cast<std::uint8_t>(bits);
    tables.high[code] = static_cast<std::uint8_t>(bits >> 8);
  }
  return tables;
}
static constexpr ByteTables kE4m3 =
    byte_tables([](std::uint8_t code) { return e4m3_to_f32(code); });
static constexpr ByteTables kE5m2 =
    byte_tables([](std::uint8_t code) { return e5m2_to_f32(code); });
static constexpr ByteTables kS8 = byte_tables(
    [](std::uint8_t code) { return static_cast<float>(static_cast<std::int8_t>(code)); });

FUSEDMOE_INLINE __m512i lookup(const std::uint8_t* table, __m512i codes) {  // seven bits of each
  return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
}

// Codes of eight bits: a line is a pair of k, zipped (codes.h). Of fp8 the sign stays where it is.
FUSEDMOE_INLINE void widen_fp8(const ByteTables& tables, const char* line, __m512bh (&w)[2]) {
  const __m512i codes = _mm512_loadu_si512(line);
  const __m512i low = lookup(tables.low.data(), codes);
  // high | (codes & 0x80)
  const __m512i high = _mm512_ternarylogic_epi32(lookup(tables.high.data(), codes), codes,
                                                 _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
  w[0] = (__m512bh)_mm512_unpacklo_epi8(low, high);
  w[1] = (__m512bh)_mm512_unpackhi_epi8(low, high);
}

// Of int8, magnitude and sign; -128 has a magnitude of eight bits.
FUSEDMOE_INLINE void widen_s8(const char* line, __m512bh (&w)[2]) {
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  const __m512i codes = _mm512_loadu_si512(line);
  const __m512i magnitude = _mm512_abs_epi8(codes);
  const __m512i low = lookup(kS8.low.data(), magnitude);
  const __m512i positive = lookup(kS8.high.data(), magnitude);
  const __m512i high = _mm512_mask_mov_epi8(
      _mm512_ternarylogic_epi32(positive, codes, sign, 0xf8),  // positive | (codes & sign)
      _mm512_cmpeq_epi8_mask(codes, sign),
      _mm512_set1_epi8(static_cast<char>(bf16_bits(-128.0F) >> 8)));
  w[0] = (__m512bh)_mm512_unpacklo_epi8(low, high);
  w[1] = (__m512bh)_mm512_unpackhi_epi8(low, high);
}

// Codes of four bits: a line is four k, in four planes.
struct NibbleWeights {
  __m512i values;  // twice: the shuffle looks at five bits
  FUSEDMOE_INLINE explicit NibbleWeights(const std::array<float, 16>& of_codes) {
    const __m512i bits = _mm512_castps_si512(_mm512_loadu_ps(of_codes.data()));
    values = _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
  }
  FUSEDMOE_INLINE void widen(const char* line, int i, __m512bh (&w)[2]) const {
    const __m512i lanes = _mm512_loadu_si512(line);
    w[0] = (__m512bh)_mm512_permutexvar_epi16(
        _mm512_srli_epi16(lanes, static_cast<unsigned>(8 * i)), values);
    w[1] = (__m512bh)_mm512_permutexvar_epi16(
        _mm512_srli_epi16(lanes, static_cast<unsigned>(8 * i + 4)), values);
  }
};

}  // namespace fusedmoe::cpu
