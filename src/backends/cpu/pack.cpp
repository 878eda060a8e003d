#include "backends/cpu/pack.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "formats/float_bits.h"
#include "formats/format.h"
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

// One that is not padding: what all have in common.
const PanelOutput& some_output(const PanelOutputs& outputs) {
  return *std::find_if(outputs.begin(), outputs.end(),
                       [](const PanelOutput& output) { return output.tensor != nullptr; });
}

// Records whose parts lie in arrays of their own, along K: each part becomes columns of 32.
class RecordWriter {
 public:
  RecordWriter(const PanelOutputs& outputs, const PanelFormat& format)
      : outputs_(outputs), layout_(format.segments) {}

  // Records of `count` segments from k0 on.
  void write(std::int64_t k0, std::int64_t count, std::byte* records) const {
    if (layout_.per_half) {
      for (std::int64_t i = 0; i < count; ++i) write_halves(k0 + i * layout_.k, records + i * 8);
      return;
    }
    const ScaleType type = some_output(outputs_).tensor->scales.type;
    const bool widen = layout_.scale == SegmentLayout::Scale::f32 && type != ScaleType::f32;
    const std::int64_t bytes = widen ? 4 : bytes_per_scale(type);
    const auto scales = [](const WeightScales& from) { return from.data; };
    if (!layout_.has_offsets()) return columns(k0, count, bytes, widen, scales, records);
    const auto points = [](const WeightScales& from) { return from.zero_points; };
    for (std::int64_t begin = 0; begin < count; begin += kAtOnce) {
      const std::int64_t n = std::min(kAtOnce, count - begin);
      const std::int64_t k = k0 + begin * layout_.k;
      std::byte* to = records + begin * layout_.record_bytes();
      alignas(64) std::byte part[kAtOnce * kPanelOutputs * 4];
      columns(k, n, bytes, widen, scales, part);
      copy_part(part, bytes * kPanelOutputs, n, to);
      columns(k, n, 1, false, points, part);
      copy_part(part, kPanelOutputs, n, to + bytes * kPanelOutputs);
    }
  }

 private:
  static constexpr std::int64_t kAtOnce = 16;

  void write_halves(std::int64_t k, std::byte* record) const {
    for (std::size_t half = 0; half < 2; ++half) {
      const PanelOutput& o = outputs_[half * kPanelOutputs / 2];
      const float value = o.tensor == nullptr ? 0.0F
                                              : load_scale(o.tensor->scales.data,
                                                           o.tensor->scales.type, index_of(o, k));
      std::memcpy(record + 4 * half, &value, sizeof value);
    }
  }

  static std::int64_t index_of(const PanelOutput& o, std::int64_t k) {
    const WeightTensor& tensor = *o.tensor;
    return scale_index(tensor, o.expert, scale_row(tensor, o.n),
                       scale_column(tensor, std::min(k, tensor.inputs - 1)));
  }

  // to: [n][32] of `bytes` each, from what array(scales) has for k, k + segment, ...
  template <class ArrayOf>
  void columns(std::int64_t k, std::int64_t n, std::int64_t bytes, bool widen, const ArrayOf& array,
               std::byte* to) const {
    const WeightTensor& some = *some_output(outputs_).tensor;
    if (!widen && !some.scales.transposed && inputs_per_scale(some) == layout_.k) {
      std::array<const std::byte*, kPanelOutputs> rows{};
      for (std::size_t i = 0; i < kPanelOutputs; ++i) {
        const PanelOutput& o = outputs_[i];
        if (o.tensor == nullptr) continue;
        rows[i] = static_cast<const std::byte*>(array(o.tensor->scales)) + index_of(o, 0) * bytes;
      }
      return pack_columns(rows, bytes, k / layout_.k, n, to);
    }
    std::memset(to, 0, static_cast<std::size_t>(n * bytes * kPanelOutputs));
    for (std::int64_t column = 0; column < kPanelOutputs; ++column) {
      const PanelOutput& o = outputs_[static_cast<std::size_t>(column)];
      if (o.tensor == nullptr) continue;
      const WeightScales& scales = o.tensor->scales;
      std::byte* at = to + column * bytes;
      const std::int64_t first = index_of(o, k);
      const std::int64_t per_scale = inputs_per_scale(*o.tensor);
      const std::int64_t stride = scales.transposed ? scale_shape(*o.tensor).rows : 1;
      const std::int64_t origin = k / per_scale;
      for (std::int64_t i = 0; i < n; ++i, at += bytes * kPanelOutputs) {
        const std::int64_t index = first + ((k + i * layout_.k) / per_scale - origin) * stride;
        if (widen) {
          const float value = load_scale(scales.data, scales.type, index);
          std::memcpy(at, &value, sizeof value);
          continue;
        }
        const auto* from = static_cast<const std::byte*>(array(scales)) + index * bytes;
        switch (bytes) {  // a constant size is a move, not a call
          case 1:
            *at = *from;
            break;
          case 2:
            std::memcpy(at, from, 2);
            break;
          default:
            std::memcpy(at, from, 4);
        }
      }
    }
  }

