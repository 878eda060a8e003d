// Kernels for AMX in bf16 or int8, on any Tiles: the machine's (amx_bf16.cpp), or a model of them
// in plain C++ (amx_model.h), so that every machine tests every line.
//
// Tiles has: configure(rows), release(), zero<tile>(), load<tile>(from, stride), store<tile>(to,
// stride), dot<sums, rows, weights>(). Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 weights; `rows`
// is the height of the first six.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "backends/cpu/kernels/amx_decode.h"
#include "backends/cpu/kernels/kernels.h"
#include "formats/float_bits.h"

namespace fusedmoe::cpu {

inline constexpr int kTileRows = 16;
inline constexpr std::int64_t kStepK = 32;        // k of one tile
inline constexpr std::int64_t kStepBytes = 2048;  // of a panel: two tiles of weights
inline constexpr std::int64_t kSumsStride = kPanelOutputs * sizeof(float);
// Steps that are decoded at once where few rows pass, while tiles multiply as many before them.
inline constexpr std::int64_t kChunkSteps = 2;
inline constexpr std::int64_t kRingSteps = 2 * kChunkSteps;
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
  const char* from = nullptr;
  const char* then = nullptr;
  std::int64_t until = 0;
  int lines = 0;
};

// Sums of one or two blocks of 16 rows by 32 outputs, in tiles 0 to 3.
template <class Tiles, bool kTwo>
FUSEDMOE_INLINE void zero_sums() {
  Tiles::template zero<0>();
  Tiles::template zero<1>();
  if constexpr (kTwo) Tiles::template zero<2>();
  if constexpr (kTwo) Tiles::template zero<3>();
}
template <class Tiles, bool kTwo>
FUSEDMOE_INLINE void load_sums(const float* sums) {
  const float* second = sums + kTileRows * kPanelOutputs;
  Tiles::template load<0>(sums, kSumsStride);
  Tiles::template load<1>(sums + 16, kSumsStride);
  if constexpr (kTwo) Tiles::template load<2>(second, kSumsStride);
  if constexpr (kTwo) Tiles::template load<3>(second + 16, kSumsStride);
}
template <class Tiles, bool kTwo>
FUSEDMOE_INLINE void begin_sums(const float* sums, bool first) {
  if (first) {
    zero_sums<Tiles, kTwo>();
  } else {
    load_sums<Tiles, kTwo>(sums);
  }
}
template <class Tiles, bool kTwo>
FUSEDMOE_INLINE void store_sums(float* sums) {
  float* second = sums + kTileRows * kPanelOutputs;
  Tiles::template store<0>(sums, kSumsStride);
  Tiles::template store<1>(sums + 16, kSumsStride);
  if constexpr (kTwo) Tiles::template store<2>(second, kSumsStride);
  if constexpr (kTwo) Tiles::template store<3>(second + 16, kSumsStride);
}

// Adds some steps to the sums; a_second is the rows of the other block. kLocality: prefetches into
// L1 (3) or L2 (2).
template <class Tiles, bool kTwo, int kLocality>
FUSEDMOE_INLINE void add_steps(const char* a, const char* a_second, const char* weights,
                               std::int64_t steps, const StepsAhead& ahead) {
  for (std::int64_t step = 0; step < steps; ++step) {
    const char* line = (step < ahead.until ? ahead.from : ahead.then) + step * ahead.lines * 64;
    for (int i = 0; i < ahead.lines; ++i) __builtin_prefetch(line + i * 64, 0, kLocality);
    const char* at = weights + step * kStepBytes;
    Tiles::template load<6>(at, 128);
    Tiles::template load<4>(a + step * kTileBytes, 64);
    Tiles::template dot<0, 4, 6>();
    if constexpr (kTwo) {
      Tiles::template load<5>(a_second + step * kTileBytes, 64);
      Tiles::template dot<2, 5, 6>();
    }
    Tiles::template load<7>(at + 64, 128);
    Tiles::template dot<1, 4, 7>();
    if constexpr (kTwo) Tiles::template dot<3, 5, 7>();
  }
}

// Which steps of the loaded rows a panel's are: `all` of them lie between two blocks of rows.
struct Steps {
  std::int64_t begin, count, all;
};

