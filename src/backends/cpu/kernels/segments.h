// Scales and offsets of a segment as 32 floats each, one at a time: the definition of what records
// hold, for kernels without vectors of their own for it.
#pragma once

#include <cstdint>
#include <cstring>

#include "backends/cpu/kernels/kernels.h"
#include "formats/float_bits.h"
#include "formats/small_floats.h"

namespace fusedmoe::cpu {

FUSEDMOE_INLINE float load_half(const std::byte* at, std::int64_t index) {
  std::uint16_t bits;
  std::memcpy(&bits, at + 2 * index, sizeof bits);
  return f16_to_f32(bits);
}

FUSEDMOE_INLINE float scale_of(const Segments& segments, const std::byte* record,
                               const std::byte* super, int index) {
  using Scale = SegmentLayout::Scale;
  const auto byte = static_cast<std::uint8_t>(record[index]);
  switch (segments.layout.scale) {
    case Scale::one:
      return 1.0F;
    case Scale::f32: {
      float value;
      std::memcpy(&value, record + 4 * index, sizeof value);
      return value;
    }
    case Scale::f16:
      return load_half(record, index);
    case Scale::bf16: {
      std::uint16_t bits;
      std::memcpy(&bits, record + 2 * index, sizeof bits);
      return bf16_to_f32(bits);
    }
    case Scale::e8m0:
      return e8m0_to_f32(byte);
    case Scale::e4m3:
      return e4m3_to_f32(byte);
    case Scale::six_bits:
      return load_half(super, index) * static_cast<float>(byte);
    case Scale::signed_bits:
      return load_half(super, index) * static_cast<float>(static_cast<std::int8_t>(byte));
  }
  return 0.0F;
}

// Segment `index` of a piece: weight = code * scale + offset, per output. Offsets are zero where
// codes are signed, and where they are centred: then nibble_values() has it already.
FUSEDMOE_INLINE void load_segment(const Segments& segments, std::int64_t index, float* scale,
                                  float* offset) {
  using Offset = SegmentLayout::Offset;
  const SegmentLayout& layout = segments.layout;
  const std::byte* record = segments.records + index * layout.record_bytes();
  const std::byte* super =
      segments.supers + index * layout.k / SegmentLayout::kSuperK * layout.super_bytes();
  const std::byte* more = record + layout.record_bytes() - kPanelOutputs;
  for (int i = 0; i < kPanelOutputs; ++i) {
    scale[i] = scale_of(segments, record, super, layout.per_half ? i / (kPanelOutputs / 2) : i);
    if (layout.offset == Offset::zero_points) {
      offset[i] = -static_cast<float>(static_cast<std::uint8_t>(more[i])) * scale[i];
    } else if (layout.offset == Offset::minima) {
      offset[i] = -load_half(super, kPanelOutputs + i) *
                  static_cast<float>(static_cast<std::uint8_t>(more[i]));
    } else {
      offset[i] = 0.0F;
    }
  }
}

}  // namespace fusedmoe::cpu
