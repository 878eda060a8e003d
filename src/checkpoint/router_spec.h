// How a model's router chooses and weighs experts: what config.json says of it, for whoever runs
// it. Runs nothing itself.
#pragma once

#include <cstdint>
#include <string>

#include "checkpoint/config_reader.h"
#include "checkpoint/families.h"
#include "fusedmoe/config.h"

namespace fusedmoe::checkpoint {

enum class RouterKind : std::uint8_t {
  softmax_topk,          // softmax, then top k
  topk_softmax,          // top k, then softmax over the chosen logits
  topk_sigmoid,          // top k, then sigmoid of the chosen logits
  softmax_bias,          // chosen by softmax + bias
  softmax_grouped,       // softmax, group-limited; a group's score is its best
  sigmoid_bias,          // chosen by sigmoid + bias
  sigmoid_bias_grouped,  // the same in groups; a group's score is the sum of its two best
  softmax_p_norm,        // ids and weights come from the caller
  sparsemixer,           // ids and weights come from the caller
};
// "softmax_topk" and so on.
const char* to_string(RouterKind kind) noexcept;

enum class EpsilonRule : std::uint8_t {
  none,  // score / sum
  add,   // score / (sum + epsilon)
  max,   // score / max(sum, epsilon)
};

struct RouterSpec {
  RouterKind kind = RouterKind::softmax_topk;
  bool renormalize = false;
  EpsilonRule epsilon_rule = EpsilonRule::none;
  double epsilon = 0;
  std::int64_t n_group = 1;
  std::int64_t topk_group = 1;
  double scaling = 1;
  // Full tensor names, filled for a layer; empty = there is none.
  std::string weight = {};          // [E, H]
  std::string logit_bias = {};      // [E], added to the logits
  std::string selection_bias = {};  // [E] or [1, E], added to the scores for choosing only
};

// Without tensor names. `moe` gives the number of experts and top_k. Throws Error{io} for keys that
// are missing or wrong, Error{unsupported} for a router that the family's rule does not cover.
RouterSpec read_router_spec(const ConfigReader& config, RouterRule rule, const MoeConfig& moe);

}  // namespace fusedmoe::checkpoint
