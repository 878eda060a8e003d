// Implementation of byte_tiles.h, with AVX-512, which every machine with AMX has.
#include "backends/cpu/kernels/byte_tiles.h"

#include <algorithm>

#include "backends/cpu/kernels/byte_rows.h"
#include "backends/cpu/kernels/segment_vectors.h"

namespace fusedmoe::cpu {

namespace {

constexpr std::int64_t kTileRows = 16;
constexpr std::int64_t kStepK = 64;
constexpr std::int64_t kTileBytes = kTileRows * kStepK;
// Bytes of codes ahead, to L1.
constexpr std::int64_t kCodesAhead = 2048;

}  // namespace

void load_byte_tiles(const LoadRows& rows) {
  const ByteRows bytes(rows);
  const std::int64_t steps = (rows.k + kStepK - 1) / kStepK;
  // A multiple of a step: kernel_choice.cpp.
  const std::int64_t segment_steps = std::max<std::int64_t>(rows.segment_k / kStepK, 1);
  for (int r = 0; r < rows.rows; ++r) {
    char* to =
        static_cast<char*>(rows.to) + (r / kTileRows * steps * kTileRows + r % kTileRows) * kStepK;
    auto* sums = static_cast<std::int32_t*>(rows.sums) + r;
    for (std::int64_t begin = 0; begin < steps; begin += segment_steps, sums += rows.rows) {
      __m512i sum = _mm512_setzero_si512();
      for (std::int64_t step = begin; step < std::min(steps, begin + segment_steps); ++step) {
        const std::int64_t k = step * kStepK;
        const __m512i x = bytes.load(r, rows.k0 + k, rows.k - k);
        _mm512_storeu_si512(to + step * kTileBytes, x);
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), x);
      }
      if (rows.segment_k > 0) *sums = _mm512_reduce_add_epi32(sum);
    }
  }
}

void decode_nibble_bytes(const GemmTile& tile, std::int64_t begin, std::int64_t count, DecodeState&,
                         void* to) {
  const bool centre = tile.segments.layout.offset == SegmentLayout::Offset::centre;
  const __m512i less = _mm512_set1_epi8(centre ? 8 : 0);
  const __m512i mask = _mm512_set1_epi8(15);
  constexpr std::int64_t kLines = kTileBytes / 64;  // four k of 32 outputs each
  const char* line = static_cast<const char*>(tile.panel) + begin * kLines * 64;
  auto* out = static_cast<char*>(to);
  for (std::int64_t i = 0; i < count * kLines; ++i, line += 64, out += 128) {
    __builtin_prefetch(line + kCodesAhead);
    const __m512i codes = _mm512_loadu_si512(line);
    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), mask);
    _mm512_store_si512(out, _mm512_sub_epi8(_mm512_and_si512(codes, mask), less));
    _mm512_store_si512(out + 64, _mm512_sub_epi8(high, less));
  }
}

void add_scaled_integers(const GemmTile& tile, std::int64_t index, const float* sums, int first,
                         int rows) {
  SegmentScales scales;
  scales.load(tile.segments, index, 1);
  const float* values = scales.data();
  const __m512 scale[2] = {_mm512_load_ps(values), _mm512_load_ps(values + 16)};
  const bool start = tile.first && index == 0;
  const bool offsets = tile.segments.layout.has_offsets();
  const std::int32_t* row_sums = nullptr;
  __m512 offset[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  if (offsets) {
    row_sums = static_cast<const std::int32_t*>(tile.sums) + index * tile.rows + first;
    offset[0] = _mm512_load_ps(values + 32);
    offset[1] = _mm512_load_ps(values + 48);
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    for (int half = 0; half < 2; ++half) {
      float* out = tile.accumulators + (first + r) * kPanelOutputs + half * 16;
      const __m512i whole = _mm512_loadu_si512(sums + r * kPanelOutputs + half * 16);
      const __m512 before = start ? _mm512_setzero_ps() : _mm512_loadu_ps(out);
      __m512 value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), scale[half], before);
      if (offsets) {
        const __m512 inputs = _mm512_set1_ps(static_cast<float>(row_sums[r]));
        value = _mm512_fmadd_ps(inputs, offset[half], value);
      }
      _mm512_storeu_ps(out, value);
    }
  }
}

}  // namespace fusedmoe::cpu
