// Kernels for any machine: one float at a time, multiply and add rounded apart.
#include <bit>
#include <cmath>
#include <cstdint>

#include "backends/cpu/kernels/declarations.h"
#include "backends/cpu/kernels/float_kernels.h"

namespace fusedmoe::cpu {
namespace {

struct F32x1 {
  static constexpr int kWidth = 1;
  float v = 0.0F;

  F32x1() = default;
  explicit F32x1(float value) : v(value) {}
  static F32x1 load(const float* p) { return F32x1(*p); }
  static F32x1 load_f16(const std::uint16_t* p) { return F32x1(f16_to_f32(*p)); }
  static F32x1 load_bf16(const std::uint16_t* p) { return F32x1(bf16_to_f32(*p)); }
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

}  // namespace

void gemm_scalar_f32(const GemmTile& tile) { gemm<F32x1, WeightFormat::f32, 1>(tile); }
void gemm_scalar_f16(const GemmTile& tile) { gemm<F32x1, WeightFormat::f16, 1>(tile); }
void gemm_scalar_bf16(const GemmTile& tile) { gemm<F32x1, WeightFormat::bf16, 1>(tile); }
void load_rows_scalar_f32(const LoadRows& rows) { load_rows<F32x1>(rows); }
void activate_scalar(const ActivateTile& tile) { activate<F32x1>(tile); }
void combine_scalar(const CombineTile& tile) { combine<F32x1>(tile); }

}  // namespace fusedmoe::cpu
