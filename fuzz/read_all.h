// Reads every byte that a layer's weights say they have, so that the sanitizers see them.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "checkpoint/layer_reader.h"
#include "formats/format.h"
#include "formats/scales.h"

namespace fusedmoe::checkpoint {

inline void read_bytes(const void* data, std::int64_t count) {
  if (data == nullptr || count <= 0) return;
  unsigned sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += static_cast<const unsigned char*>(data)[i];
  volatile unsigned sink = sum;
  static_cast<void>(sink);
}

inline void read_tensor(const WeightTensor& tensor) {
  if (tensor.empty()) return;
  if (tensor.data == nullptr || tensor.experts < 0) std::abort();
  const FormatInfo& info = format_info(tensor.format);
  read_bytes(tensor.data, info.bytes(tensor.experts * expert_stride_of(tensor)));
  const std::int64_t scales = scale_shape(tensor).count() * tensor.experts;
  if (tensor.scales.layout != ScaleLayout::none && tensor.scales.data == nullptr) std::abort();
  read_bytes(tensor.scales.data, scales * bytes_per_scale(tensor.scales.type));
  read_bytes(tensor.scales.zero_points, scales);
  read_bytes(tensor.scales.global,
             globals_per_expert(tensor) * tensor.experts * std::int64_t{sizeof(float)});
  // The definition agrees on where the ends are.
  info.decode(tensor, 0, 0, 0);
  info.decode(tensor, tensor.experts - 1, tensor.outputs - 1, tensor.inputs - 1);
}

inline void read_weights(const ExpertWeights& weights) {
  read_tensor(weights.w13);
  read_tensor(weights.w13_up);
  read_tensor(weights.w2);
  for (const BiasTensor* const bias : {&weights.w13_bias, &weights.w2_bias}) {
    read_bytes(bias->data, bias->experts * bias->size * bytes_per_element(bias->dtype));
  }
  read_bytes(weights.w13_input_scales, sizeof(float));
  read_bytes(weights.w2_input_scales, sizeof(float));
}

inline void read_layer(const MoeLayer& layer) {
  if (!layer.weights.source) {
    read_weights(layer.weights);
    return;
  }
  const std::int64_t last = layer.config.num_experts - 1;
  for (std::int64_t e = 0; e <= last; e += last > 8 ? last : 1) {
    read_weights(layer.weights.source(e));
  }
}

}  // namespace fusedmoe::checkpoint
