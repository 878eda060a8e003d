// Kernels for AVX-512: tiles of up to 12 rows x 32 outputs (24 accumulators, two vectors of weights
// and one broadcast input of 32 registers), on inputs in units of four bytes: one fp32, a pair of
// bf16, four int8. Instantiated per instruction set, with types of internal linkage.
//
// A Step has
//   kUnits           k per unit
//   kLineUnits       units that are read together, and kLineBytes, their bytes
//   kTwoSegments     whether few rows take two segments at once
//   kAhead           how many bytes ahead few rows prefetch
//   Vector, Sum      of 16 outputs: weights of a unit; sums
//   kInlineRows      up to how many rows codes become weights as they are multiplied
//   weights(line, i, w)  unit i of a line: two vectors of 16 outputs each
//   broadcast(a), zero(), add(sum, x, w): the set's recipe; to_f32(sum, row_sums, r),
//   row_sum(row_sums, r) load_sums and store_sums, between the columns of accumulators and the
//   order of its sums Wide             the Step of the same weights kept as vectors, which many
//   rows read instead
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "backends/cpu/kernels/kernels.h"
#include "backends/cpu/kernels/segment_vectors.h"
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

// Up to this many rows, two segments run side by side: 20 sums, and registers for their weights.
inline constexpr int kRowsOfTwoSegments = 5;

// The rows in even blocks: 13 rows are 7 + 6. Inputs lie block after block, [units][rows of block].
struct RowBlocks {
  int rows;
  int count() const { return (rows + kBlockRows - 1) / kBlockRows; }
  int start(int block) const { return rows * block / count(); }
};

// One block of rows by some units of a panel.
struct BlockTile {
  const std::uint32_t* a;  // [units][rows]
  const char* panel;
  std::int64_t units;  // a multiple of Step::kLineUnits
  float* out;          // [rows][32]
  bool first;
  const char* coming = nullptr;  // lines to prefetch, one after the other
  // With segments: how long they are, what they are worth, and the sums of their inputs.
  std::int64_t segment_units = 0;
  const float* scales = nullptr;            // [segments][2][32], as SegmentScales has them
  bool offsets = false;                     // whether the second ones are there
  const std::uint32_t* row_sums = nullptr;  // f32 or i32: of the first row, [segments][all rows]
  std::int64_t row_sums_stride = 0;
};

// The sums of some units, added to `sums`. kLines: of `coming`, prefetched per line of weights;
// kLocality: into L1 (3) or L2 (2).
template <class Step, int kRows, int kLines, int kLocality>
FUSEDMOE_INLINE void add_units(const Step& step, const std::uint32_t* a, const char* panel,
                               std::int64_t units, [[maybe_unused]] const char* coming,
                               typename Step::Sum (&sums)[kRows][2]) {
  for (std::int64_t unit = 0; unit < units; unit += Step::kLineUnits) {
#pragma GCC unroll 4
    for (int line = 0; line < kLines; ++line) {
      __builtin_prefetch(coming + line * 64, 0, kLocality);
    }
    if constexpr (kLines > 0) coming += kLines * 64;
#pragma GCC unroll 4
    for (int i = 0; i < Step::kLineUnits; ++i) {
      typename Step::Vector w[2];
      step.weights(panel, i, w);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const typename Step::Vector x = Step::broadcast(a + i * kRows + r);
        sums[r][0] = Step::add(sums[r][0], x, w[0]);
        sums[r][1] = Step::add(sums[r][1], x, w[1]);
      }
    }
    panel += Step::kLineBytes;
    a += Step::kLineUnits * kRows;
  }
}

