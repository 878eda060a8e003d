// From numbers to a format: scales from the largest magnitude they cover, then codes. What tests,
// tools and Python quantise with; models come with better calibrated scales than these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fusedmoe/weights.h"

namespace fusedmoe {

// A stack that owns its memory; `tensor` views it. Moving keeps the views.
struct QuantizedStack {
  QuantizedStack() = default;
  QuantizedStack(QuantizedStack&&) = default;
  QuantizedStack& operator=(QuantizedStack&&) = default;
  QuantizedStack(const QuantizedStack&) = delete;
  QuantizedStack& operator=(const QuantizedStack&) = delete;

  std::vector<std::byte> data;
  std::vector<std::byte> scales;
  std::vector<std::uint8_t> zero_points;
  std::vector<float> global;
  WeightTensor tensor;
};

// What a format takes when nobody says: scales per tensor for fp8, per channel for int8, groups of
// 32 for mxfp8 and mxfp4, of 16 for nvfp4, of 128 for int4; f32 scales where the type is free.
WeightScales default_scales(WeightFormat format);

struct QuantizeOptions {
  bool zero_points = false;  // int4: choose them, too
  std::byte fill{0};         // what padding between rows and experts holds
};

// values: [experts, outputs, inputs] of `tensor`, which says format, layout, sizes, strides and the
// layout of scales; its pointers are ignored. Scales: amax over what a scale covers, divided
// by the format's largest element; int4 with zero points: the range that holds 0, over 15 steps;
// mx: the OCP specification's exponent; nvfp4: global = amax / (6 * 448), then an e4m3 scale per
// group.
QuantizedStack quantize(std::span<const float> values, const WeightTensor& tensor,
                        const QuantizeOptions& options = {});

// [experts, outputs, inputs], rounded once from the exact value to f32.
std::vector<float> dequantize(const WeightTensor& tensor);

}  // namespace fusedmoe
