// What the library knows of each weight format: its name, its size, and the scalar decode and
// encode that define it. Backends load formats in their own ways and are held to this one.
#pragma once

#include <cstdint>
#include <span>

#include "fusedmoe/weights.h"

namespace fusedmoe {

// What scales a format takes; core checks tensors against it.
struct ScaleRule {
  unsigned layouts = 0;         // bit i: ScaleLayout(i) is one of them
  unsigned types = 0;           // bit i: ScaleType(i)
  std::int64_t group_size = 0;  // the only one; 0 = any
  bool zero_points = false;     // may have them
  bool global = false;          // must have it
  bool any_order = false;       // [E, K, N] is legal, too
};

struct FormatInfo {
  WeightFormat format = WeightFormat::f32;
  const char* name = "";
  // Along K: the elements that share bytes, and their bytes.
  int block_elements = 1;
  int block_bytes = 0;
  ScaleRule scales = {};
  // The value at (expert, n, k) of a tensor, whatever its layout and strides.
  double (*decode)(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                   std::int64_t k) = nullptr;
  // Stores `value`, rounded to nearest even, at (expert, n, k) by the scales that are there. `data`
  // is tensor.data, writable. Null when values become codes only together: then there is
  // encode_block.
  void (*encode)(void* data, const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                 std::int64_t k, double value) = nullptr;
  // values: [block_elements]; to: [block_bytes].
  void (*encode_block)(const float* values, void* to) = nullptr;
  // The scale for a group whose largest magnitude is `largest`; formats with scales.
  double (*scale_for)(double largest) = nullptr;

  std::int64_t bytes(std::int64_t elements) const {
    return (elements + block_elements - 1) / block_elements * block_bytes;
  }
  bool takes(ScaleLayout layout) const {
    return (scales.layouts >> static_cast<int>(layout) & 1) != 0;
  }
  bool takes(ScaleType type) const { return (scales.types >> static_cast<int>(type) & 1) != 0; }
};

// All formats, in order of WeightFormat.
std::span<const FormatInfo> all_formats() noexcept;
const FormatInfo& format_info(WeightFormat format) noexcept;

// Element index of (expert, n, k): the one place where layout and strides are resolved.
std::int64_t element_index(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                           std::int64_t k) noexcept;
// Bytes before the block that holds an element.
std::int64_t byte_offset(const WeightTensor& tensor, std::int64_t element_index) noexcept;
// Elements between stored rows (outputs for nk, inputs for kn), and between experts.
std::int64_t row_stride_of(const WeightTensor& tensor) noexcept;
std::int64_t expert_stride_of(const WeightTensor& tensor) noexcept;

// One expert of a stack, as a stack of one: its elements, scales and zero points.
WeightTensor expert_of(WeightTensor stack, std::int64_t expert) noexcept;

}  // namespace fusedmoe
