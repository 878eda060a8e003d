// config.json -> the MoE layers of a model: sizes, activation, router. Reads no weights.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/families.h"
#include "checkpoint/quant_config.h"
#include "checkpoint/router_spec.h"
#include "fusedmoe/config.h"

namespace fusedmoe::checkpoint {

struct LayerConfig {
  std::int64_t layer = 0;
  // gate_up_layout is left to the pattern that the layer's tensors fit.
  MoeConfig moe = {};
};

struct ModelConfig {
  const Family* family = nullptr;
  std::string file = {};
  std::int64_t num_layers = 0;
  std::vector<LayerConfig> layers = {};  // those with experts, ascending
  // Layers num_layers, num_layers + 1, ... that predict further tokens: they may be in the
  // checkpoint, and have experts as the last layer has.
  std::int64_t num_extra_layers = 0;
  RouterSpec router = {};  // without tensor names
  QuantScheme quant = {};

  // Null for a layer without experts.
  const LayerConfig* find(std::int64_t layer) const noexcept;
};

// Throws Error{io} for a config that is broken or contradicts itself, naming file and key, and
// Error{unsupported} for a sound one that is not read: an unknown family, activation or
// quantisation.
ModelConfig parse_model_config(std::string_view text, std::string_view file);
ModelConfig read_model_config(const std::filesystem::path& file);

}  // namespace fusedmoe::checkpoint
