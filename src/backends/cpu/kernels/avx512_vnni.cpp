// Kernels for AVX-512 VNNI, mode a8: vpdpbusd adds the products of 16 fours of unsigned and signed
// bytes to 16 sums. Weights are the unsigned ones, made so by adding 128 (int8) or as they are
// (int4); what that adds to a sum is known from the sum of the row's bytes.
#include <immintrin.h>

#include <cstdint>

#include "backends/cpu/kernels/blocked_kernels.h"
#include "backends/cpu/kernels/byte_rows.h"
#include "backends/cpu/kernels/declarations.h"

namespace fusedmoe::cpu {
namespace {

struct IntegerArithmetic : SumsInOrder {
  using Vector = __m512i;
  using Sum = __m512i;
  static constexpr int kUnits = 4;
  static constexpr int kLineUnits = 1;
  static constexpr bool kTwoSegments = false;
  static constexpr int kInlineRows = kBlockRows;
  static constexpr std::int64_t kAhead = 8192;
  int added;  // to every weight

  explicit IntegerArithmetic(int to_every_weight) : added(to_every_weight) {}
  FUSEDMOE_INLINE static Vector broadcast(const std::uint32_t* a) {
    return _mm512_set1_epi32(static_cast<int>(*a));
  }
  FUSEDMOE_INLINE static Sum zero() { return _mm512_setzero_si512(); }
  // In asm: g++ 12 spills every sum of a large tile of the intrinsic, at half of the speed.
  FUSEDMOE_INLINE static Sum add(Sum sum, Vector x, Vector w) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
  }
  FUSEDMOE_INLINE __m512 to_f32(Sum sum, const std::uint32_t* row_sums, int row) const {
    const int surplus = added * static_cast<int>(row_sums[row]);
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(surplus)));
  }
  FUSEDMOE_INLINE static __m512 row_sum(const std::uint32_t* row_sums, int row) {
    return _mm512_set1_ps(static_cast<float>(static_cast<int>(row_sums[row])));
  }
};

struct SignedStep : IntegerArithmetic {
  using Wide = SignedStep;
  static constexpr std::int64_t kLineBytes = 128;
  SignedStep() : IntegerArithmetic(128) {}
  FUSEDMOE_INLINE static void weights(const char* line, int, Vector (&w)[2]) {
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    w[0] = _mm512_xor_si512(_mm512_loadu_si512(line), sign);
    w[1] = _mm512_xor_si512(_mm512_loadu_si512(line + 64), sign);
  }
};

struct WideNibbleStep : IntegerArithmetic {
  using Wide = WideNibbleStep;
  static constexpr std::int64_t kLineBytes = 128;
  explicit WideNibbleStep(int centre) : IntegerArithmetic(centre) {}
  FUSEDMOE_INLINE static void weights(const char* line, int, Vector (&w)[2]) {
    w[0] = _mm512_loadu_si512(line);
    w[1] = _mm512_loadu_si512(line + 64);
  }
};

struct NibbleStep : IntegerArithmetic {
  using Wide = WideNibbleStep;
  static constexpr bool kTwoSegments = true;
  static constexpr std::int64_t kLineBytes = 64;
  explicit NibbleStep(SegmentLayout::Offset offset)
      : IntegerArithmetic(offset == SegmentLayout::Offset::centre ? 8 : 0) {}
  Wide wide() const { return Wide(added); }
  FUSEDMOE_INLINE static void weights(const char* line, int, Vector (&w)[2]) {
    const __m512i mask = _mm512_set1_epi8(15);
    const __m512i lanes = _mm512_loadu_si512(line);
    w[0] = _mm512_and_si512(lanes, mask);
    w[1] = _mm512_and_si512(_mm512_srli_epi16(lanes, 4), mask);
  }
};

// The sum of each row's bytes, for load_blocks.
struct SummedByteRows : ByteRows {
  using ByteRows::ByteRows;
  FUSEDMOE_INLINE static __m512i zero() { return _mm512_setzero_si512(); }
  FUSEDMOE_INLINE static __m512i add(__m512i sum, __m512i unit) {
    return _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), unit);
  }
};

}  // namespace

void gemm_a8_avx512_vnni_int8(const GemmTile& tile) {
  gemm_blocks<SignedStep, true>(tile, SignedStep{});
}
void gemm_a8_avx512_vnni_int4(const GemmTile& tile) {
  gemm_panel(tile, NibbleStep(tile.segments.layout.offset));
}
void load_rows_avx512_vnni_i8(const LoadRows& rows) { load_blocks(rows, SummedByteRows(rows)); }

}  // namespace fusedmoe::cpu
