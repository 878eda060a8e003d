// Random cases for people: names, one line for each, and what it covers.
#include <fmt/core.h>

#include <algorithm>

#include "format_spec.h"
#include "formats/format.h"
#include "random_case.h"
#include "text.h"

namespace fusedmoe::tool {
namespace {

const char* layout_name(WeightLayout layout) { return layout == WeightLayout::nk ? "nk" : "kn"; }

const char* parts_name(ScaleParts parts) {
  constexpr const char* kNames[] = {"one", "halves", "interleaved"};
  return kNames[static_cast<int>(parts)];
}

const char* yes_no(bool value) { return value ? "yes" : "no"; }

// The range of `value` between the bounds where code takes another path.
std::string range_of(std::int64_t value, std::int64_t low,
                     std::initializer_list<std::int64_t> bounds) {
  for (const std::int64_t bound : bounds) {
    if (value <= bound)
      return low == bound ? std::to_string(low) : fmt::format("{}..{}", low, bound);
    low = bound + 1;
  }
  return fmt::format("{}..", low);
}

std::string bias_text(const RandomCase& drawn) {
  if (drawn.weights.w13_bias && drawn.weights.w2_bias) return "both";
  return drawn.weights.w13_bias ? "w13" : drawn.weights.w2_bias ? "w2" : "none";
}

bool has_zero_points(WeightFormat format, bool asked) {
  return asked && format_info(format).scales.zero_points;
}

// "int4:32:bf16:zp nk halves transposed"
std::string stored_text(WeightFormat format, const WeightScales& scales, WeightLayout layout,
                        bool zero_points) {
  std::string text = to_string(FormatSpec{format, scales, has_zero_points(format, zero_points)});
  text += std::string(" ") + layout_name(layout);
  if (scales.parts != ScaleParts::one) text += std::string(" ") + parts_name(scales.parts);
  return text + (scales.transposed ? " transposed" : "");
}

std::string scale_type(const WeightScales& scales) {
  return scales.layout == ScaleLayout::none ? "none" : to_string(scales.type);
}

// How scales along K meet the end of a row.
std::string groups_text(const WeightScales& scales, std::int64_t inputs) {
  const std::int64_t group = scales.layout == ScaleLayout::group   ? scales.group_size
                             : scales.layout == ScaleLayout::block ? scales.block_k
                                                                   : 0;
  return group == 0            ? "none"
         : group >= inputs     ? "one"
         : inputs % group == 0 ? "whole"
                               : "last one partial";
}

}  // namespace

const char* to_string(MapKind kind) noexcept {
  constexpr const char* kNames[] = {"none", "linear", "round_robin", "uneven", "empty"};
  return kNames[static_cast<int>(kind)];
}

const char* to_string(RunnerKind kind) noexcept {
  constexpr const char* kNames[] = {"none", "fork_join", "gang"};
  return kNames[static_cast<int>(kind)];
}

const char* to_string(StorageKind kind) noexcept {
  constexpr const char* kNames[] = {"own", "source", "borrowed", "caller", "adopt"};
  return kNames[static_cast<int>(kind)];
}

std::string describe(const RandomCase& drawn) {
  const MoeConfig& config = drawn.config;
  const RandomWeightsOptions& weights = drawn.weights;
  std::string text = fmt::format(
      "hidden_size {} intermediate_size {} num_experts {} (local {}) top_k {} num_tokens {}, {}, "
      "{} -> {}, w13 {} w2 {}, mode {}, isa {}",
      config.hidden_size, config.intermediate_size, config.num_experts, drawn.num_local,
      config.top_k, drawn.input.num_tokens, to_string(config.activation.kind),
      dtype_name(config.dtype), dtype_name(config.output_dtype.value_or(config.dtype)),
      stored_text(weights.w13_format, *weights.w13_scales, weights.w13_layout, weights.zero_points),
      stored_text(weights.w2_format, *weights.w2_scales, weights.w2_layout, weights.zero_points),
      mode_name(drawn.mode), drawn.isa.empty() ? "best" : drawn.isa);
  for (const CaseRun& run : drawn.runs) {
    text += fmt::format("; {} threads, weights {}, workspace {}, runner {}{}", run.threads,
                        to_string(run.storage), to_string(run.workspace), to_string(run.runner),
                        run.in_place ? ", in place" : "");
  }
  return text;
}

std::vector<std::pair<std::string, std::string>> tags(const RandomCase& drawn) {
  const MoeConfig& config = drawn.config;
  const RandomWeightsOptions& weights = drawn.weights;
  const RandomInputOptions& input = drawn.input;
  const Activation kind = config.activation.kind;
  std::vector<std::pair<std::string, std::string>> result = {
      {"hidden_size", range_of(config.hidden_size, 1, {1, 32, 256, 512, 1024})},
      {"intermediate_size", range_of(config.intermediate_size, 1, {1, 32, 256, 512, 1024})},
      {"num_experts", range_of(config.num_experts, 1, {1, 8, 64, 128, 300})},
      {"top_k", config.top_k == config.num_experts ? "all" : range_of(config.top_k, 1, {1, 4, 12})},
      {"num_tokens", range_of(input.num_tokens, 0, {0, 1, 16, 48, 300})},
      {"rows per expert",
       range_of(drawn.num_local == 0 ? 0 : input.num_tokens * config.top_k / config.num_experts, 0,
                {0, 4, 48, 300})},
      {"dtype", dtype_name(config.dtype)},
      {"output_dtype", config.output_dtype ? dtype_name(*config.output_dtype) : "unset"},
      {"w13 format", to_string(weights.w13_format)},
      {"w2 format", to_string(weights.w2_format)},
      {"w13 scales", to_string(weights.w13_scales->layout)},
      {"w2 scales", to_string(weights.w2_scales->layout)},
      {"w13 scale type", scale_type(*weights.w13_scales)},
      {"w2 scale type", scale_type(*weights.w2_scales)},
      {"w13 scale parts", parts_name(weights.w13_scales->parts)},
      {"w13 groups", groups_text(*weights.w13_scales, config.hidden_size)},
      {"w2 groups", groups_text(*weights.w2_scales, config.intermediate_size)},
      {"scales transposed",
       yes_no(weights.w13_scales->transposed || weights.w2_scales->transposed)},
      {"zero points", yes_no(has_zero_points(weights.w13_format, weights.zero_points) ||
                             has_zero_points(weights.w2_format, weights.zero_points))},
      {"mode", mode_name(drawn.mode)},
      {"w13 layout", layout_name(weights.w13_layout)},
      {"w2 layout", layout_name(weights.w2_layout)},
      {"w13", !is_gated(kind)         ? "no gate"
              : weights.gate_up_apart ? "apart"
                                      : "stacked"},
      {"gate/up layout", to_string(config.gate_up_layout)},
      {"gate/up order", to_string(config.gate_up_order)},
      {"activation", to_string(kind)},
      {"clamp_limit", config.clamp_limit ? "set" : "unset"},
      {"weight on input", yes_no(config.apply_router_weight_on_input)},
      {"bias", bias_text(drawn)},
      {"bias dtype", weights.w13_bias || weights.w2_bias ? dtype_name(weights.bias_dtype) : "none"},
      {"weight padding", weights.row_padding > 0      ? "rows"
                         : weights.expert_padding > 0 ? "experts"
                                                      : "none"},
      {"weight address", weights.misalign > 0 ? "misaligned" : "aligned"},
      {"expert_map", to_string(drawn.map_kind)},
      {"map of the call", yes_no(!drawn.call_map.empty())},
      {"ids", to_string(input.ids_dtype)},
      {"topk_weights", dtype_name(input.topk_weights_dtype)},
      {"skipped slots", input.skip_share == 0.0   ? "none"
                        : input.skip_share == 1.0 ? "all"
                                                  : "some"},
      {"repeated ids", yes_no(input.repeated_ids)},
      {"skew", input.hot_share == 0.0   ? "none"
               : input.hot_share == 1.0 ? "all"
                                        : "half"},
      {"strides", input.hidden_padding + input.output_padding > 0 ? "padded" : "dense"},
      {"isa", drawn.isa.empty() ? "best" : drawn.isa},
  };
  for (const CaseRun& run : drawn.runs) {
    result.emplace_back("threads", std::to_string(run.threads));
    result.emplace_back("runner", to_string(run.runner));
    result.emplace_back("weight storage", to_string(run.storage));
    result.emplace_back("workspace", to_string(run.workspace));
    result.emplace_back("in place", yes_no(run.in_place));
  }
  return result;
}

}  // namespace fusedmoe::tool
