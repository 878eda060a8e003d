// Kernels for AMX-BF16: tdpbf16ps multiplies tiles of 16 rows by 32 k with tiles of 32 k by 16
// outputs.
#include "backends/cpu/kernels/amx_kernels.h"
#include "backends/cpu/kernels/amx_tiles.h"
#include "backends/cpu/kernels/codes.h"
#include "backends/cpu/kernels/declarations.h"

namespace fusedmoe::cpu {

#define FUSEDMOE_ONLY FUSEDMOE_AMX_BF16
#define FUSEDMOE_GEMM(isa, format, dtype, recipe)                                  \
  void gemm_##isa##_##format(const GemmTile& tile) {                               \
    gemm_bf16_tiles<Bf16Tiles>(tile, decode_steps(code_of(WeightFormat::format))); \
  }
#include "backends/cpu/kernels/kernels.inc"

void load_rows_amx_bf16_bf16(const LoadRows& rows) {
  load_tile_rows(rows);
  // Shorter segments have their offsets in the weights.
  if (rows.segment_k > 0 && rows.segment_k % 64 == 0) sum_tile_rows(rows);
}

}  // namespace fusedmoe::cpu
