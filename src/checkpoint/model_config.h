// config.json -> the MoE layers of a model: sizes, activation, router. Reads no weights.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

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

  // Null for a layer without experts.
  const LayerConfig* find(std::int64_t layer) const noexcept;
};

// Throws Error{io} for a config that is broken or contradicts itself, naming file and key, and
// Error{unsupported} for a sound one that is not read: an unknown family or activation, or a
// quantised checkpoint.
ModelConfig parse_model_config(std::string_view text, std::string_view file);
ModelConfig read_model_config(const std::filesystem::path& file);

}  // namespace fusedmoe::checkpoint
