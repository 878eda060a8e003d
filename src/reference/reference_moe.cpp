#include "reference/reference_moe.h"

#include <cmath>
#include <cstring>

#include "activations/activation.h"
#include "formats/float_bits.h"
#include "formats/format.h"

namespace fusedmoe {
namespace {

double load(const void* data, DType dtype, std::int64_t index) {
  const auto* bytes = static_cast<const char*>(data) + index * bytes_per_element(dtype);
  std::uint16_t half = 0;
  float single = 0;
  switch (dtype) {
    case DType::f16:
      std::memcpy(&half, bytes, 2);
      return static_cast<double>(f16_to_f32(half));
    case DType::bf16:
      std::memcpy(&half, bytes, 2);
      return static_cast<double>(bf16_to_f32(half));
    default:
      std::memcpy(&single, bytes, 4);
      return static_cast<double>(single);
  }
}

double weight(const WeightTensor& tensor, std::int64_t expert, std::int64_t n, std::int64_t k) {
  return format_info(tensor.format).decode(tensor, expert, n, k);
}

double bias(const BiasTensor& tensor, std::int64_t expert, std::int64_t n) {
  return tensor.empty() ? 0.0 : load(tensor.data, tensor.dtype, expert * tensor.size + n);
}

// Row of w13 that holds gate (part 0) or up (part 1) of channel i.
std::int64_t w13_row(const MoeConfig& config, int part, std::int64_t i) {
  if (!is_gated(config.activation.kind)) return i;
  if (config.gate_up_order == GateUpOrder::up_gate) part = 1 - part;
  return config.gate_up_layout == GateUpLayout::interleaved ? 2 * i + part
                                                            : part * config.intermediate_size + i;
}

// One expert, decoded to double. w13 in two parts: gate (empty without one) and up, [I, H] each.
struct Expert {
  std::vector<double> w13[2], b13[2];
  std::vector<double> w2, b2;  // [H, I], [H]
};

Expert decode(const MoeConfig& config, const ExpertWeights& weights, std::int64_t local) {
  const ExpertWeights loaded = weights.source ? weights.source(local) : ExpertWeights{};
  const ExpertWeights& from = weights.source ? loaded : weights;
  const std::int64_t e = weights.source ? 0 : local;
  const bool apart = !from.w13_up.empty();
  Expert expert;
  for (int part = is_gated(config.activation.kind) ? 0 : 1; part < 2; ++part) {
    const WeightTensor& tensor = apart && part == 1 ? from.w13_up : from.w13;
    for (std::int64_t i = 0; i < config.intermediate_size; ++i) {
      const std::int64_t row = w13_row(config, part, i);
      expert.b13[part].push_back(bias(from.w13_bias, e, row));
      for (std::int64_t k = 0; k < config.hidden_size; ++k) {
        expert.w13[part].push_back(weight(tensor, e, apart ? i : row, k));
      }
    }
  }
  for (std::int64_t h = 0; h < config.hidden_size; ++h) {
    expert.b2.push_back(bias(from.w2_bias, e, h));
    for (std::int64_t i = 0; i < config.intermediate_size; ++i) {
      expert.w2.push_back(weight(from.w2, e, h, i));
    }
  }
  return expert;
}

double dot(const double* a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < b.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Square root of the sum of squared terms, the bias among them.
double norm(const double* a, const std::vector<double>& b, double factor, double bias) {
  double sum = bias * bias;
  for (std::size_t i = 0; i < b.size(); ++i) sum += a[i] * a[i] * b[i] * b[i] * factor * factor;
  return std::sqrt(sum);
}

double activate(const MoeConfig& config, double gate, double up) {
  double result = 0;
  activations::dispatch(config.activation.kind, [&]<Activation kKind>() {
    result = activations::activate<kKind>(config.activation, config.clamp_limit.value_or(0.0F),
                                          gate, up);
  });
  return result;
}

// As add_expert, with norms for sums.
void add_expert_scale(const MoeConfig& config, const Expert& expert, double router,
                      const std::vector<double>& x, double* output) {
  const double input_weight = config.apply_router_weight_on_input ? router : 1.0;
  const double output_weight = config.apply_router_weight_on_input ? 1.0 : router;
  std::vector<double> act(config.intermediate_size);
  for (std::int64_t i = 0; i < config.intermediate_size; ++i) {
    double projected[2] = {0, 0};
    for (int part = 0; part < 2; ++part) {
      if (expert.w13[part].empty()) continue;
      projected[part] =
          norm(&expert.w13[part][i * config.hidden_size], x, input_weight, expert.b13[part][i]);
    }
    act[i] = activate(config, projected[0], projected[1]);
  }
  for (std::int64_t h = 0; h < config.hidden_size; ++h) {
    output[h] += std::abs(output_weight) *
                 norm(&expert.w2[h * config.intermediate_size], act, 1.0, expert.b2[h]);
  }
}

// output: [hidden_size]; x: [hidden_size]
void add_expert(const MoeConfig& config, const Expert& expert, double router,
                const std::vector<double>& x, double* output) {
  const double input_weight = config.apply_router_weight_on_input ? router : 1.0;
  const double output_weight = config.apply_router_weight_on_input ? 1.0 : router;
  std::vector<double> act(config.intermediate_size);
  for (std::int64_t i = 0; i < config.intermediate_size; ++i) {
    double projected[2] = {0, 0};
    for (int part = 0; part < 2; ++part) {
      if (expert.w13[part].empty()) continue;
      projected[part] =
          dot(&expert.w13[part][i * config.hidden_size], x) * input_weight + expert.b13[part][i];
    }
    act[i] = activate(config, projected[0], projected[1]);
  }
  for (std::int64_t h = 0; h < config.hidden_size; ++h) {
    output[h] +=
        output_weight * (dot(&expert.w2[h * config.intermediate_size], act) + expert.b2[h]);
  }
}

std::int64_t load_id(const ConstMatrixView& ids, std::int64_t t, std::int64_t k) {
  const std::int64_t index = t * ids.row_stride + k;
  if (ids.dtype == DType::i32) return static_cast<const std::int32_t*>(ids.data)[index];
  return static_cast<const std::int64_t*>(ids.data)[index];
}

// add: adds a slot's result to those of the same token and expert; join: adds those of experts.
template <class Add, class Join>
std::vector<double> sum_experts(const MoeConfig& config, const ExpertWeights& weights,
                                const ConstMatrixView& hidden, const ConstMatrixView& topk_weights,
                                const ConstMatrixView& topk_ids,
                                std::span<const std::int32_t> expert_map, const Add& add,
                                const Join& join) {
  std::vector<double> output(hidden.rows * config.hidden_size, 0.0);
  std::vector<double> x(config.hidden_size);
  const std::int64_t num_local = weights.w13.experts;
  for (std::int64_t local = 0; local < num_local; ++local) {
    Expert expert;  // decoded at its first use, one at a time
    for (std::int64_t t = 0; t < hidden.rows; ++t) {
      std::vector<double> sum;  // [hidden_size], of this expert
      for (std::int64_t k = 0; k < config.top_k; ++k) {
        const std::int64_t id = load_id(topk_ids, t, k);
        if (id < 0 || (expert_map.empty() ? id : expert_map[id]) != local) continue;
        if (expert.w2.empty()) expert = decode(config, weights, local);
        for (std::int64_t h = 0; h < config.hidden_size; ++h) x[h] = element(hidden, t, h);
        sum.resize(config.hidden_size);
        add(config, expert, element(topk_weights, t, k), x, sum.data());
      }
      double* const row = output.data() + t * config.hidden_size;
      for (std::size_t h = 0; h < sum.size(); ++h) row[h] = join(row[h], sum[h]);
    }
  }
  return output;
}

}  // namespace

double element(const ConstMatrixView& view, std::int64_t row, std::int64_t column) {
  return load(view.data, view.dtype, row * view.row_stride + column);
}

std::vector<double> reference_moe(const MoeConfig& config, const ExpertWeights& weights,
                                  const ConstMatrixView& hidden,
                                  const ConstMatrixView& topk_weights,
                                  const ConstMatrixView& topk_ids,
                                  std::span<const std::int32_t> expert_map) {
  return sum_experts(config, weights, hidden, topk_weights, topk_ids, expert_map, &add_expert,
                     [](double a, double b) { return a + b; });
}

std::vector<double> reference_scale(const MoeConfig& config, const ExpertWeights& weights,
                                    const ConstMatrixView& hidden,
                                    const ConstMatrixView& topk_weights,
                                    const ConstMatrixView& topk_ids,
                                    std::span<const std::int32_t> expert_map) {
  return sum_experts(config, weights, hidden, topk_weights, topk_ids, expert_map, &add_expert_scale,
                     [](double a, double b) { return std::hypot(a, b); });
}

}  // namespace fusedmoe
