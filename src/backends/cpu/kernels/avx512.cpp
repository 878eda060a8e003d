// Kernels for AVX-512 (F, BW, DQ, VL) in fp32: sixteen floats at a time.
#include <immintrin.h>

#include <array>
#include <cstdint>

#include "backends/cpu/kernels/blocked_kernels.h"
#include "backends/cpu/kernels/codes.h"
#include "backends/cpu/kernels/declarations.h"
#include "backends/cpu/kernels/float_kernels.h"

namespace fusedmoe::cpu {
namespace {

struct F32x16 {
  static constexpr int kWidth = 16;
  __m512 v;

  F32x16() = default;
  explicit F32x16(float value) : v(_mm512_set1_ps(value)) {}
  explicit F32x16(__m512 value) : v(value) {}
  static F32x16 load(const float* p) { return F32x16(_mm512_loadu_ps(p)); }
  static F32x16 load_f16(const std::uint16_t* p) {
    return F32x16(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
  }
  static F32x16 load_bf16(const std::uint16_t* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return F32x16(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store_f16(std::uint16_t* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  void store_bf16(std::uint16_t* p) const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    // Rounding could carry a NaN into the sign: make it quiet instead.
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
  }

  friend F32x16 operator+(F32x16 a, F32x16 b) { return F32x16(_mm512_add_ps(a.v, b.v)); }
  friend F32x16 operator-(F32x16 a, F32x16 b) { return F32x16(_mm512_sub_ps(a.v, b.v)); }
  friend F32x16 operator*(F32x16 a, F32x16 b) { return F32x16(_mm512_mul_ps(a.v, b.v)); }
  friend F32x16 operator/(F32x16 a, F32x16 b) { return F32x16(_mm512_div_ps(a.v, b.v)); }
  friend F32x16 operator-(F32x16 a) { return F32x16(_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0F))); }
  // minps and maxps return their second operand when one is a NaN.
  friend F32x16 at_most(F32x16 x, F32x16 limit) { return F32x16(_mm512_min_ps(limit.v, x.v)); }
  friend F32x16 at_least(F32x16 x, F32x16 limit) { return F32x16(_mm512_max_ps(limit.v, x.v)); }
  friend F32x16 abs(F32x16 x) { return F32x16(_mm512_andnot_ps(_mm512_set1_ps(-0.0F), x.v)); }
  friend F32x16 copy_sign(F32x16 x, F32x16 sign) {
    const __m512 mask = _mm512_set1_ps(-0.0F);
    return F32x16(_mm512_or_ps(_mm512_andnot_ps(mask, x.v), _mm512_and_ps(mask, sign.v)));
  }
  friend F32x16 select_less(F32x16 a, F32x16 b, F32x16 x, F32x16 y) {
    return F32x16(_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v));
  }
  friend F32x16 round_even(F32x16 x) {
    return F32x16(_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  friend F32x16 pow2(F32x16 n) {
    const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return F32x16(_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23)));
  }
};

// 1 token, GB/s with weights prefetched 0, 1024, 4096 and 16384 bytes ahead: 41.6, 47.3, 49.5
// and 48.3 (Xeon), 45.1, 44.5 and 46.1 (Zen 4, without the last).
constexpr std::int64_t kWeightsAhead = 4096;

struct FmaArithmetic {
  using Vector = __m512;
  using Sum = __m512;
  static constexpr int kUnits = 1;
  static constexpr int kLineUnits = 1;
  static constexpr bool kTwoSegments = false;
  static constexpr int kInlineRows = kBlockRows;
  static constexpr std::int64_t kAhead = kWeightsAhead;
  FUSEDMOE_INLINE static Vector broadcast(const std::uint32_t* a) {
    return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(*a)));
  }
  FUSEDMOE_INLINE static Sum zero() { return _mm512_setzero_ps(); }
  FUSEDMOE_INLINE static Sum add(Sum sum, Vector x, Vector w) { return _mm512_fmadd_ps(x, w, sum); }
  FUSEDMOE_INLINE static __m512 to_f32(Sum sum, const std::uint32_t*, int) { return sum; }
  FUSEDMOE_INLINE static __m512 row_sum(const std::uint32_t* sums, int row) {
    return broadcast(sums + row);
  }
};

template <Code kCode>
struct FmaStep;

template <>
struct FmaStep<Code::f32> : FmaArithmetic, SumsInOrder {
  using Wide = FmaStep;
  static constexpr std::int64_t kLineBytes = 128;
  FUSEDMOE_INLINE static void weights(const char* line, int, Vector (&w)[2]) {
    w[0] = _mm512_loadu_ps(line);
    w[1] = _mm512_loadu_ps(line + 64);
  }
};

template <>
struct FmaStep<Code::f16> : FmaArithmetic, SumsInOrder {
  using Wide = FmaStep;
  static constexpr std::int64_t kLineBytes = 64;
  FUSEDMOE_INLINE static void weights(const char* line, int, Vector (&w)[2]) {
    w[0] = F32x16::load_f16(reinterpret_cast<const std::uint16_t*>(line)).v;
    w[1] = F32x16::load_f16(reinterpret_cast<const std::uint16_t*>(line) + 16).v;
  }
};

