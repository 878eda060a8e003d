// Implementation of quantize.h.
#include "formats/quantize.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "formats/bytes.h"
#include "formats/format.h"
#include "formats/scales.h"

namespace fusedmoe {
namespace {

// The range of what each scale (or global scale) of one expert covers.
struct Range {
  double low = 0, high = 0;
  double largest() const { return std::isnan(high) ? high : std::max(-low, high); }
  void add(double value) {
    if (std::isnan(value) || std::isnan(high)) {
      high = std::numeric_limits<double>::quiet_NaN();
      return;
    }
    low = std::min(low, value);
    high = std::max(high, value);
  }
};

struct Matrix {
  const WeightTensor& tensor;
  std::int64_t expert;
  const float* values;  // [outputs, inputs]

  template <class Place>
  std::vector<Range> ranges(std::int64_t count, const Place& place) const {
    std::vector<Range> result(static_cast<std::size_t>(count));
    for (std::int64_t n = 0; n < tensor.outputs; ++n) {
      for (std::int64_t k = 0; k < tensor.inputs; ++k) {
        result[static_cast<std::size_t>(place(n, k))].add(
            static_cast<double>(values[n * tensor.inputs + k]));
      }
    }
    return result;
  }
};

// A group of zeros has some scale, not zero: 0 / 0 would be NaN.
double positive(double scale) { return scale > 0 || std::isnan(scale) ? scale : 1.0; }

void choose_scales(const Matrix& matrix, QuantizedStack& stack) {
  const WeightTensor& tensor = matrix.tensor;
  const FormatInfo& format = format_info(tensor.format);
  const ScaleShape shape = scale_shape(tensor);
  const std::int64_t parts = globals_per_expert(tensor);
  if (parts > 0) {
    const auto ranges =
        matrix.ranges(parts, [&](std::int64_t n, std::int64_t) { return part_of(tensor, n); });
    for (std::int64_t part = 0; part < parts; ++part) {
      stack.global[static_cast<std::size_t>(matrix.expert * parts + part)] = static_cast<float>(
          positive(ranges[static_cast<std::size_t>(part)].largest() / (6.0 * 448.0)));
    }
  }
  const auto ranges = matrix.ranges(shape.count(), [&](std::int64_t n, std::int64_t k) {
    return scale_row(tensor, n) * shape.columns + scale_column(tensor, k);
  });
  for (std::int64_t row = 0; row < shape.rows; ++row) {
    for (std::int64_t column = 0; column < shape.columns; ++column) {
      const Range& range = ranges[static_cast<std::size_t>(row * shape.columns + column)];
      const std::int64_t index = scale_index(tensor, matrix.expert, row, column);
      double scale = format.scale_for(range.largest());
      if (!stack.zero_points.empty()) {
        scale = positive((range.high - range.low) / 15);
        stack.zero_points[static_cast<std::size_t>(index)] =
            static_cast<std::uint8_t>(formats::nearest_int(-range.low, scale, 0, 15));
      }
      if (parts > 0) {
        const std::int64_t global = matrix.expert * parts + (parts == 2 ? part_of(tensor, row) : 0);
        scale /= static_cast<double>(stack.global[static_cast<std::size_t>(global)]);
      }
      store_scale(stack.scales.data(), tensor.scales.type, index, positive(scale));
    }
  }
}

QuantizedStack allocate(const WeightTensor& tensor, const QuantizeOptions& options) {
  const FormatInfo& format = format_info(tensor.format);
  QuantizedStack stack;
  stack.tensor = tensor;
  const std::int64_t scales = tensor.experts * scale_shape(tensor).count();
  stack.data.resize(
      static_cast<std::size_t>(format.bytes(tensor.experts * expert_stride_of(tensor))),
      options.fill);
  stack.scales.resize(static_cast<std::size_t>(scales * bytes_per_scale(tensor.scales.type)));
  if (options.zero_points) stack.zero_points.resize(static_cast<std::size_t>(scales));
  stack.global.resize(static_cast<std::size_t>(tensor.experts * globals_per_expert(tensor)));
  WeightScales& views = stack.tensor.scales;
  stack.tensor.data = stack.data.data();
  views.data = stack.scales.empty() ? nullptr : stack.scales.data();
  views.zero_points = stack.zero_points.empty() ? nullptr : stack.zero_points.data();
  views.global = stack.global.empty() ? nullptr : stack.global.data();
  return stack;
}

}  // namespace

WeightScales default_scales(WeightFormat format) {
  const ScaleRule& rule = format_info(format).scales;
  WeightScales scales;
  for (const ScaleLayout layout :
       {ScaleLayout::none, ScaleLayout::tensor, ScaleLayout::channel, ScaleLayout::group}) {
    if (!format_info(format).takes(layout)) continue;
    scales.layout = layout;
    break;
  }
  if (format == WeightFormat::int4) scales.layout = ScaleLayout::group;
  scales.group_size = rule.group_size;
  if (scales.layout == ScaleLayout::group && scales.group_size == 0) scales.group_size = 128;
  for (const ScaleType type : {ScaleType::f32, ScaleType::e8m0, ScaleType::e4m3}) {
    if (!format_info(format).takes(type)) continue;
    scales.type = type;
    break;
  }
  return scales;
}

QuantizedStack quantize(std::span<const float> values, const WeightTensor& tensor,
                        const QuantizeOptions& options) {
  QuantizedStack stack = allocate(tensor, options);
  const WeightTensor& to = stack.tensor;
  const FormatInfo& format = format_info(to.format);
  for (std::int64_t e = 0; e < to.experts; ++e) {
    const Matrix matrix{to, e, values.data() + e * to.outputs * to.inputs};
    if (to.scales.layout != ScaleLayout::none) choose_scales(matrix, stack);
    for (std::int64_t n = 0; n < to.outputs; ++n) {
      const float* row = matrix.values + n * to.inputs;
      for (std::int64_t k = 0; k < to.inputs; k += format.encode ? 1 : format.block_elements) {
        if (format.encode != nullptr) {
          format.encode(stack.data.data(), to, e, n, k, static_cast<double>(row[k]));
        } else {
          format.encode_block(row + k,
                              stack.data.data() + byte_offset(to, element_index(to, e, n, k)));
        }
      }
    }
  }
  return stack;
}

std::vector<float> dequantize(const WeightTensor& tensor) {
  const FormatInfo& format = format_info(tensor.format);
  std::vector<float> values;
  values.reserve(static_cast<std::size_t>(tensor.experts * tensor.outputs * tensor.inputs));
  for (std::int64_t e = 0; e < tensor.experts; ++e) {
    for (std::int64_t n = 0; n < tensor.outputs; ++n) {
      for (std::int64_t k = 0; k < tensor.inputs; ++k) {
        values.push_back(static_cast<float>(format.decode(tensor, e, n, k)));
      }
    }
  }
  return values;
}

}  // namespace fusedmoe
