// What a kernel has to compute, written a second time: the weights of a panel as codes, scales and
// offsets straight from the formats' definitions, and each recipe of kernels.inc step by step.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backends/cpu/kernels/codes.h"
#include "formats/q4_k.h"
#include "formats/q5_k.h"
#include "formats/q6_k.h"
#include "tested_kernels.h"

namespace fusedmoe::cpu {

// weight(n, k) = column(n) * (code(n, k) * scale(n, segment) + offset(n, segment)).
struct Terms {
  std::int64_t k = 0;
  std::int64_t segment_k = 0;  // 0 = none
  bool offsets = false;
  std::vector<float> code;           // [k][32]
  std::vector<float> scale, offset;  // [segments][32]
  std::vector<float> column;         // [32]
  std::vector<double> weight;        // [k][32], by the format's decode, over column

  Terms(const WeightTensor& tensor, const GemmKernel& kernel) : k(tensor.inputs) {
    const PanelFormat format = panel_format(tensor, kernel);
    const SegmentLayout& layout = format.segments;
    segment_k = layout.k;
    offsets = layout.has_offsets();
    column.assign(kPanelOutputs, 1.0F);
    column_scales(outputs_of(tensor), format, column.data());
    for (std::int64_t i = 0; i < k; ++i) {
      for (int n = 0; n < kPanelOutputs; ++n) {
        code.push_back(code_at(tensor, n, i));
        weight.push_back(format_info(tensor.format).decode(tensor, 0, n, i) /
                         static_cast<double>(column[n]));
      }
    }
    for (std::int64_t i = 0; i < layout.count(k); ++i) {
      for (int n = 0; n < kPanelOutputs; ++n) add_segment(tensor, layout, n, i * layout.k);
    }
  }

 private:
  static const std::uint8_t* block_of(const WeightTensor& tensor, int n, std::int64_t i) {
    return formats::k_block(tensor, 0, n, i);
  }
  static float code_at(const WeightTensor& tensor, int n, std::int64_t i) {
    const auto* bytes = static_cast<const std::uint8_t*>(tensor.data);
    const std::int64_t at = element_index(tensor, 0, n, i);
    const std::uint8_t nibble = bytes[at / 2] >> at % 2 * 4 & 0xf;
    const int in_block = static_cast<int>(i % 256);
    switch (tensor.format) {
      case WeightFormat::fp8_e4m3:
      case WeightFormat::mxfp8:
        return e4m3_to_f32(bytes[at]);
      case WeightFormat::fp8_e5m2:
        return e5m2_to_f32(bytes[at]);
      case WeightFormat::mxfp4:
      case WeightFormat::nvfp4:
        return e2m1_to_f32(nibble);
      case WeightFormat::int8:
        return static_cast<float>(static_cast<std::int8_t>(bytes[at]));
      case WeightFormat::int4:
        return static_cast<float>(nibble) - (tensor.scales.zero_points == nullptr ? 8.0F : 0.0F);
      case WeightFormat::q4_k:
        return static_cast<float>(formats::Q4kBlock{block_of(tensor, n, i)}.code(in_block));
      case WeightFormat::q5_k:
        return static_cast<float>(formats::Q5kBlock{block_of(tensor, n, i)}.code(in_block));
      case WeightFormat::q6_k:
        return static_cast<float>(formats::Q6kBlock{block_of(tensor, n, i)}.code(in_block) - 32);
      default:
        return static_cast<float>(format_info(tensor.format).decode(tensor, 0, n, i));
    }
  }

