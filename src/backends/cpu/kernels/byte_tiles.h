// What AMX-INT8 kernels do with vectors: rows into tiles, sums out of them.
#pragma once

#include <cstdint>

#include "backends/cpu/kernels/kernels.h"

namespace fusedmoe::cpu {

// Rows as signed bytes, tile after tile: [blocks of 16 rows][steps of 64 k][16][64].
void load_byte_tiles(const LoadRows& rows);
// accumulators (+)= scale * sum of segment `index` of a piece. sums: [rows][32].
void add_scaled_sums(const GemmTile& tile, std::int64_t index, const std::int32_t* sums);

}  // namespace fusedmoe::cpu
