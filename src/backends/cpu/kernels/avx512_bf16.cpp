// Kernels for AVX-512 BF16: vdpbf16ps adds the products of 16 pairs of bf16 to 16 fp32 sums. Codes
// of eight and four bits become bf16, which holds each of them exactly, by table (VBMI's byte
// shuffles).
#include <immintrin.h>

#include <array>
#include <cstdint>

#include "backends/cpu/kernels/bf16_weights.h"
#include "backends/cpu/kernels/blocked_kernels.h"
#include "backends/cpu/kernels/codes.h"
#include "backends/cpu/kernels/declarations.h"

namespace fusedmoe::cpu {
namespace {

struct DotArithmetic : SumsInOrder {
  using Vector = __m512bh;
  using Sum = __m512;
  static constexpr int kUnits = 2;
  static constexpr int kLineUnits = 1;
  static constexpr bool kTwoSegments = false;
  static constexpr int kInlineRows = kBlockRows;
  static constexpr std::int64_t kLineBytes = 64;
  FUSEDMOE_INLINE static Vector broadcast(const std::uint32_t* a) {
    return (__m512bh)_mm512_set1_epi32(static_cast<int>(*a));
  }
  FUSEDMOE_INLINE static Sum zero() { return _mm512_setzero_ps(); }
  FUSEDMOE_INLINE static Sum add(Sum sum, Vector x, Vector w) {
    return _mm512_dpbf16_ps(sum, x, w);
  }
  FUSEDMOE_INLINE static __m512 to_f32(Sum sum, const std::uint32_t*, int) { return sum; }
  FUSEDMOE_INLINE static __m512 row_sum(const std::uint32_t* sums, int row) {
    return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(sums[row])));
  }
};

struct DotStep : DotArithmetic {
  using Wide = DotStep;
  static constexpr std::int64_t kLineBytes = 128;
  // The hardware follows by itself: 512 bytes to 32 KiB ahead cost 4 to 10 % (1 and 4 tokens, Zen
  // 4).
  static constexpr std::int64_t kAhead = 0;
  FUSEDMOE_INLINE static void weights(const char* line, int, Vector (&w)[2]) {
    w[0] = (__m512bh)_mm512_loadu_si512(line);
    w[1] = (__m512bh)_mm512_loadu_si512(line + 64);
  }
};

// 1 token of qwen3-30b-a3b with codes prefetched 1, 4, 8, 16 and 32 KiB ahead, Zen 5: mxfp4 533,
// 362, 306, 313, 338 us; fp8 in blocks 616, 525, 491, 499, 738 us.
constexpr std::int64_t kCodesAhead = 8192;

// Codes of eight bits: a line is a pair of k, zipped (codes.h).
struct Fp8Step : DotArithmetic {
  using Wide = DotStep;
  static constexpr std::int64_t kAhead = kCodesAhead;
  const ByteTables& tables;
  explicit Fp8Step(const ByteTables& of_code) : tables(of_code) {}
  static Wide wide() { return {}; }
  FUSEDMOE_INLINE void weights(const char* line, int, Vector (&w)[2]) const {
    widen_fp8(tables, line, w);
  }
};
struct S8Step : DotArithmetic {
  using Wide = DotStep;
  static constexpr std::int64_t kAhead = kCodesAhead;
  static Wide wide() { return {}; }
  FUSEDMOE_INLINE static void weights(const char* line, int, Vector (&w)[2]) { widen_s8(line, w); }
};

// Codes of four bits: a line is four k, in four planes.
struct NibbleStep : DotArithmetic {
  using Wide = DotStep;
  static constexpr int kLineUnits = 2;
  static constexpr bool kTwoSegments = true;
  static constexpr std::int64_t kAhead = kCodesAhead;
  NibbleWeights nibbles;
  explicit NibbleStep(const std::array<float, 16>& values) : nibbles(values) {}
  static Wide wide() { return {}; }
  FUSEDMOE_INLINE void weights(const char* line, int i, Vector (&w)[2]) const {
    nibbles.widen(line, i, w);
  }
};

template <Code kCode>
FUSEDMOE_INLINE void gemm_code(const GemmTile& tile) {
  if constexpr (bits_of(kCode) == 16) {
    gemm_panel(tile, DotStep{});
  } else if constexpr (bits_of(kCode) == 4) {
    gemm_panel(tile, NibbleStep(nibble_values<kCode>(tile.segments.layout.offset)));
  } else if constexpr (kCode == Code::s8) {
    gemm_panel(tile, S8Step{});
  } else {
    gemm_panel(tile, Fp8Step(kCode == Code::e4m3 ? kE4m3 : kE5m2));
  }
}

// Rows of bf16 in pairs; behind an odd k a zero, whatever lies there.
struct PairedRows {
  static constexpr int kUnits = 2;
  const LoadRows& rows;
  FUSEDMOE_INLINE static __m512 zero() { return _mm512_setzero_ps(); }
  FUSEDMOE_INLINE static __m512 add(__m512 sum, __m512i unit) {
    return _mm512_dpbf16_ps(sum, (__m512bh)unit, (__m512bh)_mm512_set1_epi16(0x3f80));
  }
  FUSEDMOE_INLINE __m512i load(int row, std::int64_t k, std::int64_t left) const {
    const __mmask32 mask = left < 32 ? (std::uint32_t{1} << left) - 1 : ~std::uint32_t{0};
    return _mm512_maskz_loadu_epi16(mask, static_cast<const std::uint16_t*>(rows.from[row]) + k);
  }
};

}  // namespace

#define FUSEDMOE_ONLY FUSEDMOE_AVX512_BF16
#define FUSEDMOE_GEMM(isa, format, dtype, recipe)    \
  void gemm_##isa##_##format(const GemmTile& tile) { \
    gemm_code<code_of(WeightFormat::format)>(tile);  \
  }
#include "backends/cpu/kernels/kernels.inc"

void load_rows_avx512_bf16_bf16(const LoadRows& rows) { load_blocks(rows, PairedRows{rows}); }

}  // namespace fusedmoe::cpu