// Rows that fit two blocks: the sums stay in their tiles. Codes are decoded part by part, and
// prefetch for themselves.
template <class Tiles, bool kTwo>
FUSEDMOE_INLINE void gemm_few(const GemmTile& tile, const Steps& of, DecodeSteps decode) {
  const std::int64_t steps = of.count;
  const char* a = static_cast<const char*>(tile.a) + of.begin * kTileBytes;
  const auto* panel = static_cast<const char*>(tile.panel);
  const char* a_second = a + of.all * kTileBytes;
  begin_sums<Tiles, kTwo>(tile.accumulators, tile.first);
  if (decode == nullptr) {
    const std::int64_t until = steps - 1;
    static_assert(kTileAhead <= kStepBytes);
    const StepsAhead ahead = {panel + kTileAhead,
                              static_cast<const char*>(tile.next) - until * kStepBytes, until,
                              kStepBytes / 64};
    add_steps<Tiles, kTwo, 3>(a, a_second, panel, steps, ahead);
  } else {
    // Ahead of its products: vectors decode while tiles multiply.
    alignas(64) char ring[kRingSteps][kStepBytes];
    DecodeState state;
    decode(tile, 0, std::min(kChunkSteps, steps), state, ring[0]);
    for (std::int64_t step = 0; step < steps; step += kChunkSteps) {
      const std::int64_t next = step + kChunkSteps;
      if (next < steps) {
        decode(tile, next, std::min(kChunkSteps, steps - next), state, ring[next % kRingSteps]);
      }
      const std::int64_t at = step * kTileBytes;
      add_steps<Tiles, kTwo, 3>(a + at, a_second + at, ring[step % kRingSteps],
                                std::min(kChunkSteps, steps - step), {});
    }
  }
  store_sums<Tiles, kTwo>(tile.accumulators);
}

// More rows pass part after part of the panel. Of weights that lie there as tiles read them, each
// pass brings its share of the part after to L2.
template <class Tiles>
FUSEDMOE_INLINE void gemm_many(const GemmTile& tile, const Steps& of, DecodeSteps decode) {
  const std::int64_t steps = of.count;
  const int blocks = (tile.rows + kTileRows - 1) / kTileRows;
  const int passes = (blocks + 1) / 2;
  const char* a = static_cast<const char*>(tile.a) + of.begin * kTileBytes;
  const auto* panel = static_cast<const char*>(tile.panel);
  const auto* next = static_cast<const char*>(tile.next);
  alignas(64) char decoded[kPartSteps * kStepBytes];
  DecodeState state;
  for (std::int64_t begin = 0; begin < steps; begin += kPartSteps) {
    const std::int64_t count = std::min(kPartSteps, steps - begin);
    const char* weights = panel + begin * kStepBytes;
    if (decode != nullptr) {
      decode(tile, begin, count, state, decoded);
      weights = decoded;
    }
    for (int pass = 0; pass < passes; ++pass) {
      StepsAhead ahead = {};
      if (decode == nullptr) {
        constexpr int kLines = kStepBytes / 64;
        const int lines = (kLines + passes - 1) / passes;
        const char* coming = begin + count < steps ? weights + kPartSteps * kStepBytes : next;
        const char* from = coming + pass * count * lines * 64;
        ahead = {from, from, count, pass * lines < kLines ? lines : 0};
      }
      const char* rows = a + (pass * 2 * of.all + begin) * kTileBytes;
      const char* rows_second = rows + of.all * kTileBytes;
      float* sums = tile.accumulators + pass * 2 * kTileRows * kPanelOutputs;
      const auto run = [&]<bool kTwo>() {
        begin_sums<Tiles, kTwo>(sums, tile.first && begin == 0);
        add_steps<Tiles, kTwo, 2>(rows, rows_second, weights, count, ahead);
        store_sums<Tiles, kTwo>(sums);
      };
      if (pass * 2 + 1 < blocks) {
        run.template operator()<true>();
      } else {
        run.template operator()<false>();
      }
    }
  }
}

// Sums that are scaled when their segment ends: they leave their tiles, and are scaled while tiles
// multiply for the next segment.
template <class Tiles>
class ScaledSums {
 public:
  ScaledSums(const GemmTile& tile, AddScaled add) : tile_(tile), add_(add) {}

  // Ends segment `index` of rows [first, ...) of one or two blocks.
  template <bool kTwo>
  FUSEDMOE_INLINE void end(std::int64_t index, int first) {
    const int at = 1 - at_;
    store_sums<Tiles, kTwo>(sums_[at]);
    flush();
    at_ = at;
    index_ = index;
    first_ = first;
  }
  FUSEDMOE_INLINE void flush() const {
    if (index_ < 0) return;
    add_(tile_, index_, sums_[at_], first_, std::min(2 * kTileRows, tile_.rows - first_));
  }

 private:
  const GemmTile& tile_;
  AddScaled add_;
  int at_ = 0;
  std::int64_t index_ = -1;
  int first_ = 0;
  alignas(64) float sums_[2][2 * kTileRows * kPanelOutputs];
};

