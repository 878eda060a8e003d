// The layer shapes that bench knows by name, and those that a user writes as H,I,E,K.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fusedmoe/config.h"

namespace fusedmoe::tool {

struct ModelShape {
  std::string name;
  MoeConfig config;
  bool bias = false;  // on w13 and w2
  int ep_size = 1;    // ranks that share the experts; bench runs rank 0's part

  ExpertMap expert_map() const;
  std::int64_t num_local_experts() const;
};

// In the order in which help lists them.
const std::vector<ModelShape>& model_shapes();
// Throws invalid_argument with the names that are known.
ModelShape find_model(const std::string& name);
// "H,I,E,K": hidden_size, intermediate_size, num_experts, top_k; silu, no biases. Its name is the
// text itself. Throws invalid_argument.
ModelShape parse_shape(const std::string& text);

}  // namespace fusedmoe::tool
