#include "verify_weights.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "formats/format.h"

namespace fusedmoe::tool {
namespace {

// Rounding apart: of a scale, of a sum of many.
constexpr double kTolerance = 1e-4;

// Sum of absolute values over rows first, first + step, ...: `count` of them.
double absolute_sum(const WeightTensor& tensor, std::int64_t expert, std::int64_t first,
                    std::int64_t step, std::int64_t count) {
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::int64_t k = 0; k < tensor.inputs; ++k) {
      sum += std::abs(format_info(tensor.format).decode(tensor, expert, first + i * step, k));
    }
  }
  return sum;
}

// Of gate, up and down; up and down without a gate.
std::vector<double> absolute_sums(const checkpoint::MoeLayer& layer, std::int64_t expert) {
  const bool one_by_one = static_cast<bool>(layer.weights.source);
  const ExpertWeights weights = one_by_one ? layer.weights.source(expert) : layer.weights;
  const std::int64_t e = one_by_one ? 0 : expert;
  const std::int64_t size = layer.config.intermediate_size;
  std::vector<double> sums;
  if (!is_gated(layer.config.activation.kind)) {
    sums.push_back(absolute_sum(weights.w13, e, 0, 1, size));
  } else if (!weights.w13_up.empty()) {
    sums.push_back(absolute_sum(weights.w13, e, 0, 1, size));
    sums.push_back(absolute_sum(weights.w13_up, e, 0, 1, size));
  } else {
    const bool halves = layer.config.gate_up_layout == GateUpLayout::halves;
    sums.push_back(absolute_sum(weights.w13, e, 0, halves ? 1 : 2, size));
    sums.push_back(absolute_sum(weights.w13, e, halves ? size : 1, halves ? 1 : 2, size));
  }
  sums.push_back(absolute_sum(weights.w2, e, 0, 1, layer.config.hidden_size));
  return sums;
}

}  // namespace

std::string weights_hint(const checkpoint::MoeLayer& layer, const checkpoint::Golden& golden) {
  const std::int64_t experts = layer.config.num_experts;
  if (golden.weight_checksums.empty() || golden.num_experts != experts) return {};
  std::vector<double> ratios;
  for (std::int64_t e = 0; e < experts; ++e) {
    const std::vector<double> sums = absolute_sums(layer, e);
    if (static_cast<std::int64_t>(sums.size()) != golden.num_matrices) return {};
    for (std::size_t m = 0; m < sums.size(); ++m) {
      const std::size_t at =
          (static_cast<std::size_t>(e * golden.num_matrices) + m) * 2 + 1;  // of sum and |sum|
      ratios.push_back(sums[m] / golden.weight_checksums[at]);
    }
  }
  const auto off = std::count_if(ratios.begin(), ratios.end(),
                                 [](double ratio) { return !(std::abs(ratio - 1) < kTolerance); });
  if (off == 0) return {};
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  if (*most - *least < kTolerance * *most) {
    return fmt::format(
        "all weights are {:.6g} times those that the golden was made of: its scales have another "
        "bias or unit than the format says",
        *least);
  }
  return fmt::format("{} of {} matrices are not those that the golden was made of", off,
                     ratios.size());
}

}  // namespace fusedmoe::tool
