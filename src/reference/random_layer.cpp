#include "reference/random_layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "formats/float_bits.h"
#include "formats/format.h"
#include "formats/quantize.h"

namespace fusedmoe {
namespace {

void store(std::byte* data, DType dtype, std::int64_t index, double value) {
  std::byte* to = data + index * bytes_per_element(dtype);
  const auto single = static_cast<float>(value);
  if (dtype == DType::f32) {
    std::memcpy(to, &single, 4);
    return;
  }
  const std::uint16_t bits = dtype == DType::f16 ? f32_to_f16(single) : f32_to_bf16(single);
  std::memcpy(to, &bits, 2);
}

void store_id(std::byte* data, DType dtype, std::int64_t index, std::int64_t id) {
  const auto narrow = static_cast<std::int32_t>(id);
  if (dtype == DType::i32) {
    std::memcpy(data + index * 4, &narrow, 4);
  } else {
    std::memcpy(data + index * 8, &id, 8);
  }
}

std::vector<std::byte> dirty(std::int64_t rows, std::int64_t stride, DType dtype) {
  return std::vector<std::byte>(rows * stride * bytes_per_element(dtype), std::byte{0xff});
}

}  // namespace

std::byte* RandomWeights::keep(std::span<const std::byte> bytes, std::int64_t misalign) {
  if (bytes.empty()) return nullptr;
  auto& memory = memory_.emplace_back(bytes.size() + misalign + 64, std::byte{0xff});
  const auto base = reinterpret_cast<std::uintptr_t>(memory.data());
  std::byte* data = memory.data() + (64 - base % 64) % 64 + misalign;
  std::memcpy(data, bytes.data(), bytes.size());
  return data;
}

WeightTensor RandomWeights::make_tensor(WeightTensor tensor, const RandomWeightsOptions& options,
                                        std::mt19937_64& random) {
  const std::int64_t block = format_info(tensor.format).block_elements;
  const auto padded = [&](std::int64_t stride, std::int64_t padding) {
    return (stride + padding + block - 1) / block * block;
  };
  tensor.row_stride = padded(row_stride_of(tensor), options.row_padding);
  tensor.expert_stride = padded(expert_stride_of(tensor), options.expert_padding);
  // Each output has variance 1 for inputs of variance 1.
  std::normal_distribution<float> normal(0.0F, 1.0F / std::sqrt(static_cast<float>(tensor.inputs)));
  std::vector<float> values(tensor.experts * tensor.outputs * tensor.inputs);
  for (float& value : values) value = normal(random);
  const bool points = tensor.scales.zero_points != nullptr;
  const QuantizedStack stack =
      quantize(values, tensor, {.zero_points = points, .fill = std::byte{0xff}});
  tensor.data = keep(stack.data, options.misalign);
  tensor.scales.data = keep(stack.scales, options.misalign);
  tensor.scales.zero_points = keep(std::as_bytes(std::span(stack.zero_points)), options.misalign);
  tensor.scales.global =
      reinterpret_cast<const float*>(keep(std::as_bytes(std::span(stack.global)), 0));
  if (options.row_padding == 0) tensor.row_stride = 0;
  if (options.expert_padding == 0) tensor.expert_stride = 0;
  return tensor;
}

BiasTensor RandomWeights::make_bias(BiasTensor bias, std::mt19937_64& random) {
  if (bias.empty()) return bias;
  const std::int64_t count = bias.experts * bias.size;
  auto& memory = memory_.emplace_back(count * bytes_per_element(bias.dtype));
  std::normal_distribution<float> normal(0.0F, 0.5F);
  for (std::int64_t i = 0; i < count; ++i) store(memory.data(), bias.dtype, i, normal(random));
  bias.data = memory.data();
  return bias;
}

ExpertWeights stated_weights(const MoeConfig& config, std::int64_t num_experts,
                             const RandomWeightsOptions& options) {
  static constexpr std::uint8_t kSomeZeroPoints = 8;
  const bool gated = is_gated(config.activation.kind);
  const std::int64_t outputs = config.intermediate_size * (gated ? 2 : 1);
  const bool apart = options.gate_up_apart && gated;
  const auto tensor = [&](WeightFormat format, WeightLayout layout,
                          const std::optional<WeightScales>& scales, std::int64_t rows,
                          std::int64_t inputs) {
    WeightTensor result{.format = format,
                        .layout = layout,
                        .experts = num_experts,
                        .outputs = rows,
                        .inputs = inputs,
                        .scales = scales.value_or(default_scales(format))};
    if (options.zero_points && format_info(format).scales.zero_points) {
      result.scales.zero_points = &kSomeZeroPoints;
    }
    return result;
  };
  ExpertWeights weights;
  weights.w13 = tensor(options.w13_format, options.w13_layout, options.w13_scales,
                       apart ? config.intermediate_size : outputs, config.hidden_size);
  if (apart) weights.w13_up = weights.w13;
  weights.w2 = tensor(options.w2_format, options.w2_layout, options.w2_scales, config.hidden_size,
                      config.intermediate_size);
  if (options.w13_bias) weights.w13_bias = {nullptr, options.bias_dtype, num_experts, outputs};
  if (options.w2_bias) {
    weights.w2_bias = {nullptr, options.bias_dtype, num_experts, config.hidden_size};
  }
  return weights;
}

RandomWeights::RandomWeights(const MoeConfig& config, std::int64_t num_experts,
                             const RandomWeightsOptions& options, std::uint64_t seed)
    : view_(stated_weights(config, num_experts, options)) {
  std::mt19937_64 random(seed);
  view_.w13 = make_tensor(view_.w13, options, random);
  if (!view_.w13_up.empty()) view_.w13_up = make_tensor(view_.w13_up, options, random);
  view_.w2 = make_tensor(view_.w2, options, random);
  view_.w13_bias = make_bias(view_.w13_bias, random);
  view_.w2_bias = make_bias(view_.w2_bias, random);
}

void* RandomWeights::w2_data() { return const_cast<void*>(view_.w2.data); }

ExpertWeights slice(const ExpertWeights& weights, std::int64_t expert) {
  ExpertWeights one = weights;
  for (WeightTensor* tensor : {&one.w13, &one.w13_up, &one.w2}) {
    *tensor = expert_of(*tensor, expert);
  }
  for (BiasTensor* bias : {&one.w13_bias, &one.w2_bias}) {
    bias->experts = bias->empty() ? 0 : 1;
    if (bias->data == nullptr) continue;
    bias->data = static_cast<const std::byte*>(bias->data) +
                 expert * bias->size * bytes_per_element(bias->dtype);
  }
  return one;
}

ExpertWeights RandomWeights::as_source() const {
  ExpertWeights result = view_;
  for (WeightTensor* tensor : {&result.w13, &result.w13_up, &result.w2}) {
    tensor->data = tensor->scales.data = nullptr;
    tensor->scales.global = nullptr;  // zero_points stays: it says that there are some
  }
  for (BiasTensor* bias : {&result.w13_bias, &result.w2_bias}) bias->data = nullptr;
  result.source = [whole = view_](std::int64_t expert) { return slice(whole, expert); };
  return result;
}

RandomInput::RandomInput(const MoeConfig& config, const RandomInputOptions& options,
                         std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::int64_t rows = options.num_tokens;
  const DType output_dtype = config.output_dtype.value_or(config.dtype);
  const std::int64_t hidden_stride = config.hidden_size + options.hidden_padding;
  const std::int64_t output_stride = config.hidden_size + options.output_padding;
  const std::int64_t topk_stride = config.top_k + options.topk_padding;
  hidden_ = dirty(rows, hidden_stride, config.dtype);
  output_ = dirty(rows, output_stride, output_dtype);
  topk_weights_ = dirty(rows, topk_stride, options.topk_weights_dtype);
  topk_ids_ = dirty(rows, topk_stride, options.ids_dtype);

  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  std::vector<std::int64_t> ids(config.num_experts);
  for (std::int64_t t = 0; t < rows; ++t) {
    for (std::int64_t h = 0; h < config.hidden_size; ++h) {
      store(hidden_.data(), config.dtype, t * hidden_stride + h, normal(random));
    }
    std::iota(ids.begin(), ids.end(), std::int64_t{0});
    for (std::int64_t k = 0; k < config.top_k; ++k) {
      const std::int64_t from = options.repeated_ids ? 0 : k;
      const auto drawn = std::min<std::int64_t>(
          config.num_experts - 1,
          from + static_cast<std::int64_t>(uniform(random) *
                                           static_cast<double>(config.num_experts - from)));
      if (!options.repeated_ids) std::swap(ids[k], ids[drawn]);
      std::int64_t id = ids[options.repeated_ids ? drawn : k];
      if (options.repeated_ids || k == 0) {
        if (uniform(random) < options.hot_share) id = config.num_experts - 1;
        if (!options.repeated_ids) {  // keep the row distinct
          std::swap(ids[0], *std::find(ids.begin(), ids.end(), id));
        }
      }
      if (uniform(random) < options.skip_share) id = -1;
      store_id(topk_ids_.data(), options.ids_dtype, t * topk_stride + k, id);
      store(topk_weights_.data(), options.topk_weights_dtype, t * topk_stride + k,
            id == -1 && options.nan_skipped_weights ? std::numeric_limits<double>::quiet_NaN()
                                                    : 0.1 + uniform(random));
    }
  }
  hidden_view_ = {hidden_.data(), config.dtype, rows, config.hidden_size, hidden_stride};
  topk_weights_view_ = {topk_weights_.data(), options.topk_weights_dtype, rows, config.top_k,
                        topk_stride};
  topk_ids_view_ = {topk_ids_.data(), options.ids_dtype, rows, config.top_k, topk_stride};
  output_view_ = {output_.data(), output_dtype, rows, config.hidden_size, output_stride};
}

void RandomInput::dirty_output() { std::fill(output_.begin(), output_.end(), std::byte{0xff}); }

std::vector<std::byte> RandomInput::output_bytes() const {
  std::vector<std::byte> bytes;
  const std::int64_t size = bytes_per_element(output_view_.dtype);
  for (std::int64_t t = 0; t < output_view_.rows; ++t) {
    const auto begin = output_.begin() + t * output_view_.row_stride * size;
    bytes.insert(bytes.end(), begin, begin + output_view_.columns * size);
  }
  return bytes;
}

bool RandomInput::output_padding_untouched() const {
  const std::int64_t size = bytes_per_element(output_view_.dtype);
  for (std::int64_t t = 0; t < output_view_.rows; ++t) {
    const auto row = output_.begin() + t * output_view_.row_stride * size;
    if (std::any_of(row + output_view_.columns * size, row + output_view_.row_stride * size,
                    [](std::byte b) { return b != std::byte{0xff}; })) {
      return false;
    }
  }
  return true;
}

void RandomInput::set_id(std::int64_t token, std::int64_t k, std::int64_t id) {
  store_id(topk_ids_.data(), topk_ids_view_.dtype, token * topk_ids_view_.row_stride + k, id);
}

}  // namespace fusedmoe