// Two segments of as many units at once: few rows have too few chains to hide that a sum waits for
// the one before (12 are needed on Zen 5, where two products start per cycle and each takes 6).
// Four bits alone: 4 rows of mxfp4 from caches 390 -> 461 GFLOP/s, of int4 375 -> 522. Where a line
// of codes is a unit, memory is the limit, and two streams cost 5 % (fp8, 1 token).
template <class Step, int kRows, int kLines, int kLocality>
FUSEDMOE_INLINE void add_units_of_two(const Step& step, const std::uint32_t* a, const char* panel,
                                      std::int64_t units, [[maybe_unused]] const char* coming,
                                      typename Step::Sum (&sums)[2][kRows][2]) {
  const std::int64_t second = units / Step::kLineUnits * Step::kLineBytes;
  const std::uint32_t* a_second = a + units * kRows;
  for (std::int64_t unit = 0; unit < units; unit += Step::kLineUnits) {
#pragma GCC unroll 4
    for (int line = 0; line < 2 * kLines; ++line) {
      __builtin_prefetch(coming + line * 64, 0, kLocality);
    }
    if constexpr (kLines > 0) coming += 2 * kLines * 64;
#pragma GCC unroll 4
    for (int i = 0; i < Step::kLineUnits; ++i) {
      typename Step::Vector w[2][2];
      step.weights(panel, i, w[0]);
      step.weights(panel + second, i, w[1]);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const typename Step::Vector x = Step::broadcast(a + i * kRows + r);
        const typename Step::Vector y = Step::broadcast(a_second + i * kRows + r);
        sums[0][r][0] = Step::add(sums[0][r][0], x, w[0][0]);
        sums[0][r][1] = Step::add(sums[0][r][1], x, w[0][1]);
        sums[1][r][0] = Step::add(sums[1][r][0], y, w[1][0]);
        sums[1][r][1] = Step::add(sums[1][r][1], y, w[1][1]);
      }
    }
    panel += Step::kLineBytes;
    a += Step::kLineUnits * kRows;
    a_second += Step::kLineUnits * kRows;
  }
}

// One chain per output over all units.
template <class Step, int kRows, int kLines, int kLocality>
[[gnu::noinline]] void chain_rows(const Step& step, const BlockTile& tile) {
  typename Step::Sum sums[kRows][2];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    if (tile.first) {
      sums[r][0] = sums[r][1] = Step::zero();
    } else {
      Step::load_sums(tile.out + r * kPanelOutputs, sums[r]);
    }
  }
  add_units<Step, kRows, kLines, kLocality>(step, tile.a, tile.panel, tile.units, tile.coming,
                                            sums);
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) Step::store_sums(sums[r], tile.out + r * kPanelOutputs);
}

// Accumulators of some rows, in registers where there is room for them.
template <class Step, int kRows>
struct Accumulators {
  static constexpr bool kKeep = kRows <= 4;
  const BlockTile& tile;
  __m512 kept[std::min(kRows, 4)][2];

  FUSEDMOE_INLINE explicit Accumulators(const BlockTile& block) : tile(block) {
    if constexpr (kKeep) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          kept[r][half] = tile.first ? _mm512_setzero_ps() : _mm512_loadu_ps(at(r, half));
        }
      }
    }
  }
  FUSEDMOE_INLINE float* at(int r, int half) const {
    return tile.out + r * kPanelOutputs + 16 * half;
  }
  // += scale * sum, and += offset * sum of the inputs, in this order. scales: [2][32].
  FUSEDMOE_INLINE void add(const Step& step, const typename Step::Sum (&sums)[kRows][2],
                           const float* scales, const std::uint32_t* row_sums, bool start) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512 scale = _mm512_load_ps(scales + 16 * half);
      const __m512 offset =
          tile.offsets ? _mm512_load_ps(scales + 32 + 16 * half) : _mm512_setzero_ps();
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        __m512 value;
        if constexpr (kKeep) {
          value = kept[r][half];
        } else {
          value = start ? _mm512_setzero_ps() : _mm512_loadu_ps(at(r, half));
        }
        value = _mm512_fmadd_ps(step.to_f32(sums[r][half], row_sums, r), scale, value);
        if (tile.offsets) value = _mm512_fmadd_ps(Step::row_sum(row_sums, r), offset, value);
        if constexpr (kKeep) {
          kept[r][half] = value;
        } else {
          _mm512_storeu_ps(at(r, half), value);
        }
      }
    }
  }
  FUSEDMOE_INLINE void store() const {
    if constexpr (kKeep) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        _mm512_storeu_ps(at(r, 0), kept[r][0]);
        _mm512_storeu_ps(at(r, 1), kept[r][1]);
      }
    }
  }
};

