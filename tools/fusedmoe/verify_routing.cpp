#include "verify_routing.h"

#include <fmt/core.h>

#include <cmath>
#include <map>

#include "checked_memory.h"
#include "checkpoint/layer_routing.h"
#include "reference/reference_moe.h"

namespace fusedmoe::tool {
namespace {

// Routing is fp32 on both sides: a few units in the last place of a sum over the experts.
constexpr double kWeightTolerance = 4e-6;

std::int64_t id_at(const ConstMatrixView& view, std::int64_t row, std::int64_t column) {
  const std::int64_t index = row * view.row_stride + column;
  if (view.dtype == DType::i64) return static_cast<const std::int64_t*>(view.data)[index];
  return static_cast<const std::int32_t*>(view.data)[index];
}

std::map<std::int64_t, double> row_of(const ConstMatrixView& ids, const ConstMatrixView& weights,
                                      std::int64_t row) {
  std::map<std::int64_t, double> chosen;
  for (std::int64_t k = 0; k < ids.columns; ++k) {
    chosen[id_at(ids, row, k)] += element(weights, row, k);
  }
  return chosen;
}

// What differs in one row; empty when nothing does.
std::string difference(const std::map<std::int64_t, double>& got,
                       const std::map<std::int64_t, double>& expected) {
  for (const auto& [id, weight] : expected) {
    const auto found = got.find(id);
    if (found == got.end()) return fmt::format("expert {} is not chosen", id);
    const double limit = kWeightTolerance * std::max(1.0, std::abs(weight));
    if (!(std::abs(found->second - weight) <= limit)) {
      return fmt::format("expert {} has weight {:.7g}, expected {:.7g}", id, found->second, weight);
    }
  }
  return {};
}

}  // namespace

const char* to_string(RoutingCheck check) noexcept {
  switch (check) {
    case RoutingCheck::match:
      return "match";
    case RoutingCheck::mismatch:
      return "mismatch";
    case RoutingCheck::not_checked:
      return "not checked";
  }
  return "unknown";
}

RoutingResult check_routing(const checkpoint::MoeLayer& layer, const checkpoint::Golden& golden) {
  if (golden.router_logits.empty()) {
    return {RoutingCheck::not_checked, "the golden has no router_logits"};
  }
  const std::optional<RoutingConfig> config = checkpoint::routing_config(layer);
  if (!config) {
    return {RoutingCheck::not_checked, fmt::format("a router of kind {} is the caller's",
                                                   checkpoint::to_string(layer.router.kind))};
  }
  const ConstMatrixView logits = golden.router_logits.view();
  CheckedMatrix weights(DType::f32, logits.rows, config->top_k);
  CheckedMatrix ids(DType::i64, logits.rows, config->top_k);
  route(*config, logits, weights.view(), ids.view());
  for (std::int64_t row = 0; row < logits.rows; ++row) {
    const std::string text =
        difference(row_of(ids.view(), weights.view(), row),
                   row_of(golden.topk_ids.view(), golden.topk_weights.view(), row));
    if (!text.empty()) {
      return {RoutingCheck::mismatch, fmt::format("routing: token {}: {}", row, text)};
    }
  }
  return {RoutingCheck::match, {}};
}

}  // namespace fusedmoe::tool
