#include "verify_layer.h"

#include <fmt/core.h>

#include <algorithm>

#include "checked_memory.h"
#include "fusedmoe/error.h"
#include "reference/random_layer.h"
#include "reference/reference_moe.h"
#include "verify_routing.h"
#include "verify_weights.h"

namespace fusedmoe::tool {
namespace {

void expect_fit(const checkpoint::Golden& golden, const char* name, std::int64_t expected,
                std::int64_t got, const char* what) {
  if (expected == got) return;
  throw Error(ErrorCode::io,
              fmt::format("{}: tensor '{}': expected {} = {} as layer {} has, got {}",
                          golden.file.string(), name, what, expected, golden.layer, got));
}

void check_golden(const checkpoint::Golden& golden, const MoeConfig& config) {
  expect_fit(golden, "hidden", config.hidden_size, golden.hidden.columns, "hidden_size");
  expect_fit(golden, "topk_ids", config.top_k, golden.topk_ids.columns, "top_k");
  if (!golden.router_logits.empty()) {
    expect_fit(golden, "router_logits", config.num_experts, golden.router_logits.columns,
               "num_experts");
  }
  if (golden.hidden.dtype != config.dtype) {
    throw Error(ErrorCode::io, fmt::format("{}: tensor 'hidden': expected {}, the model's dtype, "
                                           "got {}; make the golden again",
                                           golden.file.string(), to_string(config.dtype),
                                           to_string(golden.hidden.dtype)));
  }
}

std::uint64_t fnv1a(std::span<const std::byte> bytes) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const std::byte byte : bytes) {
    hash = (hash ^ std::to_integer<std::uint64_t>(byte)) * 0x100000001b3U;
  }
  return hash;
}

}  // namespace

Errors tolerance_of(const MoeConfig& config, std::span<const WeightFormat> formats,
                    ComputeMode mode) {
  Errors limit;
  for (const WeightFormat format : formats) {
    const Errors one =
        tolerance(format, config.dtype, config.output_dtype.value_or(config.dtype), mode);
    limit.rel_l2 = std::max(limit.rel_l2, one.rel_l2);
    limit.max_error = std::max(limit.max_error, one.max_error);
  }
  return limit;
}

LayerVerifier::LayerVerifier(const checkpoint::MoeLayer& layer, const PlanOptions& options)
    : layer_(layer), plan_(FusedMoe::create(layer.config, layer.weights, options)) {}

Comparison LayerVerifier::against_oracle(std::int64_t num_tokens, std::uint64_t seed) const {
  const RandomInput input(layer_.config, {.num_tokens = num_tokens}, seed);
  const std::vector<double> expected = reference_moe(layer_.config, layer_.weights, input.hidden(),
                                                     input.topk_weights(), input.topk_ids());
  Comparison result =
      compare_with(expected, input.hidden(), input.topk_weights(), input.topk_ids());
  result.source = "oracle";
  return result;
}

Comparison LayerVerifier::against_golden(const checkpoint::Golden& golden) const {
  check_golden(golden, layer_.config);
  std::vector<double> expected;
  const ConstMatrixView view = golden.expected.view();
  for (std::int64_t row = 0; row < view.rows; ++row) {
    for (std::int64_t column = 0; column < view.columns; ++column) {
      expected.push_back(element(view, row, column));
    }
  }
  Comparison result = compare_with(expected, golden.hidden.view(), golden.topk_weights.view(),
                                   golden.topk_ids.view());
  result.source = "golden";
  result.golden = golden.file.string();
  const RoutingResult routing = check_routing(layer_, golden);
  result.routing = to_string(routing.check);
  if (routing.check == RoutingCheck::mismatch) result.problem = routing.reason;
  if (result.problem.empty() && !result.pass()) result.problem = weights_hint(layer_, golden);
  return result;
}

// Runs in one piece and token by token; both start on scratch and output full of 0xFF.
Comparison LayerVerifier::compare_with(std::span<const double> expected,
                                       const ConstMatrixView& hidden,
                                       const ConstMatrixView& topk_weights,
                                       const ConstMatrixView& topk_ids) const {
  const MoeConfig& config = layer_.config;
  Comparison result{.num_tokens = hidden.rows};
  result.limit = tolerance_of(config, layer_.formats, ComputeMode::a16);
  std::vector<std::byte> bits[2];
  const WorkspaceMode modes[2] = {WorkspaceMode::exact, WorkspaceMode::minimal};
  for (int run = 0; run < 2; ++run) {
    CheckedMatrix output(config.output_dtype.value_or(config.dtype), hidden.rows,
                         config.hidden_size);
    Scratch scratch(plan_, modes[run], hidden.rows);
    plan_.apply(output.view(), hidden, topk_weights, topk_ids, scratch.dirty());
    plan_.check_faults();
    bits[run] = output.bytes();
    if (run == 0) result.errors = compare(output.view(), expected);
    if (!scratch.guards_untouched() || !output.surroundings_untouched()) {
      result.problem = "bytes beside the workspace or the output were written";
    }
  }
  if (result.problem.empty() && bits[0] != bits[1]) {
    result.problem = "in one piece and token by token give different bits";
  }
  result.output_fnv1a = fnv1a(bits[0]);
  return result;
}

}  // namespace fusedmoe::tool