// As gemm_few, with segments of some whole steps each.
template <class Tiles, bool kTwo>
FUSEDMOE_INLINE void scaled_few(const GemmTile& tile, std::int64_t steps,
                                std::int64_t segment_steps, DecodeSteps decode, AddScaled add) {
  const auto* a = static_cast<const char*>(tile.a);
  const auto* panel = static_cast<const char*>(tile.panel);
  const char* a_second = a + steps * kTileBytes;
  const std::int64_t chunk = segment_steps % kChunkSteps == 0 ? kChunkSteps : 1;
  ScaledSums<Tiles> sums(tile, add);
  alignas(64) char ring[kRingSteps][kStepBytes];
  DecodeState state;
  if (decode != nullptr) decode(tile, 0, std::min(chunk, steps), state, ring[0]);
  for (std::int64_t step = 0; step < steps; step += chunk) {
    const std::int64_t next = step + chunk;
    const char* weights = panel + step * kStepBytes;
    StepsAhead ahead = {weights + kTileAhead, weights + kTileAhead, chunk, kStepBytes / 64};
    if (decode != nullptr) {
      weights = ring[step % kRingSteps];
      ahead = {};
      if (next < steps) {
        decode(tile, next, std::min(chunk, steps - next), state, ring[next % kRingSteps]);
      }
    }
    if (step % segment_steps == 0) zero_sums<Tiles, kTwo>();
    const std::int64_t at = step * kTileBytes;
    add_steps<Tiles, kTwo, 3>(a + at, a_second + at, weights, std::min(chunk, steps - step), ahead);
    if (next % segment_steps == 0 || next >= steps) {
      sums.template end<kTwo>(step / segment_steps, 0);
    }
  }
  sums.flush();
}

// As gemm_many, part after part of whole segments.
template <class Tiles>
FUSEDMOE_INLINE void scaled_many(const GemmTile& tile, std::int64_t steps,
                                 std::int64_t segment_steps, DecodeSteps decode, AddScaled add) {
  const auto* a = static_cast<const char*>(tile.a);
  const auto* panel = static_cast<const char*>(tile.panel);
  const std::int64_t part = kPartSteps / segment_steps * segment_steps;
  ScaledSums<Tiles> sums(tile, add);
  alignas(64) char decoded[kPartSteps * kStepBytes];
  DecodeState state;
  for (std::int64_t begin = 0; begin < steps; begin += part) {
    const std::int64_t end = std::min(steps, begin + part);
    const char* weights = panel + begin * kStepBytes;
    if (decode != nullptr) {
      decode(tile, begin, end - begin, state, decoded);
      weights = decoded;
    }
    for (int first = 0; first < tile.rows; first += 2 * kTileRows) {
      const char* rows = a + first / kTileRows * steps * kTileBytes;
      const char* rows_second = rows + steps * kTileBytes;
      const auto run = [&]<bool kTwo>() {
        for (std::int64_t step = begin; step < end; step += segment_steps) {
          zero_sums<Tiles, kTwo>();
          add_steps<Tiles, kTwo, 2>(rows + step * kTileBytes, rows_second + step * kTileBytes,
                                    weights + (step - begin) * kStepBytes,
                                    std::min(segment_steps, end - step), {});
          sums.template end<kTwo>(step / segment_steps, first);
        }
      };
      if (tile.rows - first > kTileRows) {
        run.template operator()<true>();
      } else {
        run.template operator()<false>();
      }
    }
  }
  sums.flush();
}

// decode: null for weights that lie in the panel as tiles read them.
template <class Tiles>
FUSEDMOE_INLINE void gemm_tiles(const GemmTile& tile, const Steps& steps, DecodeSteps decode) {
  Tiles::configure(std::min(tile.rows, kTileRows));
  if (tile.rows <= kTileRows) {
    gemm_few<Tiles, false>(tile, steps, decode);
  } else if (tile.rows <= 2 * kTileRows) {
    gemm_few<Tiles, true>(tile, steps, decode);
  } else {
    gemm_many<Tiles>(tile, steps, decode);
  }
  Tiles::release();
}

// step_k: of one step. Segments have at most kPartSteps whole steps each.
template <class Tiles>
FUSEDMOE_INLINE void gemm_scaled_tiles(const GemmTile& tile, std::int64_t step_k,
                                       DecodeSteps decode, AddScaled add) {
  const std::int64_t steps = (tile.k + step_k - 1) / step_k;
  const std::int64_t segment_steps = tile.segments.layout.k / step_k;
  Tiles::configure(std::min(tile.rows, kTileRows));
  if (tile.rows <= kTileRows) {
    scaled_few<Tiles, false>(tile, steps, segment_steps, decode, add);
  } else if (tile.rows <= 2 * kTileRows) {
    scaled_few<Tiles, true>(tile, steps, segment_steps, decode, add);
  } else {
    scaled_many<Tiles>(tile, steps, segment_steps, decode, add);
  }
  Tiles::release();
}

// A whole piece in steps of 32 k.
template <class Tiles>
FUSEDMOE_INLINE void gemm_bf16_tiles(const GemmTile& tile, DecodeSteps decode) {
  if (sums_are_scaled(tile.segments.layout)) {
    return gemm_scaled_tiles<Tiles>(tile, kStepK, decode, &add_scaled_sums);
  }
  const std::int64_t steps = (tile.k + kStepK - 1) / kStepK;
  gemm_tiles<Tiles>(tile, {0, steps, steps}, decode);
}

}  // namespace fusedmoe::cpu
