// Implementation of layer_rules.h.
#include "checkpoint/layer_rules.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/json_value.h"
#include "checkpoint/text.h"

namespace fusedmoe::checkpoint {
namespace {

constexpr std::string_view kLayers[] = {"num_hidden_layers", "n_layers"};

LayerFlags listed_layers(const ConfigReader& config, std::int64_t num_layers) {
  const std::optional<std::int64_t> step =
      config.integer({"interleave_moe_layer_step"}, 1, kMaxLayers);
  const std::optional<std::vector<std::int64_t>> list =
      config.integers({"moe_layers"}, 0, num_layers - 1);
  LayerFlags from_list(static_cast<std::size_t>(num_layers), false);
  LayerFlags from_step = from_list;
  for (std::int64_t l = 0; l < num_layers; ++l) from_step[l] = (l + 1) % step.value_or(1) == 0;
  if (!list) return from_step;
  for (const std::int64_t l : *list) from_list[l] = true;
  if (step && from_list != from_step) {
    config.fail("moe_layers", "and interleave_moe_layer_step name different layers");
  }
  return from_list;
}

// Empty when neither key is there.
LayerFlags block_types(const ConfigReader& config) {
  LayerFlags from_list;
  if (const JsonValue* const value = config.find({"layers_block_type"}).value) {
    const auto* const array = value->as<JsonArray>();
    if (array == nullptr) config.fail("layers_block_type", "is no list of names");
    for (const JsonValue& type : *array) {
      const auto* const name = type.as<std::string>();
      if (name == nullptr) config.fail("layers_block_type", "holds " + to_text(type));
      from_list.push_back(*name == "moe");
    }
  }
  const std::optional<std::string> pattern = config.text({"hybrid_override_pattern"});
  if (!pattern) return from_list;
  LayerFlags from_pattern;
  for (const char c : *pattern) {
    if (std::string_view("M*-E").find(c) == std::string_view::npos) {
      config.fail("hybrid_override_pattern",
                  "is " + quote(*pattern) + "; expected only M, *, - and E (experts)");
    }
    from_pattern.push_back(c == 'E');
  }
  if (!from_list.empty() && from_list != from_pattern) {
    config.fail("layers_block_type", "and hybrid_override_pattern name different layers");
  }
  return from_pattern;
}

}  // namespace

LayerFlags read_layer_flags(const ConfigReader& config, LayerRule rule) {
  if (rule == LayerRule::block_types) {
    LayerFlags flags = block_types(config);
    const std::optional<std::int64_t> count = config.integer(kLayers, 1, kMaxLayers);
    if (flags.empty() || flags.size() > static_cast<std::size_t>(kMaxLayers)) {
      config.fail("layers_block_type", "or hybrid_override_pattern must name 1 to " +
                                           std::to_string(kMaxLayers) + " layers");
    }
    if (count && static_cast<std::size_t>(*count) != flags.size()) {
      config.fail("num_hidden_layers", "is " + std::to_string(*count) + ", but the types of " +
                                           std::to_string(flags.size()) + " layers are named");
    }
    return flags;
  }
  const std::int64_t n = config.require_integer(kLayers, 1, kMaxLayers);
  if (rule == LayerRule::listed) return listed_layers(config, n);
  LayerFlags flags(static_cast<std::size_t>(n), true);
  const auto keep = [&](auto&& has_experts) {
    for (std::int64_t l = 0; l < n; ++l) flags[l] = has_experts(l);
  };
  switch (rule) {
    case LayerRule::first_k_dense: {
      const std::int64_t dense = config.require_integer({"first_k_dense_replace"}, 0, kMaxLayers);
      const std::int64_t step = config.integer({"moe_layer_freq"}, 1, kMaxLayers).value_or(1);
      keep([&](std::int64_t l) { return l >= dense && l % step == 0; });
      break;
    }
    case LayerRule::sparse_step: {
      const std::int64_t step = config.integer({"decoder_sparse_step"}, 1, kMaxLayers).value_or(1);
      keep([&](std::int64_t l) { return (l + 1) % step == 0; });
      const auto dense = config.integers({"mlp_only_layers"}, 0, kMaxLayers);
      for (const std::int64_t l : dense.value_or(std::vector<std::int64_t>())) {
        if (l < n) flags[l] = false;
      }
      break;
    }
    case LayerRule::start_interval: {
      const std::int64_t start = config.require_integer({"moe_layer_start_index"}, 0, kMaxLayers);
      const std::int64_t step = config.integer({"moe_layer_interval"}, 1, kMaxLayers).value_or(1);
      const std::int64_t given =
          config.integer({"moe_layer_end_index"}, -1, kMaxLayers).value_or(-1);
      const std::int64_t end = given < 0 ? n - 1 : given;
      keep([&](std::int64_t l) { return l >= start && l <= end && (l + 1) % step == 0; });
      break;
    }
    case LayerRule::period_offset: {
      const std::int64_t period = config.require_integer({"expert_layer_period"}, 1, kMaxLayers);
      const std::int64_t offset = config.require_integer({"expert_layer_offset"}, 0, period - 1);
      keep([&](std::int64_t l) { return l % period == offset; });
      break;
    }
    default:
      break;
  }
  return flags;
}

}  // namespace fusedmoe::checkpoint
