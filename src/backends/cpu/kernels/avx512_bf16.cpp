// Kernels for AVX-512 BF16: vdpbf16ps adds the products of 16 pairs of bf16 to 16 fp32 sums.
#include <immintrin.h>

#include <cstdint>

#include "backends/cpu/kernels/blocked_kernels.h"
#include "backends/cpu/kernels/declarations.h"

namespace fusedmoe::cpu {
namespace {

struct DotStep : SumsInOrder {
  using Vector = __m512bh;
  static constexpr int kUnits = 2;
  static constexpr int kLines = 2;
  // The hardware follows by itself: 512 bytes to 32 KiB ahead cost 4 to 10 % (1 and 4 tokens, Zen
  // 4).
  static constexpr std::int64_t kAhead = 0;
  FUSEDMOE_INLINE static void weights(const void* panel, std::int64_t unit, Vector (&w)[2]) {
    const char* from = static_cast<const char*>(panel) + unit * 128;
    w[0] = (__m512bh)_mm512_loadu_si512(from);
    w[1] = (__m512bh)_mm512_loadu_si512(from + 64);
  }
  FUSEDMOE_INLINE static Vector broadcast(const std::uint32_t* a) {
    return (__m512bh)_mm512_set1_epi32(static_cast<int>(*a));
  }
  FUSEDMOE_INLINE static __m512 add(__m512 sum, Vector x, Vector w) {
    return _mm512_dpbf16_ps(sum, x, w);
  }
};

// Rows of bf16 in pairs; behind an odd k a zero, whatever lies there.
struct PairedRows {
  static constexpr int kUnits = 2;
  FUSEDMOE_INLINE __m512i load(const void* from, std::int64_t k, std::int64_t left) const {
    const __mmask32 mask = left < 32 ? (std::uint32_t{1} << left) - 1 : ~std::uint32_t{0};
    return _mm512_maskz_loadu_epi16(mask, static_cast<const std::uint16_t*>(from) + k);
  }
};

}  // namespace

void gemm_avx512_bf16_bf16(const GemmTile& tile) { gemm_blocks<DotStep>(tile); }
void load_rows_avx512_bf16_bf16(const LoadRows& rows) { load_blocks(rows, PairedRows{}); }

}  // namespace fusedmoe::cpu
