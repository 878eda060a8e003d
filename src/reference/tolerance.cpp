#include "reference/tolerance.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "formats/format.h"
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

// a16. Weights of 16 and 32 bits are exact. Codes are exact, too; their scale goes into fp32 sums,
// or (AMX) into the weight, which is then rounded once to the compute dtype: gate, up and down, by
// at most u each, whose errors add up as products do. What remains: the intermediate is rounded
// once to the compute dtype and the result once to the output's, each by at most u relative; sums
// in fp32 add about sqrt(K) * 2^-24, 5e-6 at K = 7168. rel_l2 takes all roundings at their worst;
// the maximum error is relative to the largest value, where single terms may be larger than their
// sum: twice that.
//
// a8. A row becomes integers in steps of largest / 127: an error of largest / (127 sqrt(12)) in the
// mean, and relative to the row's mean that times its crest, largest / root mean square. Normal
// numbers have a crest of 4 to 4.5 (10^3 to 10^5 of them; 6 is taken), products of two, as the
// activated intermediate, of up to 16. Gate and up carry the first error, and the activation's
// slope adds as much again: three times. Single values may have three times the mean error.
Errors tolerance(WeightFormat format, DType compute, DType output, ComputeMode mode) {
  constexpr double kSums = 1e-5;
  const bool exact =
      format_info(format).takes(ScaleLayout::none) && format_info(format).block_elements == 1;
  const double weights = exact || compute == DType::f32 ? 0.0 : 3 * roundoff(compute);
  const double rounding = roundoff(compute) + roundoff(output) + weights + kSums;
  if (mode == ComputeMode::a16) return {rounding, 2 * rounding};
  constexpr double kStep = 1.0 / (127 * 3.4641);
  constexpr double kActivations = (3 * 6 + 16) * kStep;
  return {rounding + kActivations, 2 * rounding + 3 * kActivations};
}

}  // namespace fusedmoe
