// Kernels for AVX2 with FMA and F16C: eight floats at a time, tiles of 3 rows x 32 outputs (12
// accumulators, 3 broadcast inputs and one vector of weights fill the 16 registers).
#include <immintrin.h>

#include <array>
#include <cstdint>

#include "backends/cpu/kernels/declarations.h"
#include "backends/cpu/kernels/float_kernels.h"

namespace fusedmoe::cpu {
namespace {

struct F32x8 {
  static constexpr int kWidth = 8;
  __m256 v;

  F32x8() = default;
  explicit F32x8(float value) : v(_mm256_set1_ps(value)) {}
  explicit F32x8(__m256 value) : v(value) {}
  static F32x8 load(const float* p) { return F32x8(_mm256_loadu_ps(p)); }
  static F32x8 load_f16(const std::uint16_t* p) {
    return F32x8(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  // One shuffle puts each pattern into the upper half of its lane: widening and shifting would take
  // two operations from the ports that multiply (92 against 116 GFLOP/s on Zen 4). The order stays
  // in memory, by asm, since a 17th register would spill an accumulator (51 GFLOP/s).
  static F32x8 load_bf16(const std::uint16_t* p) {
    alignas(32) static constexpr signed char kOrder[32] = {
        -1, -1, 0, 1, -1, -1, 2,  3,  -1, -1, 4,  5,  -1, -1, 6,  7,
        -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15};
    const __m256i bits =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    __m256 value;
    asm("vpshufb %2, %1, %0"
        : "=x"(value)
        : "x"(bits), "m"(*reinterpret_cast<const __m256i*>(kOrder)));
    return F32x8(value);
  }
  // The values of the sixteen codes of four bits, in halves: a shuffle looks at three bits.
  struct Table {
    __m256 low, high;
    explicit Table(const std::array<float, 16>& values)
        : low(_mm256_loadu_ps(values.data())), high(_mm256_loadu_ps(values.data() + 8)) {}
  };
  template <Code kCode>
  static F32x8 codes(const void* panel, std::int64_t k, int output, const Table& table) {
    const std::int64_t index = k * kPanelOutputs + output;
    const auto bytes = [&] {
      return _mm_loadl_epi64(
          reinterpret_cast<const __m128i*>(static_cast<const char*>(panel) + index));
    };
    if constexpr (kCode == Code::f32) {
      return load(static_cast<const float*>(panel) + index);
    } else if constexpr (kCode == Code::f16) {
      return load_f16(static_cast<const std::uint16_t*>(panel) + index);
    } else if constexpr (kCode == Code::bf16) {
      return load_bf16(static_cast<const std::uint16_t*>(panel) + index);
    } else if constexpr (bits_of(kCode) == 4) {
      // Sixteen lanes of eight codes; this is half of a plane.
      const int plane = static_cast<int>(index % 128 / 16);
      const char* line = static_cast<const char*>(panel) + index / 128 * 64 + index % 16 * 4;
      const __m256i lanes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line));
      const __m256i code = _mm256_srl_epi32(lanes, _mm_cvtsi32_si128(plane * 4));
      const __m256 top = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));  // its sign is bit 3
      return F32x8(_mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, code),
                                    _mm256_permutevar8x32_ps(table.high, code), top));
    } else if constexpr (kCode == Code::e5m2) {
      return F32x8(_mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), bytes())));
    } else if constexpr (kCode == Code::e4m3) {
      // As f16, whose exponent has another bias: times 2^8. Codes 0x7f and 0xff are NaN.
      const __m128i words = _mm_unpacklo_epi8(_mm_setzero_si128(), bytes());  // in the upper half
      const __m128i sign = _mm_and_si128(words, _mm_set1_epi16(static_cast<short>(0x8000)));
      const __m128i magnitude = _mm_andnot_si128(_mm_set1_epi16(static_cast<short>(0x8000)), words);
      const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f00));
      const __m128i half = _mm_or_si128(_mm_or_si128(sign, _mm_srli_epi16(magnitude, 1)),
                                        _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
      return F32x8(_mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0F)));
    } else {
      return F32x8(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes())));
    }
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store_f16(std::uint16_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  void store_bf16(std::uint16_t* p) const {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    // Rounding could carry a NaN into the sign: make it quiet instead.
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }

  friend F32x8 operator+(F32x8 a, F32x8 b) { return F32x8(_mm256_add_ps(a.v, b.v)); }
  friend F32x8 operator-(F32x8 a, F32x8 b) { return F32x8(_mm256_sub_ps(a.v, b.v)); }
  friend F32x8 operator*(F32x8 a, F32x8 b) { return F32x8(_mm256_mul_ps(a.v, b.v)); }
  friend F32x8 operator/(F32x8 a, F32x8 b) { return F32x8(_mm256_div_ps(a.v, b.v)); }
  friend F32x8 operator-(F32x8 a) { return F32x8(_mm256_xor_ps(a.v, _mm256_set1_ps(-0.0F))); }
  friend F32x8 multiply_add(F32x8 a, F32x8 b, F32x8 c) {
    return F32x8(_mm256_fmadd_ps(a.v, b.v, c.v));
  }
  // minps and maxps return their second operand when one is a NaN.
  friend F32x8 at_most(F32x8 x, F32x8 limit) { return F32x8(_mm256_min_ps(limit.v, x.v)); }
  friend F32x8 at_least(F32x8 x, F32x8 limit) { return F32x8(_mm256_max_ps(limit.v, x.v)); }
  friend F32x8 abs(F32x8 x) { return F32x8(_mm256_andnot_ps(_mm256_set1_ps(-0.0F), x.v)); }
  friend F32x8 copy_sign(F32x8 x, F32x8 sign) {
    const __m256 mask = _mm256_set1_ps(-0.0F);
    return F32x8(_mm256_or_ps(_mm256_andnot_ps(mask, x.v), _mm256_and_ps(mask, sign.v)));
  }
  friend F32x8 select_less(F32x8 a, F32x8 b, F32x8 x, F32x8 y) {
    return F32x8(_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)));
  }
  friend F32x8 round_even(F32x8 x) {
    return F32x8(_mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  friend F32x8 pow2(F32x8 n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
    return F32x8(_mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  }
};

constexpr int kRows = 3;

}  // namespace

#define FUSEDMOE_ONLY FUSEDMOE_AVX2_FMA
#define FUSEDMOE_GEMM(isa, format, dtype, recipe)            \
  void gemm_##isa##_##format(const GemmTile& tile) {         \
    gemm<F32x8, code_of(WeightFormat::format), kRows>(tile); \
  }
#include "backends/cpu/kernels/kernels.inc"

void load_rows_avx2_fma_f32(const LoadRows& rows) { load_rows<F32x8>(rows); }
void activate_avx2_fma(const ActivateTile& tile) { activate<F32x8>(tile); }
void combine_avx2_fma(const CombineTile& tile) { combine<F32x8>(tile); }

}  // namespace fusedmoe::cpu
