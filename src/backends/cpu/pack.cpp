#include "backends/cpu/pack.h"

#include <algorithm>
#include <cstring>

#include "formats/float_bits.h"
#include "formats/k_blocks.h"
#include "formats/q6_k.h"
#include "formats/scales.h"

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

// Scales, zero points and minima of segment `index`, out of wherever the format keeps them.
struct SegmentWriter {
  const PanelFormat& format;
  const PanelOutputs& outputs;

  void write(std::int64_t index, std::byte* record) const {
    const SegmentLayout& layout = format.segments;
    const std::int64_t k = index * layout.k;
    std::memset(record, 0, static_cast<std::size_t>(layout.record_bytes()));
    const int step = layout.per_half ? kPanelOutputs / 2 : 1;
    for (int i = 0; i < kPanelOutputs; i += step) {
      const PanelOutput& output = outputs[static_cast<std::size_t>(i)];
      if (output.tensor != nullptr) write_scale(output, k, i / step, record);
    }
    std::byte* more = record + layout.record_bytes() - kPanelOutputs;
    if (layout.offset == SegmentLayout::Offset::zero_points) {
      for (std::size_t i = 0; i < kPanelOutputs; ++i) {
        const PanelOutput& o = outputs[i];
        if (o.tensor == nullptr) continue;
        more[i] = static_cast<std::byte>(zero_point_at(*o.tensor, o.expert, o.n, k, 0));
      }
    }
  }

  // What 256 k from `k` on share.
  void write_super(std::int64_t k, std::byte* super) const {
    std::memset(super, 0, static_cast<std::size_t>(format.segments.super_bytes()));
    for (std::size_t i = 0; i < kPanelOutputs; ++i) {
      const PanelOutput& o = outputs[i];
      if (o.tensor == nullptr) continue;
      const std::uint8_t* block = formats::k_block(*o.tensor, o.expert, o.n, k);
      const bool minima = format.segments.offset == SegmentLayout::Offset::minima;
      std::memcpy(super + 2 * i, minima ? block : block + 208, 2);
      if (minima) std::memcpy(super + 2 * (kPanelOutputs + i), block + 2, 2);
    }
  }

 private:
  void write_scale(const PanelOutput& o, std::int64_t k, int index, std::byte* record) const {
    const SegmentLayout& layout = format.segments;
    const WeightTensor& tensor = *o.tensor;
    if (layout.has_supers()) {
      const std::uint8_t* block = formats::k_block(tensor, o.expert, o.n, k);
      const auto j = static_cast<int>(k % formats::kBlockK / layout.k);
      if (layout.offset != SegmentLayout::Offset::minima) {
        record[index] = static_cast<std::byte>(formats::Q6kBlock{block}.scale(j));
        return;
      }
      const formats::SixBits six = formats::six_bits(block + 4, j);
      record[index] = static_cast<std::byte>(six.scale);
      record[kPanelOutputs + index] = static_cast<std::byte>(six.minimum);
      return;
    }
    const WeightScales& scales = tensor.scales;
    const std::int64_t at = scale_index(tensor, o.expert, scale_row(tensor, o.n),
                                        scale_column(tensor, std::min(k, tensor.inputs - 1)));
    if (layout.scale == SegmentLayout::Scale::f32) {
      const float value = load_scale(scales.data, scales.type, at);
      std::memcpy(record + 4 * index, &value, sizeof value);
      return;
    }
    const std::int64_t bytes = bytes_per_scale(scales.type);
    std::memcpy(record + bytes * index, static_cast<const std::byte*>(scales.data) + bytes * at,
                static_cast<std::size_t>(bytes));
  }
};

}  // namespace

PanelOutputs w13_panel(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t expert,
                       std::int64_t panel) {
  PanelOutputs result;
  const bool apart = !weights.w13_up.empty();
  for (int column = 0; column < kPanelOutputs; ++column) {
    const Channel channel = channel_of(spec, panel, column);
    if (channel.index >= spec.config.intermediate_size) continue;
    result[static_cast<std::size_t>(column)] = {
        apart && channel.part == 1 ? &weights.w13_up : &weights.w13, expert,
        apart ? channel.index : w13_row(spec, channel)};
  }
  return result;
}

PanelOutputs w2_panel(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t expert,
                      std::int64_t panel) {
  PanelOutputs result;
  for (int column = 0; column < kPanelOutputs; ++column) {
    const std::int64_t n = panel * kPanelOutputs + column;
    if (n < spec.config.hidden_size) {
      result[static_cast<std::size_t>(column)] = {&weights.w2, expert, n};
    }
  }
  return result;
}

void pack_panel(const PanelOutputs& outputs, const PanelFormat& format, std::int64_t k0,
                std::int64_t k, std::byte* to, PanelUse use) {
  pack_codes(outputs, format, k0, k, to + format.codes_offset(k), use);
  const SegmentLayout& segments = format.segments;
  if (segments.k == 0 || segments.record_bytes() == 0) return;
  const SegmentWriter writer{format, outputs};
  std::byte* record = to + format.records_offset(k);
  for (std::int64_t i = 0; i < segments.count(k); ++i, record += segments.record_bytes()) {
    writer.write(k0 / segments.k + i, record);
  }
  if (!segments.has_supers()) return;
  std::byte* super = to;
  for (std::int64_t at = k0; at < k0 + k; at += formats::kBlockK, super += segments.super_bytes()) {
    writer.write_super(at, super);
  }
}

bool column_scales(const PanelOutputs& outputs, const PanelFormat& format, float* to) {
  if (!format.column_scales) return false;
  for (std::size_t i = 0; i < kPanelOutputs; ++i) {
    const PanelOutput& o = outputs[i];
    if (o.tensor == nullptr) {
      to[i] = 0.0F;
      continue;
    }
    double scale = scale_at(*o.tensor, o.expert, o.n, 0);
    if (format.segments.scale !=
        SegmentLayout::Scale::one) {  // records have all but the global one
      scale = static_cast<double>(global_scale_at(*o.tensor, o.expert, o.n));
    }
    to[i] = static_cast<float>(scale);
  }
  return true;
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
