// Tells reading from computing: what was read, against the sums of the weights that a golden keeps.
#pragma once

#include <string>

#include "checkpoint/golden.h"
#include "checkpoint/layer_reader.h"

namespace fusedmoe::tool {

// Why a golden may have been missed, by its weight_checksums: that all weights are a constant times
// those that it was made of (scales with another bias or unit), or that some differ. Empty when
// the sums agree, or the golden has none. Decodes every weight of the layer.
std::string weights_hint(const checkpoint::MoeLayer& layer, const checkpoint::Golden& golden);

}  // namespace fusedmoe::tool
