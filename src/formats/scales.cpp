// Implementation of scales.h.
#include "formats/scales.h"

#include <cstddef>
#include <cstring>

#include "formats/float_bits.h"
#include "formats/format.h"
#include "formats/small_floats.h"

namespace fusedmoe {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }

std::int64_t num_parts(const WeightTensor& tensor) noexcept {
  return tensor.scales.parts == ScaleParts::one ? 1 : 2;
}

}  // namespace

std::int64_t inputs_per_scale(const WeightTensor& tensor) noexcept {
  switch (tensor.scales.layout) {
    case ScaleLayout::group:
      return tensor.scales.group_size;
    case ScaleLayout::block:
      return tensor.scales.block_k;
    default:
      return tensor.inputs;
  }
}

std::int64_t bytes_per_scale(ScaleType type) noexcept {
  switch (type) {
    case ScaleType::f32:
      return 4;
    case ScaleType::f16:
    case ScaleType::bf16:
      return 2;
    default:
      return 1;
  }
}

ScaleShape scale_shape(const WeightTensor& tensor) noexcept {
  const WeightScales& scales = tensor.scales;
  switch (scales.layout) {
    case ScaleLayout::tensor:
      return {num_parts(tensor), 1};
    case ScaleLayout::channel:
      return {tensor.outputs, 1};
    case ScaleLayout::group:
      return {tensor.outputs, ceil_div(tensor.inputs, scales.group_size)};
    case ScaleLayout::block: {
      const std::int64_t parts = num_parts(tensor);
      return {parts * ceil_div(tensor.outputs / parts, scales.block_n),
              ceil_div(tensor.inputs, scales.block_k)};
    }
    default:
      return {};
  }
}

std::int64_t globals_per_expert(const WeightTensor& tensor) noexcept {
  return tensor.format == WeightFormat::nvfp4 ? num_parts(tensor) : 0;
}

std::int64_t part_of(const WeightTensor& tensor, std::int64_t n) noexcept {
  switch (tensor.scales.parts) {
    case ScaleParts::halves:
      return n < tensor.outputs / 2 ? 0 : 1;
    case ScaleParts::interleaved:
      return n % 2;
    default:
      return 0;
  }
}

std::int64_t scale_row(const WeightTensor& tensor, std::int64_t n) noexcept {
  switch (tensor.scales.layout) {
    case ScaleLayout::tensor:
      return part_of(tensor, n);
    case ScaleLayout::block: {
      const std::int64_t rows = tensor.outputs / num_parts(tensor);
      const std::int64_t part = part_of(tensor, n);
      const std::int64_t block_n = tensor.scales.block_n;
      return part * ceil_div(rows, block_n) + (n - part * rows) / block_n;
    }
    default:
      return n;
  }
}

std::int64_t scale_column(const WeightTensor& tensor, std::int64_t k) noexcept {
  return k / inputs_per_scale(tensor);
}

std::int64_t scale_index(const WeightTensor& tensor, std::int64_t expert, std::int64_t row,
                         std::int64_t column) noexcept {
  const ScaleShape shape = scale_shape(tensor);
  const std::int64_t in_expert =
      tensor.scales.transposed ? column * shape.rows + row : row * shape.columns + column;
  return expert * shape.count() + in_expert;
}

float load_scale(const void* data, ScaleType type, std::int64_t index) noexcept {
  const auto* at = static_cast<const char*>(data) + index * bytes_per_scale(type);
  if (type == ScaleType::f32) {
    float value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  if (type == ScaleType::f16 || type == ScaleType::bf16) {
    std::uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return type == ScaleType::f16 ? f16_to_f32(bits) : bf16_to_f32(bits);
  }
  std::uint8_t code;
  std::memcpy(&code, at, sizeof code);
  return type == ScaleType::e8m0 ? e8m0_to_f32(code) : e4m3_to_f32(code);
}

void store_scale(void* data, ScaleType type, std::int64_t index, double value) noexcept {
  auto* at = static_cast<char*>(data) + index * bytes_per_scale(type);
  const auto single = static_cast<float>(value);
  if (type == ScaleType::f32) {
    std::memcpy(at, &single, sizeof single);
  } else if (type == ScaleType::f16 || type == ScaleType::bf16) {
    const std::uint16_t bits = type == ScaleType::f16 ? f32_to_f16(single) : f32_to_bf16(single);
    std::memcpy(at, &bits, sizeof bits);
  } else {
    const std::uint8_t code = type == ScaleType::e8m0 ? e8m0_scale(value, 0) : f64_to_e4m3(value);
    std::memcpy(at, &code, sizeof code);
  }
}

double scale_at(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                std::int64_t k) noexcept {
  const WeightScales& scales = tensor.scales;
  double value = 1.0;
  if (scales.layout != ScaleLayout::none) {
    value = static_cast<double>(
        load_scale(scales.data, scales.type,
                   scale_index(tensor, expert, scale_row(tensor, n), scale_column(tensor, k))));
  }
  return value * static_cast<double>(global_scale_at(tensor, expert, n));
}

float global_scale_at(const WeightTensor& tensor, std::int64_t expert, std::int64_t n) noexcept {
  if (tensor.scales.global == nullptr) return 1.0F;
  float global;  // checkpoints map tensors to any address
  std::memcpy(&global, tensor.scales.global + expert * num_parts(tensor) + part_of(tensor, n),
              sizeof global);
  return global;
}

int zero_point_at(const WeightTensor& tensor, std::int64_t expert, std::int64_t n, std::int64_t k,
                  int otherwise) noexcept {
  if (tensor.scales.zero_points == nullptr) return otherwise;
  return static_cast<const std::uint8_t*>(tensor.scales.zero_points)[scale_index(
      tensor, expert, scale_row(tensor, n), scale_column(tensor, k))];
}

WeightTensor expert_of(WeightTensor stack, std::int64_t expert) noexcept {
  if (stack.empty()) return stack;
  const auto advance = [](const void* data, std::int64_t bytes) -> const void* {
    return data == nullptr ? nullptr : static_cast<const std::byte*>(data) + bytes;
  };
  stack.data = advance(stack.data, byte_offset(stack, expert * expert_stride_of(stack)));
  WeightScales& scales = stack.scales;
  const std::int64_t before = expert * scale_shape(stack).count();
  scales.data = advance(scales.data, before * bytes_per_scale(scales.type));
  scales.zero_points = advance(scales.zero_points, before);
  if (scales.global != nullptr) scales.global += expert * globals_per_expert(stack);
  stack.experts = 1;
  return stack;
}

const char* to_string(ScaleLayout layout) noexcept {
  switch (layout) {
    case ScaleLayout::none:
      return "none";
    case ScaleLayout::tensor:
      return "tensor";
    case ScaleLayout::channel:
      return "channel";
    case ScaleLayout::group:
      return "group";
    case ScaleLayout::block:
      return "block";
  }
  return "unknown";
}

const char* to_string(ScaleType type) noexcept {
  switch (type) {
    case ScaleType::f32:
      return "f32";
    case ScaleType::f16:
      return "f16";
    case ScaleType::bf16:
      return "bf16";
    case ScaleType::e8m0:
      return "e8m0";
    case ScaleType::e4m3:
      return "e4m3";
  }
  return "unknown";
}

}  // namespace fusedmoe
