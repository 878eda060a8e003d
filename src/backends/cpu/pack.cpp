#include "backends/cpu/pack.h"

#include <algorithm>
#include <cstring>

#include "formats/float_bits.h"
#include "formats/format.h"

namespace fusedmoe::cpu {
namespace {

// Channel and part of column `column` of a w13 panel; part 0 = gate, 1 = up.
struct Channel {
  std::int64_t index;
  int part;
};

Channel channel_of(const PlanSpec& spec, std::int64_t panel, int column) {
  if (!spec.gated()) return {panel * kPanelOutputs + column, 1};
  return {panel * kGatedOutputs + column % kGatedOutputs, column / kGatedOutputs};
}

// Row of the fused w13 (and of its bias) that holds a channel's part.
std::int64_t w13_row(const PlanSpec& spec, Channel channel) {
  if (!spec.gated()) return channel.index;
  const MoeConfig& config = spec.config;
  const int part = config.gate_up_order == GateUpOrder::up_gate ? 1 - channel.part : channel.part;
  return config.gate_up_layout == GateUpLayout::interleaved
             ? 2 * channel.index + part
             : part * config.intermediate_size + channel.index;
}

int element_bytes(const WeightTensor& tensor) {
  return format_info(tensor.format).bits_per_weight / 8;
}

const std::byte* address(const WeightTensor& tensor, std::int64_t expert, std::int64_t n) {
  return static_cast<const std::byte*>(tensor.data) +
         element_index(tensor, expert, n, 0) * element_bytes(tensor);
}

std::int64_t k_stride(const WeightTensor& tensor) {
  return element_bytes(tensor) * (tensor.layout == WeightLayout::nk ? 1 : row_stride_of(tensor));
}

float load_bias(const BiasTensor& bias, std::int64_t expert, std::int64_t n) {
  const auto* from = static_cast<const char*>(bias.data) +
                     (expert * bias.size + n) * bytes_per_element(bias.dtype);
  if (bias.dtype == DType::f32) {
    float value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return bias.dtype == DType::f16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

// Blocks of 32 k keep both sides of the transposition in L1. Memcpy, since checkpoints map tensors
// to any address.
template <class Element>
void copy(const PanelOutputs& panel, std::int64_t k0, std::int64_t k, Element* to) {
  constexpr std::int64_t kBlock = 32;
  for (std::int64_t begin = 0; begin < k; begin += kBlock) {
    const std::int64_t end = std::min(k, begin + kBlock);
    for (int column = 0; column < kPanelOutputs; ++column) {
      const std::byte* from = panel.output[column];
      const std::int64_t k_stride = panel.k_stride[column];
      Element* target = to + column;
      if (from == nullptr) {
        for (std::int64_t i = begin; i < end; ++i) target[i * kPanelOutputs] = 0;
      } else if (k_stride == sizeof(Element)) {
        from += (k0 + begin) * static_cast<std::int64_t>(sizeof(Element));
        Element piece[kBlock];
        std::memcpy(piece, from, (end - begin) * sizeof(Element));
        for (std::int64_t i = begin; i < end; ++i) target[i * kPanelOutputs] = piece[i - begin];
      } else {
        for (std::int64_t i = begin; i < end; ++i) {
          std::memcpy(&target[i * kPanelOutputs], from + (k0 + i) * k_stride, sizeof(Element));
        }
      }
    }
  }
}

}  // namespace

PanelOutputs w13_panel(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t expert,
                       std::int64_t panel) {
  const bool apart = !weights.w13_up.empty();
  PanelOutputs result{{}, {}, element_bytes(weights.w13)};
  for (int column = 0; column < kPanelOutputs; ++column) {
    const Channel channel = channel_of(spec, panel, column);
    if (channel.index >= spec.config.intermediate_size) continue;
    const WeightTensor& tensor = apart && channel.part == 1 ? weights.w13_up : weights.w13;
    result.output[column] = address(tensor, expert, apart ? channel.index : w13_row(spec, channel));
    result.k_stride[column] = k_stride(tensor);
  }
  return result;
}

PanelOutputs w2_panel(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t expert,
                      std::int64_t panel) {
  PanelOutputs result{{}, {}, element_bytes(weights.w2)};
  for (int column = 0; column < kPanelOutputs; ++column) {
    const std::int64_t n = panel * kPanelOutputs + column;
    if (n >= spec.config.hidden_size) continue;
    result.output[column] = address(weights.w2, expert, n);
    result.k_stride[column] = k_stride(weights.w2);
  }
  return result;
}

void copy_panel(const PanelOutputs& panel, std::int64_t k0, std::int64_t k, void* to) {
  if (panel.element_bytes == 4) {
    copy(panel, k0, k, static_cast<std::uint32_t*>(to));
  } else {
    copy(panel, k0, k, static_cast<std::uint16_t*>(to));
  }
}

bool w13_bias_panel(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t expert,
                    std::int64_t panel, float* to) {
  if (weights.w13_bias.empty()) return false;
  for (int column = 0; column < kPanelOutputs; ++column) {
    const Channel channel = channel_of(spec, panel, column);
    to[column] = channel.index < spec.config.intermediate_size
                     ? load_bias(weights.w13_bias, expert, w13_row(spec, channel))
                     : 0.0F;
  }
  return true;
}

bool w2_bias_panel(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t expert,
                   std::int64_t panel, float* to) {
  if (weights.w2_bias.empty()) return false;
  for (int column = 0; column < kPanelOutputs; ++column) {
    const std::int64_t n = panel * kPanelOutputs + column;
    to[column] = n < spec.config.hidden_size ? load_bias(weights.w2_bias, expert, n) : 0.0F;
  }
  return true;
}

}  // namespace fusedmoe::cpu
