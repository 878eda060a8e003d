#include "reference/tolerance.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/reference_moe.h"

namespace fusedmoe {
namespace {

// Unit roundoff: the largest relative error of one rounding.
double roundoff(DType dtype) {
  return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0x1p-24;
}

}  // namespace

Errors compare(const ConstMatrixView& got, std::span<const double> expected,
               std::span<const double> scale) {
  double difference = 0;
  double norm = 0;
  double scale_norm = 0;
  double max_difference = 0;
  double max_expected = 0;
  for (std::int64_t row = 0; row < got.rows; ++row) {
    for (std::int64_t column = 0; column < got.columns; ++column) {
      const double a = element(got, row, column);
      const double b = expected[row * got.columns + column];
      if (a == b || (std::isnan(a) && std::isnan(b))) {
        if (!std::isfinite(b)) continue;
      } else if (!std::isfinite(a) || !std::isfinite(b)) {
        return {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity()};
      }
      difference += (a - b) * (a - b);
      max_difference = std::max(max_difference, std::abs(a - b));
      max_expected = std::max(max_expected, std::abs(b));
      norm += b * b;
      if (scale.empty()) continue;
      const double size = scale[row * got.columns + column];
      scale_norm += size * size;
      max_expected = std::max(max_expected, size);
    }
  }
  if (difference == 0) return {};
  return {std::sqrt(difference / std::max(norm, scale_norm)), max_difference / max_expected};
}

// An unquantised weight is exact. What remains: the intermediate is rounded once to the compute
// dtype and the result once to the output's, each by at most u relative; sums in fp32 add about
// sqrt(K) * 2^-24, 5e-6 at K = 7168. rel_l2 takes both roundings at their worst; the maximum error
// is relative to the largest value, where single terms may be larger than their sum: twice that.
Errors tolerance(WeightFormat format, DType compute, DType output, ComputeMode mode) {
  (void)format;  // f32, f16 and bf16 weights are exact in fp32
  (void)mode;    // a16: activations are exact too
  constexpr double kSums = 1e-5;
  const double rounding = roundoff(compute) + roundoff(output);
  return {rounding + kSums, 2 * (rounding + kSums)};
}

}  // namespace fusedmoe
