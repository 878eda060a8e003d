// Kernels for AMX-INT8, mode a8: tdpbssd multiplies tiles of 16 rows by 64 k with tiles of 64 k by
// 16 outputs. A segment's sums are exact integers; they become fp32 when it ends.
#include <algorithm>
#include <cstdint>

#include "backends/cpu/kernels/amx_tiles.h"
#include "backends/cpu/kernels/byte_tiles.h"
#include "backends/cpu/kernels/declarations.h"

namespace fusedmoe::cpu {
namespace {

constexpr std::int64_t kByteStepK = 64;
constexpr int kMostRows = 256;  // FUSEDMOE_INPUTS(amx_int8, i8, ...)

void gemm_bytes(const GemmTile& tile) {
  alignas(64) std::int32_t sums[kMostRows * kPanelOutputs];
  const std::int64_t all_steps = (tile.k + kByteStepK - 1) / kByteStepK;
  const std::int64_t segment_steps = tile.segments.layout.k / kByteStepK;
  for (std::int64_t begin = 0; begin < all_steps; begin += segment_steps) {
    GemmTile segment = tile;
    const std::int64_t steps = std::min(segment_steps, all_steps - begin);
    segment.panel = static_cast<const char*>(tile.panel) + begin * kStepBytes;
    if (begin + steps < all_steps) {
      segment.next = static_cast<const char*>(segment.panel) + steps * kStepBytes;
    }
    segment.accumulators = reinterpret_cast<float*>(sums);  // the bits of integers
    segment.first = true;
    gemm_tiles<ByteTiles>(segment, {begin, steps, all_steps}, nullptr);
    add_scaled_sums(tile, begin / segment_steps, sums);
  }
}

}  // namespace

void gemm_a8_amx_int8_int8(const GemmTile& tile) { gemm_bytes(tile); }
void load_rows_amx_int8_i8(const LoadRows& rows) { load_byte_tiles(rows); }

}  // namespace fusedmoe::cpu
