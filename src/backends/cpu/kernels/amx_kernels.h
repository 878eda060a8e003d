// Kernels for AMX in bf16, on any Tiles: the machine's (amx_bf16.cpp), or a model of them in plain
// C++ (amx_model.h), so that every machine tests every line.
//
// Tiles has: configure(rows), release(), zero<tile>(), load<tile>(from, stride), store<tile>(to,
// stride), dot<sums, rows, weights>(). Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 weights; `rows`
// is the height of the first six.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "backends/cpu/kernels/kernels.h"
#include "formats/float_bits.h"

namespace fusedmoe::cpu {

inline constexpr int kTileRows = 16;
inline constexpr std::int64_t kStepK = 32;        // k of one tile
inline constexpr std::int64_t kStepBytes = 2048;  // of a panel: two tiles of weights
inline constexpr std::int64_t kSumsStride = kPanelOutputs * sizeof(float);
// Steps of a panel that stay in L1 (16 KiB) while many rows pass.
inline constexpr std::int64_t kPartSteps = 8;
// Bytes ahead in the stream of panels, to L1, for rows that pass once: 0.5 to 2 KiB are the same,
// L2 instead of L1 costs 7 %, and 4 to 32 KiB cost 10 % and more, since prefetches hold the fill
// buffers that tile loads need (1 token, Xeon with AMX).
inline constexpr std::int64_t kTileAhead = 1024;

// Inputs lie tile after tile, [blocks of 16 rows][steps][16][32], with zeros behind the last k: row
// after row, each row of a tile would lie in a page of its own. Rows behind the last are not
// written; they come to nothing but themselves.
inline constexpr std::int64_t kTileBytes = kTileRows * kStepK * 2;

FUSEDMOE_INLINE void load_tile_rows(const LoadRows& rows) {
  const std::int64_t steps = (rows.k + kStepK - 1) / kStepK;
  for (int block = 0; block < rows.rows; block += kTileRows) {
    char* to = static_cast<char*>(rows.to) + block / kTileRows * steps * kTileBytes;
    const int count = std::min(kTileRows, rows.rows - block);
    for (std::int64_t step = 0; step < steps; ++step, to += kTileBytes) {
      const std::int64_t bytes = std::min(kStepK, rows.k - step * kStepK) * 2;
      for (int r = 0; r < count; ++r) {
        const char* from = static_cast<const char*>(rows.from[block + r]) + rows.k0 * 2;
        if (bytes == 64) {
          std::memcpy(to + r * 64, from + step * 64, 64);
        } else {
          std::memcpy(to + r * 64, from + step * 64, bytes);
          std::memset(to + r * 64 + bytes, 0, 64 - bytes);
        }
      }
    }
  }
}

// Lines to prefetch in one pass over some steps: `lines` a step from `from` on, and from step
// `until` on from `then`.
struct StepsAhead {
  const char* from;
  const char* then;
  std::int64_t until;
  int lines;
};

// One or two blocks of 16 rows by 32 outputs over some steps; a_second is the rows of the other.
// kLocality: into L1 (3) or L2 (2).
template <class Tiles, bool kTwo, int kLocality>
FUSEDMOE_INLINE void multiply_tiles(const char* a, const char* a_second, const char* panel,
                                    std::int64_t steps, float* sums, bool first,
                                    const StepsAhead& ahead) {
  float* second = sums + kTileRows * kPanelOutputs;
  if (first) {
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    if constexpr (kTwo) Tiles::template zero<2>();
    if constexpr (kTwo) Tiles::template zero<3>();
  } else {
    Tiles::template load<0>(sums, kSumsStride);
    Tiles::template load<1>(sums + 16, kSumsStride);
    if constexpr (kTwo) Tiles::template load<2>(second, kSumsStride);
    if constexpr (kTwo) Tiles::template load<3>(second + 16, kSumsStride);
  }
  for (std::int64_t step = 0; step < steps; ++step) {
    const char* line = (step < ahead.until ? ahead.from : ahead.then) + step * ahead.lines * 64;
    for (int i = 0; i < ahead.lines; ++i) __builtin_prefetch(line + i * 64, 0, kLocality);
    const char* weights = panel + step * kStepBytes;
    Tiles::template load<6>(weights, 128);
    Tiles::template load<4>(a + step * kTileBytes, 64);
    Tiles::template dot<0, 4, 6>();
    if constexpr (kTwo) {
      Tiles::template load<5>(a_second + step * kTileBytes, 64);
      Tiles::template dot<2, 5, 6>();
    }
    Tiles::template load<7>(weights + 64, 128);
    Tiles::template dot<1, 4, 7>();
    if constexpr (kTwo) Tiles::template dot<3, 5, 7>();
  }
  Tiles::template store<0>(sums, kSumsStride);
  Tiles::template store<1>(sums + 16, kSumsStride);
  if constexpr (kTwo) Tiles::template store<2>(second, kSumsStride);
  if constexpr (kTwo) Tiles::template store<3>(second + 16, kSumsStride);
}

// Rows that fit two blocks stream the panel once. More rows pass part after part of it, and bring
// the part after to L2 meanwhile, each pass its share of the lines.
template <class Tiles>
FUSEDMOE_INLINE void gemm_tiles(const GemmTile& tile) {
  const std::int64_t steps = (tile.k + kStepK - 1) / kStepK;
  const int blocks = (tile.rows + kTileRows - 1) / kTileRows;
  const int passes = (blocks + 1) / 2;
  const auto* a = static_cast<const char*>(tile.a);
  const auto* panel = static_cast<const char*>(tile.panel);
  const auto* next = static_cast<const char*>(tile.next);
  Tiles::configure(std::min(tile.rows, kTileRows));
  const std::int64_t part = passes == 1 ? steps : kPartSteps;
  for (std::int64_t begin = 0; begin < steps; begin += part) {
    const std::int64_t count = std::min(part, steps - begin);
    const char* weights = panel + begin * kStepBytes;
    for (int pass = 0; pass < passes; ++pass) {
      StepsAhead ahead;
      if (passes == 1) {
        const std::int64_t until = steps - 1;
        static_assert(kTileAhead <= kStepBytes);
        ahead = {weights + kTileAhead, next - until * kStepBytes, until, kStepBytes / 64};
      } else {
        constexpr int kLines = kStepBytes / 64;
        const int lines = (kLines + passes - 1) / passes;
        const char* coming = begin + count < steps ? weights + part * kStepBytes : next;
        const char* from = coming + pass * count * lines * 64;
        ahead = {from, from, count, pass * lines < kLines ? lines : 0};
      }
      const char* rows = a + (pass * 2 * steps + begin) * kTileBytes;
      const char* rows_second = rows + steps * kTileBytes;
      float* sums = tile.accumulators + pass * 2 * kTileRows * kPanelOutputs;
      const bool first = tile.first && begin == 0;
      const bool two = pass * 2 + 1 < blocks;
      const auto run = [&]<int kLocality>() {
        if (two) {
          multiply_tiles<Tiles, true, kLocality>(rows, rows_second, weights, count, sums, first,
                                                 ahead);
        } else {
          multiply_tiles<Tiles, false, kLocality>(rows, rows_second, weights, count, sums, first,
                                                  ahead);
        }
      };
      if (passes == 1) {
        run.template operator()<3>();
      } else {
        run.template operator()<2>();
      }
    }
  }
  Tiles::release();
}

}  // namespace fusedmoe::cpu
