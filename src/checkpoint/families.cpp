// The table of families. A new family is one row, and a pattern where none fits.
#include "checkpoint/families.h"

#include <algorithm>

namespace fusedmoe::checkpoint {
namespace {

constexpr TensorPattern kMixtralTensors[] = {{Matrix::gate, "experts.{E}.w1.weight"},
                                             {Matrix::up, "experts.{E}.w3.weight"},
                                             {Matrix::down, "experts.{E}.w2.weight"}};
constexpr TensorPattern kProjTensors[] = {{Matrix::gate, "experts.{E}.gate_proj.weight"},
                                          {Matrix::up, "experts.{E}.up_proj.weight"},
                                          {Matrix::down, "experts.{E}.down_proj.weight"}};
constexpr TensorPattern kUngatedTensors[] = {{Matrix::up, "experts.{E}.up_proj.weight"},
                                             {Matrix::down, "experts.{E}.down_proj.weight"}};
constexpr TensorPattern kFusedTensors[] = {{Matrix::gate_up, "experts.gate_up_proj"},
                                           {Matrix::down, "experts.down_proj"}};
constexpr TensorPattern kGptOssTensors[] = {{Matrix::gate_up, "experts.gate_up_proj"},
                                            {Matrix::gate_up_bias, "experts.gate_up_proj_bias"},
                                            {Matrix::down, "experts.down_proj"},
                                            {Matrix::down_bias, "experts.down_proj_bias"}};
constexpr TensorPattern kGraniteTensors[] = {{Matrix::gate_up, "input_linear.weight"},
                                             {Matrix::down, "output_linear.weight"}};
constexpr TensorPattern kDbrxTensors[] = {{Matrix::gate, "experts.mlp.w1"},
                                          {Matrix::up, "experts.mlp.v1"},
                                          {Matrix::down, "experts.mlp.w2"}};

constexpr ExpertPattern kMixtral[] = {{ExpertStyle::per_expert, kMixtralTensors}};
constexpr ExpertPattern kProj[] = {{ExpertStyle::per_expert, kProjTensors}};
constexpr ExpertPattern kUngated[] = {{ExpertStyle::per_expert, kUngatedTensors}};
// As published, and split as transformers 5 saves it.
constexpr ExpertPattern kQwen35[] = {{ExpertStyle::stacked, kFusedTensors},
                                     {ExpertStyle::per_expert, kProjTensors}};
constexpr ExpertPattern kGptOss[] = {{ExpertStyle::stacked, kGptOssTensors, WeightLayout::kn,
                                      WeightLayout::kn, GateUpLayout::interleaved}};
constexpr ExpertPattern kLlama4[] = {
    {ExpertStyle::stacked, kFusedTensors, WeightLayout::kn, WeightLayout::kn}};
constexpr ExpertPattern kGranite[] = {{ExpertStyle::stacked, kGraniteTensors}};
constexpr ExpertPattern kDbrx[] = {
    {ExpertStyle::flattened, kDbrxTensors, WeightLayout::nk, WeightLayout::kn}};

constexpr std::string_view kScoreBias = "gate.e_score_correction_bias";

constexpr Family kFamilies[] = {
    {.name = "mixtral",
     .prefix = "model.layers.{L}.block_sparse_moe.",
     .patterns = kMixtral,
     .router_weight = "gate.weight",
     .intermediate_size = "intermediate_size"},
    {.name = "phimoe",
     .prefix = "model.layers.{L}.block_sparse_moe.",
     .patterns = kMixtral,
     .router_weight = "gate.weight",
     .intermediate_size = "intermediate_size",
     .router = RouterRule::sparsemixer},
    {.name = "minimax_m2",
     .prefix = "model.layers.{L}.block_sparse_moe.",
     .patterns = kMixtral,
     .router_weight = "gate.weight",
     .selection_bias = "e_score_correction_bias",
     .intermediate_size = "intermediate_size",
     .router = RouterRule::sigmoid_bias},
    {.name = "qwen2_moe",
     .prefix = "model.layers.{L}.mlp.",
     .patterns = kProj,
     .router_weight = "gate.weight",
     .intermediate_size = "moe_intermediate_size",
     .layers = LayerRule::sparse_step,
     .router = RouterRule::softmax_norm_topk},
    {.name = "qwen3_moe",
     .prefix = "model.layers.{L}.mlp.",
     .patterns = kProj,
     .router_weight = "gate.weight",
     .intermediate_size = "moe_intermediate_size",
     .layers = LayerRule::sparse_step,
     .router = RouterRule::softmax_norm_topk},
    {.name = "qwen3_next",
     .prefix = "model.layers.{L}.mlp.",
     .patterns = kProj,
     .router_weight = "gate.weight",
     .intermediate_size = "moe_intermediate_size",
     .layers = LayerRule::sparse_step,
     .router = RouterRule::softmax_norm_topk},
    {.name = "qwen3_5_moe",
     .section = "text_config",
     .prefix = "model.language_model.layers.{L}.mlp.",
     .patterns = kQwen35,
     .router_weight = "gate.weight",
     .intermediate_size = "moe_intermediate_size"},
    {.name = "olmoe",
     .prefix = "model.layers.{L}.mlp.",
     .patterns = kProj,
     .router_weight = "gate.weight",
     .intermediate_size = "intermediate_size",
     .router = RouterRule::softmax_norm_topk},
    {.name = "deepseek_v2",
     .prefix = "model.layers.{L}.mlp.",
     .patterns = kProj,
     .router_weight = "gate.weight",
     .intermediate_size = "moe_intermediate_size",
     .layers = LayerRule::first_k_dense,
     .router = RouterRule::softmax_groups},
    {.name = "deepseek_v3",
     .prefix = "model.layers.{L}.mlp.",
     .patterns = kProj,
     .router_weight = "gate.weight",
     .selection_bias = kScoreBias,
     .intermediate_size = "moe_intermediate_size",
     .layers = LayerRule::first_k_dense,
     .router = RouterRule::sigmoid_bias_groups},
    {.name = "kimi_k2",
     .prefix = "model.layers.{L}.mlp.",
     .patterns = kProj,
     .router_weight = "gate.weight",
     .selection_bias = kScoreBias,
     .intermediate_size = "moe_intermediate_size",
     .layers = LayerRule::first_k_dense,
     .router = RouterRule::sigmoid_bias_groups},
    {.name = "glm4_moe",
     .prefix = "model.layers.{L}.mlp.",
     .patterns = kProj,
     .router_weight = "gate.weight",
     .selection_bias = kScoreBias,
     .intermediate_size = "moe_intermediate_size",
     .layers = LayerRule::first_k_dense,
     .router = RouterRule::sigmoid_bias_groups},
    {.name = "ernie4_5_moe",
     .prefix = "model.layers.{L}.mlp.",
     .patterns = kProj,
     .router_weight = "gate.weight",
     .selection_bias = "moe_statics.e_score_correction_bias",
     .intermediate_size = "moe_intermediate_size",
     .layers = LayerRule::start_interval,
     .router = RouterRule::softmax_bias},
    {.name = "hunyuan_v1_moe",
     .prefix = "model.layers.{L}.mlp.",
     .patterns = kProj,
     .router_weight = "gate.wg.weight",
     .intermediate_size = "moe_intermediate_size",
     .sizes_by_layer = true},
    {.name = "jamba",
     .prefix = "model.layers.{L}.feed_forward.",
     .patterns = kProj,
     .router_weight = "router.weight",
     .intermediate_size = "intermediate_size",
     .layers = LayerRule::period_offset,
     .router = RouterRule::softmax_plain},
    {.name = "gpt_oss",
     .prefix = "model.layers.{L}.mlp.",
     .patterns = kGptOss,
     .router_weight = "router.weight",
     .logit_bias = "router.bias",
     .intermediate_size = "intermediate_size",
     .router = RouterRule::softmax_of_chosen,
     .swigluoai = true},
    {.name = "llama4",
     .section = "text_config",
     .prefix = "language_model.model.layers.{L}.feed_forward.",
     .patterns = kLlama4,
     .router_weight = "router.weight",
     .intermediate_size = "intermediate_size",
     .layers = LayerRule::listed,
     .router = RouterRule::sigmoid_of_chosen,
     .weight_on_input = true},
    {.name = "granitemoe",
     .prefix = "model.layers.{L}.block_sparse_moe.",
     .patterns = kGranite,
     .router_weight = "router.layer.weight",
     .intermediate_size = "intermediate_size",
     .router = RouterRule::softmax_of_chosen},
    {.name = "dbrx",
     .section = "ffn_config",
     .prefix = "transformer.blocks.{L}.ffn.",
     .patterns = kDbrx,
     .router_weight = "router.layer.weight",
     .intermediate_size = "ffn_hidden_size",
     .router = RouterRule::softmax_p_norm,
     .activation = "ffn_act_fn"},
    {.name = "nemotron_h",
     .prefix = "backbone.layers.{L}.mixer.",
     .patterns = kUngated,
     .router_weight = "gate.weight",
     .selection_bias = kScoreBias,
     .intermediate_size = "moe_intermediate_size",
     .layers = LayerRule::block_types,
     .router = RouterRule::sigmoid_bias_groups,
     .activation = "mlp_hidden_act"},
};

}  // namespace

std::span<const Family> families() noexcept { return kFamilies; }

const Family* find_family(std::string_view model_type) noexcept {
  const auto* const row =
      std::find_if(std::begin(kFamilies), std::end(kFamilies),
                   [model_type](const Family& family) { return family.name == model_type; });
  return row == std::end(kFamilies) ? nullptr : row;
}

}  // namespace fusedmoe::checkpoint