  void add_segment(const WeightTensor& tensor, const SegmentLayout& layout, int n,
                   std::int64_t at) {
    float s = 1.0F, o = 0.0F;
    if (layout.has_supers()) {
      const std::uint8_t* block = block_of(tensor, n, at);
      const int j = static_cast<int>(at % 256 / layout.k);
      if (tensor.format == WeightFormat::q6_k) {
        const formats::Q6kBlock six{block};
        s = six.d() * static_cast<float>(six.scale(j));
      } else {
        const formats::Q4kBlock four{block};
        s = four.d() * static_cast<float>(four.sub_block(j).scale);
        o = -four.dmin() * static_cast<float>(four.sub_block(j).minimum);
      }
    } else if (layout.scale != SegmentLayout::Scale::one) {
      s = load_scale(tensor.scales.data, tensor.scales.type,
                     scale_index(tensor, 0, scale_row(tensor, n), scale_column(tensor, at)));
      if (offsets) o = -static_cast<float>(zero_point_at(tensor, 0, n, at, 8)) * s;
    }
    scale.push_back(s);
    offset.push_back(o);
  }
};

inline float rounded_product(float a, float b) {
  const volatile float product = a * b;
  return product;
}

// The accumulators of one row, [32], by a recipe's text; nothing for those whose instruction does
// not round in fp32. x: [k], of a8 the row's bytes.
inline std::optional<std::vector<float>> by_recipe(const std::string& recipe, const Terms& w,
                                                   const std::vector<float>& x) {
  const bool fused = recipe.find("fused") != std::string::npos;
  const bool scaled_weights = recipe.find("weights scaled to fp32") != std::string::npos;
  const bool scaled_sums = recipe.find("sums scaled per group") != std::string::npos;
  const bool integers = recipe.rfind("vpdpbusd", 0) == 0 || recipe.rfind("tdpbssd", 0) == 0 ||
                        recipe.rfind("integer sums", 0) == 0;
  const auto add = [&](float a, float b, float c) {
    return fused ? std::fma(a, b, c) : c + rounded_product(a, b);
  };
  const bool known = recipe == "fp32 fused multiply-add" || recipe == "fp32 multiply, then add" ||
                     recipe == "fp32 fused multiply-add, weights scaled to fp32" ||
                     recipe == "fp32 multiply, then add, weights scaled to fp32" ||
                     recipe == "fp32 fused multiply-add, sums scaled per group" ||
                     recipe == "integer sums per group, then fp32 multiply and add" ||
                     recipe == "vpdpbusd, sums scaled per group or 2048 k, fp32 fused" ||
                     recipe == "vpdpbusd, sums scaled per group, fp32 fused" ||
                     recipe == "tdpbssd, sums scaled per group or 2048 k, fp32 fused" ||
                     recipe == "tdpbssd, sums scaled per group, fp32 fused";
  if (!known) {
    EXPECT_TRUE(recipe.rfind("vdpbf16ps, k pairs ascending", 0) == 0 ||
                recipe.rfind("tdpbf16ps, steps of 32 k ascending", 0) == 0)
        << "a recipe that this test does not know: " << recipe;
    return std::nullopt;
  }
  std::vector<float> out(kPanelOutputs, 0.0F);
  const std::int64_t step = w.segment_k == 0 ? w.k : w.segment_k;
  for (std::int64_t begin = 0; begin < w.k; begin += step) {
    const std::int64_t end = std::min(w.k, begin + step);
    const std::int64_t segment = w.segment_k == 0 ? 0 : begin / step * kPanelOutputs;
    for (int n = 0; n < kPanelOutputs; ++n) {
      float& sum = out[static_cast<std::size_t>(n)];
      const auto code = [&](std::int64_t k) {
        return w.code[static_cast<std::size_t>(k * kPanelOutputs + n)];
      };
      if (w.segment_k == 0) {
        for (std::int64_t k = begin; k < end; ++k) {
          sum = add(x[static_cast<std::size_t>(k)], code(k), sum);
        }
        continue;
      }
      const float scale = w.scale[static_cast<std::size_t>(segment + n)];
      const float offset = w.offset[static_cast<std::size_t>(segment + n)];
      if (scaled_weights) {
        for (std::int64_t k = begin; k < end; ++k) {
          sum = add(x[static_cast<std::size_t>(k)], add(code(k), scale, offset), sum);
        }
        continue;
      }
      EXPECT_TRUE(scaled_sums || integers) << recipe;
      float products = 0.0F, inputs = 0.0F;
      double exact = 0.0;
      for (std::int64_t k = begin; k < end; ++k) {
        const float value = x[static_cast<std::size_t>(k)];
        products = add(value, code(k), products);
        inputs += value;
        exact += static_cast<double>(value) * static_cast<double>(code(k));
      }
      if (integers) products = static_cast<float>(exact);
      sum = add(products, scale, sum);
      // Zeros are added, too, where the kernel adds offsets always.
      if (w.offsets || (integers && !fused)) sum = add(inputs, offset, sum);
    }
  }
  return out;
}

// Mode a8: what a row becomes. Bytes as numbers, and what they stand for.
struct IntegerRow {
  std::vector<float> bytes;
  float scale = 0.0F;

  explicit IntegerRow(const std::vector<float>& x) {
    float largest = 0.0F;
    bool finite = true;
    for (const float value : x) {
      finite = finite && std::isfinite(value);
      largest = std::max(largest, std::fabs(value));
    }
    const bool tiny = largest < 0x1p-100F;
    scale = !finite ? kNaN : tiny ? 0.0F : largest / 127.0F;
    const float inverse = !finite || tiny ? 0.0F : 127.0F / largest;
    for (const float value : x) bytes.push_back(std::nearbyint(value * inverse) + 0.0F);
  }
};

}  // namespace fusedmoe::cpu
