// What AMX-INT8 kernels do with vectors: rows into tiles, codes of four bits into bytes, sums out
// of tiles.
#pragma once

#include <cstdint>

#include "backends/cpu/kernels/amx_decode.h"
#include "backends/cpu/kernels/kernels.h"

namespace fusedmoe::cpu {

// Rows as signed bytes, tile after tile: [blocks of 16 rows][steps of 64 k][16][64]. With the sums
// of their segments.
void load_byte_tiles(const LoadRows& rows);
// Codes of four bits as signed bytes, [16][32][4] for each step of 64 k: less 8 where they are
// centred. A DecodeSteps.
void decode_nibble_bytes(const GemmTile& tile, std::int64_t begin, std::int64_t count,
                         DecodeState& state, void* to);
// As add_scaled_sums, of integers: sums are bits of std::int32_t.
void add_scaled_integers(const GemmTile& tile, std::int64_t index, const float* sums, int first,
                         int rows);

}  // namespace fusedmoe::cpu
