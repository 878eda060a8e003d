// Kernels for AVX-512: tiles of up to 12 rows x 32 outputs (24 accumulators, two vectors of weights
// and one broadcast input of 32 registers), on inputs in units of four bytes: one fp32 or a pair of
// bf16. Instantiated per instruction set, with types of internal linkage.
//
// A Step has kUnits, the k per unit; kLines, the cache lines of a panel per unit; kAhead,
// how many bytes ahead few rows prefetch; load_sums and store_sums, between the columns of
// accumulators and the order of its sums; weights(panel, unit, w): two vectors of 16 outputs each;
// add(sum, x, w): sum + x * w, by the set's recipe.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "backends/cpu/kernels/kernels.h"
#include "formats/float_bits.h"

namespace fusedmoe::cpu {

// Sums of columns 0 to 15 and 16 to 31.
struct SumsInOrder {
  FUSEDMOE_INLINE static void load_sums(const float* from, __m512 (&sums)[2]) {
    sums[0] = _mm512_loadu_ps(from);
    sums[1] = _mm512_loadu_ps(from + 16);
  }
  FUSEDMOE_INLINE static void store_sums(const __m512 (&sums)[2], float* to) {
    _mm512_storeu_ps(to, sums[0]);
    _mm512_storeu_ps(to + 16, sums[1]);
  }
};

// Rows of a tile. 12 x 2 reach 96 to 98 % of the multipliers, also with operands from L2 (Zen 5).
inline constexpr int kBlockRows = 12;

// The rows in even blocks: 13 rows are 7 + 6. Inputs lie block after block, [units][rows of block].
struct RowBlocks {
  int rows;
  int count() const { return (rows + kBlockRows - 1) / kBlockRows; }
  int start(int block) const { return rows * block / count(); }
};

// Not inlined: one function with all of the loops takes clang minutes.
// kLines: of `coming`, prefetched per unit; kLocality: into L1 (3) or L2 (2).
template <class Step, int kRows, int kLines, int kLocality>
[[gnu::noinline]] void tile_rows(const std::uint32_t* a, const char* panel, std::int64_t units,
                                 float* out, bool first, [[maybe_unused]] const char* coming) {
  __m512 sums[kRows][2];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    if (first) {
      sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    } else {
      Step::load_sums(out + r * kPanelOutputs, sums[r]);
    }
  }
  for (std::int64_t unit = 0; unit < units; ++unit) {
#pragma GCC unroll 2
    for (int line = 0; line < kLines; ++line) {
      __builtin_prefetch(coming + (unit * kLines + line) * 64, 0, kLocality);
    }
    typename Step::Vector w[2];
    Step::weights(panel, unit, w);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const typename Step::Vector x = Step::broadcast(a + unit * kRows + r);
      sums[r][0] = Step::add(sums[r][0], x, w[0]);
      sums[r][1] = Step::add(sums[r][1], x, w[1]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) Step::store_sums(sums[r], out + r * kPanelOutputs);
}

template <class Step, int kLines, int kLocality, int kRows = kBlockRows>
FUSEDMOE_INLINE void tile_of(int rows, const std::uint32_t* a, const char* panel,
                             std::int64_t units, float* out, bool first, const char* coming) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return tile_of<Step, kLines, kLocality, kRows - 1>(rows, a, panel, units, out, first, coming);
    }
  }
  tile_rows<Step, kRows, kLines, kLocality>(a, panel, units, out, first, coming);
}

// From this many rows of one block on, the next panel comes to L2 while this one is multiplied; of
// several blocks, the first bring a part of it each. Gains 5 to 15 % at 10 to 60 rows an expert, 6
// to 9 % at 4 to 6 where memory reads 66 GB/s (and costs 1 to 2 % where it reads 36), costs 10 % at
// 2 (qwen3-30b-a3b, gpt-oss-20b and mixtral-8x7b, Zen 4).
inline constexpr int kRowsThatPrefetch = 5;

template <class Step>
FUSEDMOE_INLINE void gemm_blocks(const GemmTile& tile) {
  const RowBlocks blocks{tile.rows};
  const std::int64_t units = (tile.k + Step::kUnits - 1) / Step::kUnits;
  const auto* panel = static_cast<const char*>(tile.panel);
  const auto* next = static_cast<const char*>(tile.next);
  const auto* a = static_cast<const std::uint32_t*>(tile.a);
  for (int b = 0; b < blocks.count(); ++b) {
    const int start = blocks.start(b);
    const int rows = blocks.start(b + 1) - start;
    const std::uint32_t* from = a + start * units;
    float* out = tile.accumulators + start * kPanelOutputs;
    if (blocks.count() > 1 && b < Step::kLines) {
      const char* coming = next + b * units * 64;
      tile_of<Step, 1, 2>(rows, from, panel, units, out, tile.first, coming);
    } else if (blocks.count() == 1 && rows >= kRowsThatPrefetch) {
      tile_of<Step, Step::kLines, 2>(rows, from, panel, units, out, tile.first, next);
    } else if (blocks.count() == 1 && Step::kAhead > 0) {
      const char* coming = panel + Step::kAhead;
      tile_of<Step, Step::kLines, 3>(rows, from, panel, units, out, tile.first, coming);
    } else {
      tile_of<Step, 0, 3>(rows, from, panel, units, out, tile.first, nullptr);
    }
  }
}

// The 16 x 16 transpose of 32-bit elements: 64 shuffles.
FUSEDMOE_INLINE void transpose(__m512i (&rows)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    rows[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    rows[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// A Source has kUnits, the k per unit, and load(from, k, left): 16 units of a row from k on, zeros
// behind the `left` that there are.
template <class Source>
FUSEDMOE_INLINE void load_blocks(const LoadRows& rows, const Source& source) {
  const RowBlocks blocks{rows.rows};
  const std::int64_t units = (rows.k + Source::kUnits - 1) / Source::kUnits;
  for (int b = 0; b < blocks.count(); ++b) {
    const int start = blocks.start(b);
    const int count = blocks.start(b + 1) - start;
    auto* to = static_cast<std::uint32_t*>(rows.to) + start * units;
    const auto mask = static_cast<__mmask16>((1U << count) - 1);
    for (std::int64_t unit = 0; unit < units; unit += 16) {
      const std::int64_t k = rows.k0 + unit * Source::kUnits;
      const std::int64_t left = rows.k0 + rows.k - k;
      const auto n = static_cast<int>(std::min<std::int64_t>(units - unit, 16));
      __m512i v[16];
      if (count == 1) {
        v[0] = source.load(rows.from[start], k, left);
        _mm512_mask_storeu_epi32(to + unit, static_cast<__mmask16>((1U << n) - 1), v[0]);
        continue;
      }
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        v[r] = r < count ? source.load(rows.from[start + r], k, left) : _mm512_setzero_si512();
      }
      transpose(v);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        if (i < n) _mm512_mask_storeu_epi32(to + (unit + i) * count, mask, v[i]);
      }
    }
  }
}

}  // namespace fusedmoe::cpu
