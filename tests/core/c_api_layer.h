// A small layer seen through the C ABI, for c_api_test.cpp and c_api_arguments_test.cpp: weights,
// inputs and the C structs that describe them, with everything valid until a test breaks it.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "fusedmoe/fusedmoe.h"
#include "fusedmoe/fusedmoe_c.h"

namespace fusedmoe::c_api_test {

inline std::uint16_t to_bf16(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// Reproducible values in [-1, 1).
class Values {
 public:
  explicit Values(std::uint32_t seed) : state_(seed) {}
  float next() {
    state_ = state_ * 1664525U + 1013904223U;
    return static_cast<float>(state_ >> 8) / 8388608.0F - 1.0F;
  }
  std::vector<std::uint16_t> bf16(std::int64_t count) {
    std::vector<std::uint16_t> values(static_cast<std::size_t>(count));
    for (auto& value : values) value = to_bf16(next());
    return values;
  }

 private:
  std::uint32_t state_;
};

struct Layer {
  static constexpr std::int64_t kHidden = 40;
  static constexpr std::int64_t kIntermediate = 24;
  static constexpr std::int64_t kExperts = 4;
  static constexpr std::int64_t kTopK = 2;
  static constexpr std::int64_t kTokens = 7;

  std::int64_t num_tokens;
  std::vector<std::uint16_t> w13_data;
  std::vector<std::uint16_t> w2_data;
  std::vector<std::uint16_t> hidden_data;
  std::vector<float> topk_weights_data;
  std::vector<std::int32_t> topk_ids_data;
  std::vector<std::uint16_t> output_data;

  fusedmoe_moe_config config;
  fusedmoe_plan_options options;
  fusedmoe_weight_tensor w13;
  fusedmoe_weight_tensor w2;
  fusedmoe_expert_weights weights;
  fusedmoe_matrix output;
  fusedmoe_const_matrix hidden;
  fusedmoe_const_matrix topk_weights;
  fusedmoe_const_matrix topk_ids;

  explicit Layer(std::uint32_t seed = 1, std::int64_t tokens = kTokens) : num_tokens(tokens) {
    Values values(seed);
    w13_data = values.bf16(kExperts * 2 * kIntermediate * kHidden);
    w2_data = values.bf16(kExperts * kHidden * kIntermediate);
    hidden_data = values.bf16(num_tokens * kHidden);
    for (std::int64_t i = 0; i < num_tokens * kTopK; ++i) {
      topk_weights_data.push_back(0.5F + 0.25F * values.next());
      topk_ids_data.push_back(static_cast<std::int32_t>((i * 3 + i / 5) % kExperts));
    }
    output_data.assign(static_cast<std::size_t>(num_tokens * kHidden), 0xFFFF);

    fusedmoe_moe_config_init(&config);
    config.hidden_size = kHidden;
    config.intermediate_size = kIntermediate;
    config.num_experts = kExperts;
    config.top_k = kTopK;
    fusedmoe_plan_options_init(&options);
    options.max_threads = 2;
    fusedmoe_weight_tensor_init(&w13);
    w13.data = w13_data.data();
    w13.experts = kExperts;
    w13.outputs = 2 * kIntermediate;
    w13.inputs = kHidden;
    fusedmoe_weight_tensor_init(&w2);
    w2.data = w2_data.data();
    w2.experts = kExperts;
    w2.outputs = kHidden;
    w2.inputs = kIntermediate;
    fusedmoe_expert_weights_init(&weights);
    weights.w13 = &w13;
    weights.w2 = &w2;
    output = fusedmoe_matrix_of(output_data.data(), FUSEDMOE_DTYPE_BF16, num_tokens, kHidden);
    hidden = fusedmoe_const_matrix_of(hidden_data.data(), FUSEDMOE_DTYPE_BF16, num_tokens, kHidden);
    topk_weights =
        fusedmoe_const_matrix_of(topk_weights_data.data(), FUSEDMOE_DTYPE_F32, num_tokens, kTopK);
    topk_ids =
        fusedmoe_const_matrix_of(topk_ids_data.data(), FUSEDMOE_DTYPE_I32, num_tokens, kTopK);
  }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  fusedmoe_status create(fusedmoe_plan** plan) const {
    return fusedmoe_plan_create(&config, &weights, &options, plan);
  }
  fusedmoe_status apply(const fusedmoe_plan* plan, const fusedmoe_workspace* workspace = nullptr,
                        const fusedmoe_apply_context* context = nullptr) {
    output_data.assign(output_data.size(), 0xFFFF);
    return fusedmoe_plan_apply(plan, &output, &hidden, &topk_weights, &topk_ids, workspace,
                               context);
  }

  // The same layer through the C++ API.
  MoeConfig cpp_config() const {
    MoeConfig result;
    result.hidden_size = kHidden;
    result.intermediate_size = kIntermediate;
    result.num_experts = kExperts;
    result.top_k = kTopK;
    return result;
  }
  ExpertWeights cpp_weights() const {
    ExpertWeights result;
    result.w13.data = w13_data.data();
    result.w13.experts = kExperts;
    result.w13.outputs = 2 * kIntermediate;
    result.w13.inputs = kHidden;
    result.w2.data = w2_data.data();
    result.w2.experts = kExperts;
    result.w2.outputs = kHidden;
    result.w2.inputs = kIntermediate;
    return result;
  }
  FusedMoe cpp_plan() const {
    PlanOptions cpp_options;
    cpp_options.max_threads = 2;
    return FusedMoe::create(cpp_config(), cpp_weights(), cpp_options);
  }
  std::vector<std::uint16_t> cpp_apply() const {
    std::vector<std::uint16_t> result(output_data.size(), 0xFFFF);
    cpp_plan().apply({result.data(), DType::bf16, num_tokens, kHidden},
                     {hidden_data.data(), DType::bf16, num_tokens, kHidden},
                     {topk_weights_data.data(), DType::f32, num_tokens, kTopK},
                     {topk_ids_data.data(), DType::i32, num_tokens, kTopK});
    return result;
  }
};

struct PlanDeleter {
  void operator()(fusedmoe_plan* plan) const { fusedmoe_plan_destroy(plan); }
};
using PlanPtr = std::unique_ptr<fusedmoe_plan, PlanDeleter>;

inline PlanPtr make_plan(const Layer& layer) {
  fusedmoe_plan* plan = nullptr;
  layer.create(&plan);
  return PlanPtr(plan);
}

// "" when the call succeeded; else the name of its status and the error text.
inline std::string outcome(fusedmoe_status status) {
  if (status == FUSEDMOE_OK) return "";
  return std::string(fusedmoe_status_name(status)) + ": " + fusedmoe_last_error();
}

}  // namespace fusedmoe::c_api_test
