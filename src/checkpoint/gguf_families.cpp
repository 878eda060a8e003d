// The table of families in GGUF files: their names for the architectures, and one set of names for
// all tensors. A further architecture is one row.
#include "checkpoint/families.h"

namespace fusedmoe::checkpoint {
namespace {

constexpr TensorPattern kSeparateTensors[] = {{Matrix::gate, "ffn_gate_exps.weight"},
                                              {Matrix::up, "ffn_up_exps.weight"},
                                              {Matrix::down, "ffn_down_exps.weight"}};
constexpr TensorPattern kFusedTensors[] = {{Matrix::gate_up, "ffn_gate_up_exps.weight"},
                                           {Matrix::down, "ffn_down_exps.weight"}};
constexpr TensorPattern kUngatedTensors[] = {{Matrix::up, "ffn_up_exps.weight"},
                                             {Matrix::down, "ffn_down_exps.weight"}};
constexpr TensorPattern kBiasedTensors[] = {
    {Matrix::gate, "ffn_gate_exps.weight"}, {Matrix::up, "ffn_up_exps.weight"},
    {Matrix::down, "ffn_down_exps.weight"}, {Matrix::gate_bias, "ffn_gate_exps.bias"},
    {Matrix::up_bias, "ffn_up_exps.bias"},  {Matrix::down_bias, "ffn_down_exps.bias"}};
constexpr TensorPattern kBiasedFusedTensors[] = {{Matrix::gate_up, "ffn_gate_up_exps.weight"},
                                                 {Matrix::down, "ffn_down_exps.weight"},
                                                 {Matrix::gate_up_bias, "ffn_gate_up_exps.bias"},
                                                 {Matrix::down_bias, "ffn_down_exps.bias"}};

constexpr ExpertPattern kGated[] = {{ExpertStyle::stacked, kSeparateTensors},
                                    {ExpertStyle::stacked, kFusedTensors}};
constexpr ExpertPattern kUngated[] = {{ExpertStyle::stacked, kUngatedTensors}};
constexpr ExpertPattern kBiased[] = {{ExpertStyle::stacked, kBiasedTensors},
                                     {ExpertStyle::stacked, kBiasedFusedTensors}};

constexpr std::string_view kPrefix = "blk.{L}.";
constexpr std::string_view kRouter = "ffn_gate_inp.weight";
constexpr std::string_view kScoreBias = "exp_probs_b.bias";

// expert_gating_func, as llama.cpp numbers it.
constexpr std::int64_t kSoftmax = 1;
constexpr std::int64_t kSigmoid = 2;

constexpr GgufFamily plain(std::string_view architecture, std::string_view name, LayerRule layers,
                           RouterRule router) {
  return {.architecture = architecture,
          .family = {.name = name,
                     .prefix = kPrefix,
                     .patterns = kGated,
                     .router_weight = kRouter,
                     .layers = layers,
                     .router = router}};
}

constexpr GgufFamily biased_scores(std::string_view architecture, std::string_view name,
                                   LayerRule layers, RouterRule router) {
  GgufFamily row = plain(architecture, name, layers, router);
  row.family.selection_bias = kScoreBias;
  return row;
}

// Where LayerRule is neither all nor first_k_dense, the metadata leaves it to the tensors.
constexpr LayerRule kByTensors = LayerRule::listed;

constexpr GgufFamily deepseek(std::string_view name, RouterRule router, std::int64_t gating) {
  GgufFamily row = plain("deepseek2", name, LayerRule::first_k_dense, router);
  if (gating == kSigmoid) {
    row.family.selection_bias = kScoreBias;
    row.also = "kimi_k2";
  }
  row.gating = gating;
  return row;
}

constexpr GgufFamily gpt_oss() {
  GgufFamily row = plain("gpt-oss", "gpt_oss", LayerRule::all, RouterRule::softmax_of_chosen);
  row.family.patterns = kBiased;
  row.family.logit_bias = "ffn_gate_inp.bias";
  row.family.swigluoai = true;
  return row;
}

constexpr GgufFamily llama4() {
  GgufFamily row = plain("llama4", "llama4", kByTensors, RouterRule::sigmoid_of_chosen);
  row.family.weight_on_input = true;
  return row;
}

constexpr GgufFamily nemotron_h() {
  GgufFamily row =
      biased_scores("nemotron_h_moe", "nemotron_h", kByTensors, RouterRule::sigmoid_bias_groups);
  row.family.patterns = kUngated;
  return row;
}

constexpr GgufFamily kRows[] = {
    plain("llama", "mixtral", LayerRule::all, RouterRule::softmax_renormalized),
    plain("phimoe", "phimoe", LayerRule::all, RouterRule::sparsemixer),
    biased_scores("minimax-m2", "minimax_m2", LayerRule::all, RouterRule::sigmoid_bias),
    plain("qwen2moe", "qwen2_moe", kByTensors, RouterRule::softmax_plain),
    plain("qwen3moe", "qwen3_moe", kByTensors, RouterRule::softmax_renormalized),
    plain("qwen3next", "qwen3_next", kByTensors, RouterRule::softmax_renormalized),
    plain("qwen35moe", "qwen3_5_moe", LayerRule::all, RouterRule::softmax_renormalized),
    plain("olmoe", "olmoe", LayerRule::all, RouterRule::softmax_plain),
    deepseek("deepseek_v2", RouterRule::softmax_groups, kSoftmax),
    deepseek("deepseek_v3", RouterRule::sigmoid_bias_groups, kSigmoid),
    biased_scores("glm4moe", "glm4_moe", LayerRule::first_k_dense, RouterRule::sigmoid_bias_groups),
    biased_scores("ernie4_5-moe", "ernie4_5_moe", kByTensors, RouterRule::softmax_bias),
    plain("hunyuan-moe", "hunyuan_v1_moe", LayerRule::all, RouterRule::softmax_renormalized),
    plain("jamba", "jamba", kByTensors, RouterRule::softmax_plain),
    gpt_oss(),
    llama4(),
    plain("granitemoe", "granitemoe", LayerRule::all, RouterRule::softmax_of_chosen),
    plain("dbrx", "dbrx", LayerRule::all, RouterRule::softmax_renormalized),
    nemotron_h(),
};

}  // namespace

std::span<const GgufFamily> gguf_families() noexcept { return kRows; }

}  // namespace fusedmoe::checkpoint
