// Panels of codes as the tiles of AMX read them, and what else its kernels do with vectors. Of
// AMX-BF16: steps of 32 k by 32 outputs, [16][32][2] bf16. Either each weight is scaled in fp32 and
// rounded once, or, where segments are long, codes stay what they are and sums are scaled.
#pragma once

#include <cstdint>

#include "backends/cpu/kernels/kernels.h"
#include "formats/float_bits.h"

namespace fusedmoe::cpu {

// What a decoder keeps from one call to the next of the same piece: what it made of the scales.
struct DecodeState {
  std::int64_t segment = -1;
  alignas(64) char memory[8192];
};

// Steps [begin, begin + count) of a piece, into `to`; zeros behind its last k. Called in ascending
// order of steps.
using DecodeSteps = void (*)(const GemmTile& tile, std::int64_t begin, std::int64_t count,
                             DecodeState& state, void* to);

// The function for a code; null for bf16, which tiles read where it lies.
DecodeSteps decode_steps(Code code) noexcept;

// Whether sums are scaled instead of weights. To scale a weight takes 8 operations for 32 of them;
// a sum's way out of its tile costs as much as a few steps of tiles do, so that segments of one
// step would not pay. fp8 in blocks is scaled by its tables, for nothing.
FUSEDMOE_INLINE bool sums_are_scaled(const SegmentLayout& layout) {
  return layout.k > 0 && layout.k % 64 == 0 && !layout.per_half;
}

// accumulators (+)= scale * sum + offset * inputs, of segment `index` of a piece, for rows [first,
// first + rows). sums: of these rows, [rows][32] in fp32 (or integers: byte_tiles.h).
using AddScaled = void (*)(const GemmTile& tile, std::int64_t index, const float* sums, int first,
                           int rows);
void add_scaled_sums(const GemmTile& tile, std::int64_t index, const float* sums, int first,
                     int rows);

// Sums of the inputs of each segment, [segments][rows], of rows that lie in tiles.
void sum_tile_rows(const LoadRows& rows);

}  // namespace fusedmoe::cpu
