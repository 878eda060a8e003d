// Which layers of a model have experts, by the keys of config.json that its family uses.
#pragma once

#include <vector>

#include "checkpoint/config_reader.h"
#include "checkpoint/families.h"

namespace fusedmoe::checkpoint {

// One for each layer, true for those with experts; 1 to kMaxLayers of them.
using LayerFlags = std::vector<bool>;

// Throws Error{io} for keys that are missing, wrong or contradict each other.
LayerFlags read_layer_flags(const ConfigReader& config, LayerRule rule);

}  // namespace fusedmoe::checkpoint
