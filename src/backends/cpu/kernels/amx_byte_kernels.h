// The kernel of AMX-INT8 on any Tiles, as amx_kernels.h has it of AMX-BF16: tiles of 16 rows by 64
// k.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backends/cpu/kernels/amx_kernels.h"
#include "backends/cpu/kernels/byte_tiles.h"

namespace fusedmoe::cpu {

inline constexpr std::int64_t kByteStepK = 64;
inline constexpr int kMostByteRows = 256;  // FUSEDMOE_INPUTS(amx_int8, i8, ...)

// Exact sums of a segment in integers, which become fp32 when it ends. decode: null for int8.
template <class Tiles>
FUSEDMOE_INLINE void gemm_byte_tiles(const GemmTile& tile, DecodeSteps decode) {
  const std::int64_t segment_steps = tile.segments.layout.k / kByteStepK;
  if (segment_steps <= kPartSteps) {
    return gemm_scaled_tiles<Tiles>(tile, kByteStepK, decode, &add_scaled_integers);
  }
  // Without groups: segments are as long as sums may be, and rows pass part after part of one.
  alignas(64) float sums[kMostByteRows * kPanelOutputs];  // the bits of integers
  const std::int64_t all_steps = (tile.k + kByteStepK - 1) / kByteStepK;
  for (std::int64_t begin = 0; begin < all_steps; begin += segment_steps) {
    GemmTile segment = tile;
    const std::int64_t steps = std::min(segment_steps, all_steps - begin);
    segment.panel = static_cast<const char*>(tile.panel) + begin * kStepBytes;
    if (begin + steps < all_steps) {
      segment.next = static_cast<const char*>(segment.panel) + steps * kStepBytes;
    }
    segment.accumulators = sums;
    segment.first = true;
    gemm_tiles<Tiles>(segment, {begin, steps, all_steps}, nullptr);
    add_scaled_integers(tile, begin / segment_steps, sums, 0, tile.rows);
  }
}

}  // namespace fusedmoe::cpu
