// A golden's ids and weights recomputed from its logits with the library's own routing.
#pragma once

#include <string>

#include "checkpoint/golden.h"
#include "checkpoint/layer_reader.h"

namespace fusedmoe::tool {

enum class RoutingCheck { match, mismatch, not_checked };
const char* to_string(RoutingCheck check) noexcept;

struct RoutingResult {
  RoutingCheck check = RoutingCheck::not_checked;
  std::string reason;  // what differs, or why it was not checked
};

// The chosen experts are compared as sets: some routers do not sort.
RoutingResult check_routing(const checkpoint::MoeLayer& layer, const checkpoint::Golden& golden);

}  // namespace fusedmoe::tool