// One chain per output and segment, from zero, which its scale then brings to the accumulators.
template <class Step, int kRows, int kLines, int kLocality>
[[gnu::noinline]] void segment_rows(const Step& step, const BlockTile& tile) {
  const BlockTile t = tile;  // copied: nothing that is stored can change it
  const std::uint32_t* a = t.a;
  const char* panel = t.panel;
  const char* coming = t.coming;
  const float* scales = t.scales;
  const std::uint32_t* row_sums = t.row_sums;
  const auto next_row_sums = [&] {
    return row_sums == nullptr ? nullptr : row_sums + t.row_sums_stride;
  };
  const auto pass = [&](std::int64_t units, int segments) {
    const std::int64_t lines = units / Step::kLineUnits;
    a += units * kRows;
    panel += lines * Step::kLineBytes;
    if constexpr (kLines > 0) coming += lines * kLines * 64;
    scales += 64 * segments;
    for (int i = 0; i < segments; ++i) row_sums = next_row_sums();
  };
  Accumulators<Step, kRows> accumulators(t);
  std::int64_t unit = 0;
  if constexpr (Step::kTwoSegments && kRows <= kRowsOfTwoSegments) {
    for (; unit + 2 * t.segment_units <= t.units; unit += 2 * t.segment_units) {
      typename Step::Sum sums[2][kRows][2];
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        sums[0][r][0] = sums[0][r][1] = sums[1][r][0] = sums[1][r][1] = Step::zero();
      }
      add_units_of_two<Step, kRows, kLines, kLocality>(step, a, panel, t.segment_units, coming,
                                                       sums);
      accumulators.add(step, sums[0], scales, row_sums, t.first && unit == 0);
      accumulators.add(step, sums[1], scales + 64, next_row_sums(), false);
      pass(2 * t.segment_units, 2);
    }
  }
  for (; unit < t.units; unit += t.segment_units) {
    const std::int64_t units = std::min(t.segment_units, t.units - unit);
    typename Step::Sum sums[kRows][2];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = Step::zero();
    add_units<Step, kRows, kLines, kLocality>(step, a, panel, units, coming, sums);
    accumulators.add(step, sums, scales, row_sums, t.first && unit == 0);
    pass(units, 1);
  }
  accumulators.store();
}

// Not inlined above: one function with all of the loops takes clang minutes. kLeast, kMost: how
// many rows there may be, so that nothing else is compiled.
template <class Step, bool kSegments, int kLines, int kLocality, int kLeast, int kMost>
FUSEDMOE_INLINE void block_of(int rows, const Step& step, const BlockTile& tile) {
  if constexpr (kMost > kLeast) {
    if (rows < kMost) {
      return block_of<Step, kSegments, kLines, kLocality, kLeast, kMost - 1>(rows, step, tile);
    }
  }
  if constexpr (kSegments) {
    segment_rows<Step, kMost, kLines, kLocality>(step, tile);
  } else {
    chain_rows<Step, kMost, kLines, kLocality>(step, tile);
  }
}

// From this many rows of one block on, the next panel comes to L2 while this one is multiplied; of
// several blocks, the first bring a part of it each. Gains 5 to 15 % at 10 to 60 rows an expert, 6
// to 9 % at 4 to 6 where memory reads 66 GB/s (and costs 1 to 2 % where it reads 36), costs 10 % at
// 2 (qwen3-30b-a3b, gpt-oss-20b and mixtral-8x7b, bf16, Zen 4).
inline constexpr int kRowsThatPrefetch = 5;

// What a block needs of segments [first, ...), whose scales are loaded.
FUSEDMOE_INLINE void set_segments(const GemmTile& tile, const SegmentScales& scales,
                                  std::int64_t segment_units, std::int64_t first, int row,
                                  BlockTile& block) {
  block.segment_units = segment_units;
  block.scales = scales.data();
  block.offsets = tile.segments.layout.has_offsets();
  if (tile.sums == nullptr) return;
  block.row_sums = static_cast<const std::uint32_t*>(tile.sums) + first * tile.rows + row;
  block.row_sums_stride = tile.rows;
}

// Rows of one block, straight from the codes: in parts, as many segments as have their scales
// loaded, and cut where what few rows prefetch leaves the panel, to go on in the next one. At the
// last panel of an expert that one lies elsewhere (1 token of mxfp4, qwen3-30b-a3b, Zen 5: 312 ->
// 307 us).
template <class Step, bool kSegments>
FUSEDMOE_INLINE void one_block(const GemmTile& tile, const Step& step, BlockTile block) {
  constexpr int kLines = Step::kLineBytes / 64;
  constexpr bool kFollow = Step::kAhead > 0;  // else the hardware does
  const bool few = tile.rows < kRowsThatPrefetch;
  const std::int64_t segment_units =
      kSegments ? tile.segments.layout.k / Step::kUnits : Step::kLineUnits;
  const std::int64_t units = block.units;
  const auto bytes_of = [](std::int64_t of) { return of / Step::kLineUnits * Step::kLineBytes; };
  [[maybe_unused]] SegmentScales scales;
  for (std::int64_t begin = 0; begin < units; begin += block.units) {
    block.units = units - begin;
    if constexpr (kSegments) {
      block.units = std::min(block.units, SegmentScales::kMost * segment_units);
    }
    const auto* next = static_cast<const char*>(tile.next);
    const std::int64_t left = bytes_of(units - begin);
    if (!few) {
      block.coming = next + bytes_of(begin);
    } else if (left > Step::kAhead) {
      block.coming = block.panel + Step::kAhead;
      const std::int64_t inside = (left - Step::kAhead) / Step::kLineBytes * Step::kLineUnits;
      const std::int64_t whole = inside / (2 * segment_units) * (2 * segment_units);
      if (kFollow && whole > 0) block.units = std::min(block.units, whole);
    } else {
      block.coming = next + (Step::kAhead - left);
    }
    block.first = tile.first && begin == 0;
    if constexpr (kSegments) {
      const std::int64_t first = begin / segment_units;
      scales.load(tile.segments, first, (block.units + segment_units - 1) / segment_units);
      set_segments(tile, scales, segment_units, first, 0, block);
    }
    if (few) {
      constexpr int kFewLines = kFollow ? kLines : 0;
      block_of<Step, kSegments, kFewLines, 3, 1, kRowsThatPrefetch - 1>(tile.rows, step, block);
    } else if constexpr (Step::kInlineRows >= kRowsThatPrefetch) {
      block_of<Step, kSegments, kLines, 2, kRowsThatPrefetch, kBlockRows>(tile.rows, step, block);
    }
    block.a += block.units * tile.rows;
    block.panel += bytes_of(block.units);
  }
}

