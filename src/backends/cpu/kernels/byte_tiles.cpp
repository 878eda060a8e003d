// Implementation of byte_tiles.h, with AVX-512, which every machine with AMX has.
#include "backends/cpu/kernels/byte_tiles.h"

#include <algorithm>

#include "backends/cpu/kernels/byte_rows.h"
#include "backends/cpu/kernels/segment_vectors.h"

namespace fusedmoe::cpu {

void load_byte_tiles(const LoadRows& rows) {
  constexpr int kTileRows = 16;
  constexpr std::int64_t kStepK = 64;
  const ByteRows bytes(rows);
  const std::int64_t steps = (rows.k + kStepK - 1) / kStepK;
  for (int r = 0; r < rows.rows; ++r) {
    char* to =
        static_cast<char*>(rows.to) + (r / kTileRows * steps * kTileRows + r % kTileRows) * kStepK;
    for (std::int64_t step = 0; step < steps; ++step) {
      const std::int64_t k = step * kStepK;
      _mm512_storeu_si512(to + step * kTileRows * kStepK, bytes.load(r, rows.k0 + k, rows.k - k));
    }
  }
}

void add_scaled_sums(const GemmTile& tile, std::int64_t index, const std::int32_t* sums) {
  SegmentScales scales;
  scales.load(tile.segments, index, 1);
  const __m512 scale[2] = {_mm512_load_ps(scales.data()), _mm512_load_ps(scales.data() + 16)};
  const bool start = tile.first && index == 0;
  for (std::int64_t i = 0; i < std::int64_t{tile.rows} * 2; ++i) {
    float* out = tile.accumulators + i * 16;
    const __m512 sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + i * 16));
    const __m512 before = start ? _mm512_setzero_ps() : _mm512_loadu_ps(out);
    _mm512_storeu_ps(out, _mm512_fmadd_ps(sum, scale[i % 2], before));
  }
}

}  // namespace fusedmoe::cpu