  // part: [n][bytes], to the same place in n records.
  void copy_part(const std::byte* part, std::int64_t bytes, std::int64_t n, std::byte* to) const {
    for (std::int64_t i = 0; i < n; ++i) {
      std::memcpy(to + i * layout_.record_bytes(), part + i * bytes,
                  static_cast<std::size_t>(bytes));
    }
  }

  const PanelOutputs& outputs_;
  const SegmentLayout& layout_;
};

// Records, and what 256 k share, of formats that keep them in blocks of 256.
void write_block_records(const PanelOutputs& outputs, const PanelFormat& format, std::int64_t k0,
                         std::int64_t k, std::byte* records, std::byte* supers) {
  const SegmentLayout& layout = format.segments;
  const std::int64_t record_bytes = layout.record_bytes();
  const std::int64_t per_block = formats::kBlockK / layout.k;
  const bool minima = layout.has_offsets();
  std::array<const std::uint8_t*, kPanelOutputs> blocks{};
  for (std::size_t i = 0; i < kPanelOutputs; ++i) {
    const PanelOutput& o = outputs[i];
    if (o.tensor != nullptr) blocks[i] = formats::k_block(*o.tensor, o.expert, o.n, k0);
  }
  const std::int64_t block_bytes = format_info(some_output(outputs).tensor->format).block_bytes;
  for (std::int64_t at = k0; at < k0 + k; at += formats::kBlockK) {
    std::memset(records, 0, static_cast<std::size_t>(per_block * record_bytes));
    std::memset(supers, 0, static_cast<std::size_t>(layout.super_bytes()));
    for (std::size_t i = 0; i < kPanelOutputs; ++i) {
      const std::uint8_t* block = blocks[i];
      if (block == nullptr) continue;
      blocks[i] += block_bytes;
      std::memcpy(supers + 2 * i, minima ? block : block + 208, 2);
      if (minima) std::memcpy(supers + 2 * (kPanelOutputs + i), block + 2, 2);
      std::byte* record = records + i;
      for (int j = 0; j < per_block; ++j, record += record_bytes) {
        if (!minima) {
          record[0] = static_cast<std::byte>(formats::Q6kBlock{block}.scale(j));
          continue;
        }
        const formats::SixBits six = formats::six_bits(block + 4, j);
        record[0] = static_cast<std::byte>(six.scale);
        record[kPanelOutputs] = static_cast<std::byte>(six.minimum);
      }
    }
    records += per_block * record_bytes;
    supers += layout.super_bytes();
  }
}

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
  // Equal weights are equal bytes, whatever the memory held between the parts.
  const auto clear = [&](std::int64_t from, std::int64_t until) {
    std::memset(to + from, 0, static_cast<std::size_t>(until - from));
  };
  clear(format.codes_offset(k) + format.code_bytes(k), format.bytes(k));
  clear(format.records_offset(k) + format.segments.count(k) * format.segments.record_bytes(),
        format.codes_offset(k));
  const SegmentLayout& segments = format.segments;
  if (segments.k == 0 || segments.record_bytes() == 0) return;
  std::byte* records = to + format.records_offset(k);
  if (segments.has_supers()) {
    write_block_records(outputs, format, k0, k, records, to);
  } else {
    RecordWriter(outputs, format).write(k0, segments.count(k), records);
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
