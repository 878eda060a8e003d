// Kernels for any machine: one float at a time, multiply and add rounded apart.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "backends/cpu/kernels/declarations.h"
#include "backends/cpu/kernels/float_kernels.h"
#include "backends/cpu/kernels/quantise_rows.h"

namespace fusedmoe::cpu {
namespace {

constexpr int kNibbleLanes = 64;  // of FUSEDMOE_INPUTS(scalar, f32, ...)

struct F32x1 {
  static constexpr int kWidth = 1;
  float v = 0.0F;

  F32x1() = default;
  explicit F32x1(float value) : v(value) {}
  static F32x1 load(const float* p) { return F32x1(*p); }
  static F32x1 load_f16(const std::uint16_t* p) { return F32x1(f16_to_f32(*p)); }
  static F32x1 load_bf16(const std::uint16_t* p) { return F32x1(bf16_to_f32(*p)); }
  struct Table {
    const std::array<float, 16>& values;
    explicit Table(const std::array<float, 16>& sixteen) : values(sixteen) {}
  };
  template <Code kCode>
  static F32x1 codes(const void* panel, std::int64_t k, int output, const Table& table) {
    const std::int64_t index = k * kPanelOutputs + output;
    if constexpr (kCode == Code::f32) {
      return load(static_cast<const float*>(panel) + index);
    } else if constexpr (kCode == Code::f16) {
      return load_f16(static_cast<const std::uint16_t*>(panel) + index);
    } else if constexpr (kCode == Code::bf16) {
      return load_bf16(static_cast<const std::uint16_t*>(panel) + index);
    } else if constexpr (bits_of(kCode) == 4) {
      const NibblePlace place = nibble_place(kNibbleLanes, static_cast<int>(index % 128));
      const auto* line = static_cast<const std::uint8_t*>(panel) + index / 128 * 64;
      return F32x1(table.values[line[place.byte] >> place.shift & 0xfU]);
    } else {
      const std::uint8_t code = static_cast<const std::uint8_t*>(panel)[index];
      if constexpr (kCode == Code::e4m3) return F32x1(e4m3_to_f32(code));
      if constexpr (kCode == Code::e5m2) return F32x1(e5m2_to_f32(code));
      return F32x1(static_cast<float>(static_cast<std::int8_t>(code)));
    }
  }
  void store(float* p) const { *p = v; }
  void store_f16(std::uint16_t* p) const { *p = f32_to_f16(v); }
  void store_bf16(std::uint16_t* p) const { *p = f32_to_bf16(v); }