// Units [begin, begin + count) of the loaded rows by weights that are vectors already: `panel` is
// where these units start, and `coming` what the first blocks bring to L2 meanwhile.
template <class Step, bool kSegments>
FUSEDMOE_INLINE void all_blocks(const GemmTile& tile, const Step& step,
                                [[maybe_unused]] const SegmentScales* scales, std::int64_t begin,
                                std::int64_t count, std::int64_t all_units, const char* panel,
                                const char* coming, std::int64_t coming_bytes) {
  const RowBlocks blocks{tile.rows};  // of at least 6 rows, or one that is not inlined, of 5
  const std::int64_t bytes = count / Step::kLineUnits * 64;  // that a block can bring
  for (int b = 0; b < blocks.count(); ++b) {
    const int start = blocks.start(b);
    const int rows = blocks.start(b + 1) - start;
    BlockTile block{
        .a = static_cast<const std::uint32_t*>(tile.a) + start * all_units + begin * rows,
        .panel = panel,
        .units = count,
        .out = tile.accumulators + start * kPanelOutputs,
        .first = tile.first && begin == 0,
        .coming = coming + b * bytes};
    if constexpr (kSegments) {
      const std::int64_t segment_units = tile.segments.layout.k / Step::kUnits;
      set_segments(tile, *scales, segment_units, begin / segment_units, start, block);
    }
    if (b * bytes < coming_bytes) {
      block_of<Step, kSegments, 1, 2, kRowsThatPrefetch, kBlockRows>(rows, step, block);
    } else {
      block_of<Step, kSegments, 0, 2, kRowsThatPrefetch, kBlockRows>(rows, step, block);
    }
  }
}

// Inputs that are widened at once: their vectors stay in L1 (16 KiB of bf16, 32 of fp32).
inline constexpr std::int64_t kWideK = 256;

// Many rows: codes become vectors once, in a buffer, instead of once per block.
template <class Step, bool kSegments>
FUSEDMOE_INLINE void widened_blocks(const GemmTile& tile, const Step& step, std::int64_t units) {
  using Wide = typename Step::Wide;
  alignas(64) char buffer[kWideK / Step::kUnits * 128];
  const Wide wide = step.wide();
  const std::int64_t segment_k = kSegments ? tile.segments.layout.k : 4;
  std::int64_t segments = kWideK / segment_k;
  if constexpr (kSegments) segments = std::min(segments, SegmentScales::kMost);
  const std::int64_t step_units = segments * segment_k / Step::kUnits;
  SegmentScales scales;
  for (std::int64_t begin = 0; begin < units; begin += step_units) {
    const std::int64_t count = std::min(step_units, units - begin);
    const std::int64_t bytes = count / Step::kLineUnits * Step::kLineBytes;
    const std::int64_t at = begin / Step::kLineUnits * Step::kLineBytes;
    const char* from = static_cast<const char*>(tile.panel) + at;
    for (std::int64_t unit = 0; unit < count; unit += Step::kLineUnits) {
#pragma GCC unroll 4
      for (int i = 0; i < Step::kLineUnits; ++i) {
        typename Step::Vector w[2];
        step.weights(from, i, w);
        char* to = buffer + (unit + i) * 128;
        _mm512_store_si512(to, (__m512i)w[0]);
        _mm512_store_si512(to + 64, (__m512i)w[1]);
      }
      from += Step::kLineBytes;
    }
    if constexpr (kSegments) {
      scales.load(tile.segments, begin * Step::kUnits / segment_k,
                  (count * Step::kUnits + segment_k - 1) / segment_k);
    }
    all_blocks<Wide, kSegments>(tile, wide, &scales, begin, count, units, buffer,
                                static_cast<const char*>(tile.next) + at, bytes);
  }
}

