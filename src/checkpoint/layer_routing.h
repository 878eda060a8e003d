// A layer's router as the library's routing.
#pragma once

#include <optional>

#include "checkpoint/layer_reader.h"
#include "fusedmoe/routing.h"

namespace fusedmoe::checkpoint {

// Empty for routers that are not in the library: ids and weights can only come from the caller. The
// selection bias is a view into the checkpoint.
std::optional<RoutingConfig> routing_config(const MoeLayer& layer);

}  // namespace fusedmoe::checkpoint
