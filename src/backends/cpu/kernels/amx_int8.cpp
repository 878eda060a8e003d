// Kernels for AMX-INT8, mode a8: tdpbssd multiplies tiles of 16 rows by 64 k with tiles of 64 k by
// 16 outputs. A segment's sums are exact integers; they become fp32 when it ends.
#include "backends/cpu/kernels/amx_byte_kernels.h"
#include "backends/cpu/kernels/amx_tiles.h"
#include "backends/cpu/kernels/byte_tiles.h"
#include "backends/cpu/kernels/declarations.h"

namespace fusedmoe::cpu {
void gemm_a8_amx_int8_int8(const GemmTile& tile) { gemm_byte_tiles<ByteTiles>(tile, nullptr); }
void gemm_a8_amx_int8_int4(const GemmTile& tile) {
  gemm_byte_tiles<ByteTiles>(tile, &decode_nibble_bytes);
}
void load_rows_amx_int8_i8(const LoadRows& rows) { load_byte_tiles(rows); }

}  // namespace fusedmoe::cpu