// Many rows by weights that need no widening.
template <class Step, bool kSegments>
FUSEDMOE_INLINE void whole_blocks(const GemmTile& tile, const Step& step, std::int64_t units) {
  const auto* panel = static_cast<const char*>(tile.panel);
  const auto* next = static_cast<const char*>(tile.next);
  std::int64_t step_units = units;
  SegmentScales scales;
  if constexpr (kSegments) {
    step_units = SegmentScales::kMost * (tile.segments.layout.k / Step::kUnits);
  }
  for (std::int64_t begin = 0; begin < units; begin += step_units) {
    const std::int64_t count = std::min(step_units, units - begin);
    if constexpr (kSegments) {
      const std::int64_t segment_units = tile.segments.layout.k / Step::kUnits;
      scales.load(tile.segments, begin / segment_units,
                  (count + segment_units - 1) / segment_units);
    }
    const std::int64_t at = begin / Step::kLineUnits * Step::kLineBytes;
    all_blocks<Step, kSegments>(tile, step, &scales, begin, count, units, panel + at, next + at,
                                count / Step::kLineUnits * Step::kLineBytes);
  }
}

template <class Step, bool kSegments>
FUSEDMOE_INLINE void gemm_blocks(const GemmTile& tile, const Step& step) {
  const std::int64_t units = (tile.k + 3) / 4 * 4 / Step::kUnits;
  const auto* panel = static_cast<const char*>(tile.panel);
  if (tile.rows <= Step::kInlineRows) {
    BlockTile block{.a = static_cast<const std::uint32_t*>(tile.a),
                    .panel = panel,
                    .units = units,
                    .out = tile.accumulators,
                    .first = tile.first};
    one_block<Step, kSegments>(tile, step, block);
  } else if constexpr (std::is_same_v<Step, typename Step::Wide>) {
    whole_blocks<Step, kSegments>(tile, step, units);
  } else {
    widened_blocks<Step, kSegments>(tile, step, units);
  }
}

// Weights with or without segments; floats, which need no widening, have none, and codes of four
// bits always have some.
template <class Step>
FUSEDMOE_INLINE void gemm_panel(const GemmTile& tile, const Step& step) {
  constexpr bool kChains = !Step::kTwoSegments;
  if constexpr (!std::is_same_v<Step, typename Step::Wide>) {
    if (!kChains || tile.segments.layout.k > 0) return gemm_blocks<Step, true>(tile, step);
  }
  if constexpr (kChains) gemm_blocks<Step, false>(tile, step);
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

// A Source has kUnits, the k per unit; load(row, k, left), 16 units of a row from k on, zeros
// behind the `left` that there are; and Sum, a vector of a sum per row, with zero() and add(sum,
// unit).
template <class Source>
FUSEDMOE_INLINE void load_blocks(const LoadRows& rows, const Source& source) {
  const RowBlocks blocks{rows.rows};
  const std::int64_t units = (rows.k + 3) / 4 * 4 / Source::kUnits;
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
        v[0] = source.load(start, k, left);
        _mm512_mask_storeu_epi32(to + unit, static_cast<__mmask16>((1U << n) - 1), v[0]);
        continue;
      }
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        v[r] = r < count ? source.load(start + r, k, left) : _mm512_setzero_si512();
      }
      transpose(v);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        if (i < n) _mm512_mask_storeu_epi32(to + (unit + i) * count, mask, v[i]);
      }
    }
    if (rows.segment_k == 0) continue;
    const std::int64_t segment_units = rows.segment_k / Source::kUnits;
    auto* sums = static_cast<std::uint32_t*>(rows.sums) + start;
    for (std::int64_t unit = 0; unit < units; unit += segment_units, sums += rows.rows) {
      auto sum = Source::zero();
      const std::int64_t end = std::min(units, unit + segment_units);
      for (std::int64_t u = unit; u < end; ++u) {
        sum = Source::add(sum, _mm512_maskz_loadu_epi32(mask, to + u * count));
      }
      _mm512_mask_storeu_epi32(sums, mask, (__m512i)sum);
    }
  }
}

}  // namespace fusedmoe::cpu
