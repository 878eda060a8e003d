// A layer whose expert outputs are chosen exactly, in f32: expert e turns the token [1, 0, ...]
// into the vector values[e]. For tests of what happens after the experts.
#pragma once

#include <cstdint>
#include <vector>

#include "fusedmoe/fusedmoe.h"
#include "support/layer.h"

namespace fusedmoe::test {

// relu2 without a gate and one intermediate channel: expert e gives max(1 * 1, 0)^2 * w2[e].
class HandLayer {
 public:
  // values: [num_experts][hidden_size]
  HandLayer(const std::vector<std::vector<float>>& values, std::int64_t top_k,
            DType output_dtype = DType::f32, WeightFormat format = WeightFormat::f32)
      : num_experts_(static_cast<std::int64_t>(values.size())) {
    config.hidden_size = static_cast<std::int64_t>(values[0].size());
    config.intermediate_size = 1;
    config.num_experts = num_experts_;
    config.top_k = top_k;
    config.activation.kind = Activation::relu2;
    config.dtype = DType::f32;
    config.output_dtype = output_dtype;
    for (const auto& value : values) {
      for (std::int64_t h = 0; h < config.hidden_size; ++h) {
        w13_.push_back(h == 0 ? 1.0F : 0.0F);
        w2_.push_back(value[static_cast<std::size_t>(h)]);
      }
    }
    weights.w13 = {.data = w13_.data(),
                   .format = format,
                   .experts = num_experts_,
                   .outputs = 1,
                   .inputs = config.hidden_size};
    weights.w2 = {.data = w2_.data(),
                  .format = format,
                  .experts = num_experts_,
                  .outputs = config.hidden_size,
                  .inputs = 1};
  }
  HandLayer(const HandLayer&) = delete;
  HandLayer& operator=(const HandLayer&) = delete;

  // One token with x = [1, 0, ...]; its output, widened.
  std::vector<double> run_token(const FusedMoe& plan, const std::vector<std::int32_t>& ids,
                                const std::vector<float>& topk_weights,
                                const ApplyContext& context = {}) const {
    std::vector<float> x(static_cast<std::size_t>(config.hidden_size), 0.0F);
    x[0] = 1.0F;
    Bytes output(x.size() * 4, kDirt);
    const MatrixView out(output.data(), config.output_dtype.value_or(config.dtype), 1,
                         config.hidden_size);
    plan.apply(out, {x.data(), DType::f32, 1, config.hidden_size},
               {topk_weights.data(), DType::f32, 1, config.top_k},
               {ids.data(), DType::i32, 1, config.top_k}, {}, context);
    std::vector<double> result;
    for (std::int64_t h = 0; h < config.hidden_size; ++h) result.push_back(element(out, 0, h));
    return result;
  }

  MoeConfig config;
  ExpertWeights weights;

 private:
  std::int64_t num_experts_;
  std::vector<float> w13_, w2_;
};

}  // namespace fusedmoe::test
