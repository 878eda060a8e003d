// Routing on the CPU: router logits -> topk_ids and topk_weights. Companions of FusedMoe::apply,
// which takes ids and weights from anywhere; here are the choices that model families make.
#pragma once

#include <cstdint>
#include <optional>

#include "fusedmoe/export.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {

// From a logit to an expert's score. Evaluated in fp32.
enum class ScoreFunction : std::uint8_t {
  softmax = 0,        // over all experts
  softmax_of_chosen,  // the logit itself while choosing; the weights are a softmax of the chosen
  sigmoid,
  softplus_sqrt,  // sqrt(log(1 + exp(logit)))
};

// What a token's top_k weights are divided by. No rule divides by zero: where the divisor is 0,
// all weights are 0 already and stay so.
enum class Renormalise : std::uint8_t {
  none = 0,
  sum,              // w / sum
  sum_epsilon,      // w / (sum + epsilon)
  max_sum_epsilon,  // w / max(sum, epsilon)
};

// What makes a group of experts good. With a selection bias: of the biased scores.
enum class GroupScore : std::uint8_t {
  sum_of_two_best = 0,  // a group of one expert counts that one
  best,
};

FUSEDMOE_EXPORT const char* to_string(ScoreFunction function) noexcept;
FUSEDMOE_EXPORT const char* to_string(Renormalise rule) noexcept;
FUSEDMOE_EXPORT const char* to_string(GroupScore score) noexcept;

// How the families of models fill it in (a router's own linear bias, as gpt-oss has one, is part of
// the logits; `selection_bias` is what checkpoints call e_score_correction_bias):
//
//   Mixtral, Qwen3-MoE, Qwen3.5, Hunyuan    softmax, sum
//   OLMoE, Qwen2-MoE, Jamba                 softmax
//   gpt-oss, Granite                        softmax_of_chosen
//   Ernie-4.5                               softmax, bias, max_sum_epsilon 1e-12
//   DeepSeek-V3, GLM-4, Nemotron-H, Kimi    sigmoid, bias, groups by sum_of_two_best,
//                                           sum_epsilon 1e-20, scaling_factor
//   MiniMax-M2                              sigmoid, bias, sum
//   LFM2                                    sigmoid, bias, sum_epsilon 1e-6
//   Llama-4                                 sigmoid; MoeConfig::apply_router_weight_on_input
//   DeepSeek-V2                             softmax, groups by best, scaling_factor
//   DeepSeek-V4                             softplus_sqrt, bias, sum, scaling_factor (its early
//                                           layers look ids up by token: pass those to apply)
//   DBRX                                    softmax, sum: its p-norm for p = 1
//
// Other p-norms and PhiMoE's sparsemixer are not here: their ids and weights come from the caller.
// The families in tests/golden are checked against their modules in Hugging Face transformers.
struct RoutingConfig {
  std::optional<ScoreFunction> score_function = {};  // route() needs it; the others imply it
  std::int64_t top_k = 0;                            // 1 .. num_experts
  // [1, num_experts], f32, f16 or bf16. Added to the scores while choosing; never in a weight.
  ConstMatrixView selection_bias = {};
  Renormalise renormalise = Renormalise::none;
  float epsilon = 1e-20F;  // of sum_epsilon and max_sum_epsilon; finite and > 0
  // Experts in num_groups groups of neighbours; the topk_group best groups stay, experts of the
  // others cannot be chosen. num_groups divides num_experts, and what stays holds top_k experts.
  std::int64_t num_groups = 1;
  std::int64_t topk_group = 1;
  GroupScore group_score = GroupScore::sum_of_two_best;
  // Multiplies the weights, last. Finite and > 0. The only such factor of the library: apply has
  // none, so it cannot be applied twice.
  float scaling_factor = 1.0F;
};

// Chooses top_k experts for each token.
//
//   logits        [num_tokens, num_experts], f32, f16 or bf16
//   topk_weights  [num_tokens, top_k], f32, f16 or bf16, rounded once
//   topk_ids      [num_tokens, top_k], i32 or i64
//
// Rows may be strided, and data may have any alignment. A row's experts are in descending order of
// the biased score; without a bias, of the logit, which orders alike and does not saturate. Ties go
// to the lower id. NaN comes after everything else, so that ids are always in range and distinct;
// the weights of a row with NaN or +infinity may be NaN. Maths is fp32, and a token's result
// depends on its own logits only.
//
// Runs on the calling thread and allocates nothing. Any number of threads may call at once. The
// outputs must not overlap the inputs or each other. Throws invalid_argument, before anything is
// written. num_tokens = 0 succeeds and reads nothing; pointers may then be null.
FUSEDMOE_EXPORT void route(const RoutingConfig& config, ConstMatrixView logits,
                           MatrixView topk_weights, MatrixView topk_ids);

// route() with a softmax over all experts, or over the chosen ones when config.score_function says
// softmax_of_chosen. Without groups.
FUSEDMOE_EXPORT void topk_softmax(const RoutingConfig& config, ConstMatrixView logits,
                                  MatrixView topk_weights, MatrixView topk_ids);

// route() with sigmoid scores, without groups.
FUSEDMOE_EXPORT void topk_sigmoid(const RoutingConfig& config, ConstMatrixView logits,
                                  MatrixView topk_weights, MatrixView topk_ids);

// route() with sqrt(softplus) scores, without groups.
FUSEDMOE_EXPORT void topk_softplus_sqrt(const RoutingConfig& config, ConstMatrixView logits,
                                        MatrixView topk_weights, MatrixView topk_ids);

// route() with groups. Sigmoid unless config.score_function says otherwise.
FUSEDMOE_EXPORT void grouped_topk(const RoutingConfig& config, ConstMatrixView logits,
                                  MatrixView topk_weights, MatrixView topk_ids);

}  // namespace fusedmoe