  friend F32x1 operator+(F32x1 a, F32x1 b) { return F32x1(a.v + b.v); }
  friend F32x1 operator-(F32x1 a, F32x1 b) { return F32x1(a.v - b.v); }
  friend F32x1 operator*(F32x1 a, F32x1 b) { return F32x1(a.v * b.v); }
  friend F32x1 operator/(F32x1 a, F32x1 b) { return F32x1(a.v / b.v); }
  friend F32x1 operator-(F32x1 a) { return F32x1(-a.v); }
  friend F32x1 multiply_add(F32x1 a, F32x1 b, F32x1 c) { return F32x1(a.v * b.v + c.v); }
  friend F32x1 at_most(F32x1 x, F32x1 limit) { return F32x1(x.v > limit.v ? limit.v : x.v); }
  friend F32x1 at_least(F32x1 x, F32x1 limit) { return F32x1(x.v < limit.v ? limit.v : x.v); }
  friend F32x1 abs(F32x1 x) { return F32x1(std::fabs(x.v)); }
  friend F32x1 copy_sign(F32x1 x, F32x1 sign) { return F32x1(std::copysign(x.v, sign.v)); }
  friend F32x1 select_less(F32x1 a, F32x1 b, F32x1 x, F32x1 y) { return a.v < b.v ? x : y; }
  // By the magic number 1.5 * 2^23: the callers stay far inside 2^22.
  friend F32x1 round_even(F32x1 x) { return F32x1((x.v + 12582912.0F) - 12582912.0F); }
  friend F32x1 pow2(F32x1 n) {
    // A NaN gives some number, which its caller multiplies by a NaN.
    const int exponent = n.v >= -126.0F && n.v <= 127.0F ? static_cast<int>(n.v) : 0;
    return F32x1(std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23));
  }
};

// Mode a8: rows of bytes, [rows][byte_row(k)].
std::int64_t byte_row(std::int64_t k) { return (k + 3) / 4 * 4 + 64; }

void load_byte_rows(const LoadRows& rows) {
  for (int r = 0; r < rows.rows; ++r) {
    const RowScale scale = row_scale(rows.from[r], rows.dtype, rows.row_k);
    rows.scales[r] = scale.scale;
    auto* to = static_cast<std::int8_t*>(rows.to) + r * byte_row(rows.k);
    auto* sums = static_cast<std::int32_t*>(rows.sums) + r;
    std::int32_t sum = 0;
    for (std::int64_t k = 0; k < rows.k; ++k) {
      to[k] = quantise(load_element(rows.from[r], rows.dtype, rows.k0 + k), scale.inverse);
      sum += to[k];
      if (k + 1 < rows.k && (k + 1) % rows.segment_k != 0) continue;
      *sums = sum;
      sums += rows.rows;
      sum = 0;
    }
  }
}

// code(k, output): the weight as an integer, less what offsets make of it.
template <class CodeAt>
void gemm_integers(const GemmTile& tile, const CodeAt& code) {
  const std::int64_t step = tile.segments.layout.k;
  for (std::int64_t begin = 0; begin < tile.k; begin += step) {
    const std::int64_t segment = begin / step;
    float scale[kPanelOutputs];
    float offset[kPanelOutputs];
    load_segment(tile.segments, segment, scale, offset);
    for (int r = 0; r < tile.rows; ++r) {
      const std::int8_t* x = static_cast<const std::int8_t*>(tile.a) + r * byte_row(tile.k);
      const auto inputs =
          static_cast<float>(static_cast<const std::int32_t*>(tile.sums)[segment * tile.rows + r]);
      for (int n = 0; n < kPanelOutputs; ++n) {
        std::int32_t sum = 0;
        for (std::int64_t k = begin; k < std::min(begin + step, tile.k); ++k) {
          sum += x[k] * code(k, n);
        }
        float& out = tile.accumulators[r * kPanelOutputs + n];
        if (tile.first && begin == 0) out = 0.0F;
        out += static_cast<float>(sum) * scale[n];
        out += inputs * offset[n];
      }
    }
  }
}

}  // namespace

void gemm_a8_scalar_int8(const GemmTile& tile) {
  const auto* codes = static_cast<const std::int8_t*>(tile.panel);
  gemm_integers(tile, [&](std::int64_t k, int n) -> int {
    return codes[(k / 4 * kPanelOutputs + n) * 4 + k % 4];
  });
}
void gemm_a8_scalar_int4(const GemmTile& tile) {
  const auto* codes = static_cast<const std::uint8_t*>(tile.panel);
  const int centre = tile.segments.layout.offset == SegmentLayout::Offset::centre ? 8 : 0;
  gemm_integers(tile, [&](std::int64_t k, int n) -> int {
    const NibblePlace place = nibble_place(kNibbleLanes, static_cast<int>((n * 4) + k % 4));
    return (codes[k / 4 * 64 + place.byte] >> place.shift & 0xf) - centre;
  });
}
void load_rows_scalar_i8(const LoadRows& rows) { load_byte_rows(rows); }
#define FUSEDMOE_ONLY FUSEDMOE_SCALAR
#define FUSEDMOE_GEMM(isa, format, dtype, recipe)        \
  void gemm_##isa##_##format(const GemmTile& tile) {     \
    gemm<F32x1, code_of(WeightFormat::format), 1>(tile); \
  }
#include "backends/cpu/kernels/kernels.inc"

void load_rows_scalar_f32(const LoadRows& rows) { load_rows<F32x1>(rows); }
void activate_scalar(const ActivateTile& tile) { activate<F32x1>(tile); }
void combine_scalar(const CombineTile& tile) { combine<F32x1>(tile); }

}  // namespace fusedmoe::cpu