// Even and odd columns apart: each is one operation away from fp32, where columns in order take
// two.
template <>
struct FmaStep<Code::bf16> : FmaArithmetic {
  using Wide = FmaStep;
  static constexpr std::int64_t kLineBytes = 64;
  FUSEDMOE_INLINE static void weights(const char* line, int, Vector (&w)[2]) {
    const __m512i pairs = _mm512_loadu_si512(line);
    w[0] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    w[1] = _mm512_castsi512_ps(
        _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000U))));
  }
  FUSEDMOE_INLINE static void load_sums(const float* from, __m512 (&sums)[2]) {
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512 low = _mm512_loadu_ps(from);
    const __m512 high = _mm512_loadu_ps(from + 16);
    sums[0] = _mm512_permutex2var_ps(low, even, high);
    sums[1] = _mm512_permutex2var_ps(low, _mm512_or_si512(even, _mm512_set1_epi32(1)), high);
  }
  FUSEDMOE_INLINE static void store_sums(const __m512 (&sums)[2], float* to) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    _mm512_storeu_ps(to, _mm512_permutex2var_ps(sums[0], low, sums[1]));
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(sums[0], high, sums[1]));
  }
};

// Codes of eight bits: a line is two k.
template <Code kCode>
requires(bits_of(kCode) == 8) struct FmaStep<kCode> : FmaArithmetic, SumsInOrder {
  using Wide = FmaStep<Code::f32>;
  static constexpr int kInlineRows = kRowsThatPrefetch - 1;
  static constexpr int kLineUnits = 2;
  static Wide wide() { return {}; }
  static constexpr std::int64_t kLineBytes = 64;
  FUSEDMOE_INLINE static Vector widen(__m128i codes) {
    if constexpr (kCode == Code::e4m3) return e4m3_vector(codes);
    if constexpr (kCode == Code::e5m2) {
      return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8));
    }
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
  }
  FUSEDMOE_INLINE static void weights(const char* line, int i, Vector (&w)[2]) {
    const auto* codes = reinterpret_cast<const std::byte*>(line) + i * 32;
    w[0] = widen(load_bytes(codes));
    w[1] = widen(load_bytes(codes + 16));
  }
};

// Codes of four bits: a line is four k, in eight planes.
struct NibbleStep : FmaArithmetic, SumsInOrder {
  using Wide = FmaStep<Code::f32>;
  static constexpr int kInlineRows = kRowsThatPrefetch - 1;
  static constexpr int kLineUnits = 4;
  static constexpr bool kTwoSegments = true;
  static constexpr std::int64_t kLineBytes = 64;
  __m512 values;
  explicit NibbleStep(const std::array<float, 16>& of_codes)
      : values(_mm512_loadu_ps(of_codes.data())) {}
  static Wide wide() { return {}; }
  FUSEDMOE_INLINE void weights(const char* line, int i, Vector (&w)[2]) const {
    const __m512i lanes = _mm512_loadu_si512(line);  // the shuffle looks at four bits of each
    w[0] = _mm512_permutexvar_ps(_mm512_srli_epi32(lanes, static_cast<unsigned>(8 * i)), values);
    w[1] =
        _mm512_permutexvar_ps(_mm512_srli_epi32(lanes, static_cast<unsigned>(8 * i + 4)), values);
  }
};

template <Code kCode>
FUSEDMOE_INLINE void gemm_code(const GemmTile& tile) {
  if constexpr (bits_of(kCode) == 4) {
    gemm_panel(tile, NibbleStep(nibble_values<kCode>(tile.segments.layout.offset)));
  } else {
    gemm_panel(tile, FmaStep<kCode>{});
  }
}

// Rows of any dtype, widened to fp32.
struct WidenedRows {
  static constexpr int kUnits = 1;
  const LoadRows& rows;
  FUSEDMOE_INLINE static __m512 zero() { return _mm512_setzero_ps(); }
  FUSEDMOE_INLINE static __m512 add(__m512 sum, __m512i unit) {
    return _mm512_add_ps(sum, _mm512_castsi512_ps(unit));
  }
  FUSEDMOE_INLINE __m512i load(int row, std::int64_t k, std::int64_t left) const {
    const void* from = rows.from[row];
    const DType dtype = rows.dtype;
    const auto mask = static_cast<__mmask16>(left < 16 ? (1U << left) - 1 : 0xffffU);
    if (dtype == DType::f32) {
      return _mm512_maskz_loadu_epi32(mask, static_cast<const float*>(from) + k);
    }
    const __m256i half =
        _mm256_maskz_loadu_epi16(mask, static_cast<const std::uint16_t*>(from) + k);
    if (dtype == DType::f16) return _mm512_castps_si512(_mm512_cvtph_ps(half));
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
  }
};

}  // namespace

#define FUSEDMOE_ONLY FUSEDMOE_AVX512
#define FUSEDMOE_GEMM(isa, format, dtype, recipe)    \
  void gemm_##isa##_##format(const GemmTile& tile) { \
    gemm_code<code_of(WeightFormat::format)>(tile);  \
  }
#include "backends/cpu/kernels/kernels.inc"

void load_rows_avx512_f32(const LoadRows& rows) { load_blocks(rows, WidenedRows{rows}); }
void activate_avx512(const ActivateTile& tile) { activate<F32x16>(tile); }
void combine_avx512(const CombineTile& tile) { combine<F32x16>(tile); }

}  // namespace fusedmoe::cpu
