// A golden's ids and weights recomputed from its logits with the library's own routing.
#pragma once

#include <optional>
#include <string>

#include "checkpoint/golden.h"
#include "checkpoint/layer_reader.h"
#include "fusedmoe/routing.h"

namespace fusedmoe::tool {

// The routing of a layer; empty when ids and weights can only come from the caller.
std::optional<RoutingConfig> routing_config(const checkpoint::MoeLayer& layer);

enum class RoutingCheck { match, mismatch, not_checked };
const char* to_string(RoutingCheck check) noexcept;

struct RoutingResult {
  RoutingCheck check = RoutingCheck::not_checked;
  std::string reason;  // what differs, or why it was not checked
};

// The chosen experts are compared as sets: some routers do not sort.
RoutingResult check_routing(const checkpoint::MoeLayer& layer, const checkpoint::Golden& golden);

}  // namespace fusedmoe::tool
