// The model families as data: one row each in families.cpp. How names are matched is in
// expert_names.h, how config.json is read with these facts in model_config.h.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "fusedmoe/config.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::checkpoint {

enum class Matrix : std::uint8_t {
  gate,
  up,
  down,
  gate_up,
  gate_bias,
  up_bias,
  gate_up_bias,
  down_bias
};

// Names stand behind the family's prefix; {E} is an expert's number. They are those of unquantised
// weights; what quantisation makes of them is in storage_layouts.h.
struct TensorPattern {
  Matrix matrix;
  std::string_view name;
};

enum class ExpertStyle : std::uint8_t {
  per_expert,  // a tensor [N, K] for each expert and matrix
  stacked,     // a tensor [E, N, K], or [E, K, N], for each matrix
  flattened,   // the same without the first dimension: [E * N, K], or [E * K, N]
};

// One way in which a family stores the experts of a layer. Layouts are facts of the family: they
// never follow from a shape.
struct ExpertPattern {
  ExpertStyle style;
  std::span<const TensorPattern> tensors;
  WeightLayout w13_layout = WeightLayout::nk;
  WeightLayout w2_layout = WeightLayout::nk;
  GateUpLayout gate_up_layout = GateUpLayout::halves;  // of the matrix gate_up
};

// Which layers have experts.
enum class LayerRule : std::uint8_t {
  all,
  first_k_dense,   // first_k_dense_replace, moe_layer_freq; layers of num_nextn_predict_layers
  sparse_step,     // decoder_sparse_step, mlp_only_layers
  start_interval,  // moe_layer_start_index, moe_layer_end_index, moe_layer_interval
  period_offset,   // expert_layer_period, expert_layer_offset
  listed,          // moe_layers, or interleave_moe_layer_step
  block_types,     // layers_block_type, or hybrid_override_pattern
};

// Score function, grouping and renormalisation; RouterSpec holds what comes of them.
enum class RouterRule : std::uint8_t {
  softmax_renormalized,  // softmax, top k, always renormalised
  softmax_norm_topk,     // softmax, top k, renormalised as norm_topk_prob says
  softmax_plain,         // softmax, top k, as is
  softmax_of_chosen,     // top k, softmax over the chosen logits
  softmax_bias,          // softmax + bias, renormalised by max(sum, moe_norm_min)
  softmax_groups,        // DeepSeek-V2
  sigmoid_bias,          // sigmoid + bias, renormalised
  sigmoid_bias_groups,   // DeepSeek-V3
  sigmoid_of_chosen,     // Llama-4
  sparsemixer,           // PhiMoE
  softmax_p_norm,        // DBRX: moe_normalize_expert_weights
};

struct Family {
  std::string_view name = {};  // model_type in config.json
  std::string_view section =
      {};  // object of config.json that holds the sizes; empty = the top level
  std::string_view prefix = {};  // of a layer's MoE block; {L} is the layer's number
  std::span<const ExpertPattern> patterns = {};
  // Behind the prefix; empty = there is none.
  std::string_view router_weight = {};
  std::string_view logit_bias = {};
  std::string_view selection_bias = {};
  std::string_view intermediate_size = {};  // the key of config.json
  LayerRule layers = LayerRule::all;
  RouterRule router = RouterRule::softmax_renormalized;
  std::string_view activation = "hidden_act";  // the key of config.json
  // hidden_act says silu although it is swigluoai.
  bool swigluoai = false;
  bool weight_on_input = false;
  // A size may be a list with one value for each layer.
  bool sizes_by_layer = false;
};

std::span<const Family> families() noexcept;
// Null when there is no such family.
const Family* find_family(std::string_view model_type) noexcept;

// A family as GGUF files store it: other names, the same model.
struct GgufFamily {
  std::string_view architecture = {};  // general.architecture
  Family family = {};
  // <architecture>.expert_gating_func that this row stands for, for architectures that have
  // several; 0 = whatever it says, or nothing.
  std::int64_t gating = 0;
  std::string_view also = {};  // another model_type that a config.json beside the file may have
};
std::span<const GgufFamily> gguf_families() noexcept;

}  // namespace fusedmoe::checkpoint
