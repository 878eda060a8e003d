// What the library knows of each weight format: its name, its size, and the scalar decode and
// encode that define it. Backends load formats in their own ways and are held to this one.
#pragma once

#include <cstdint>
#include <span>

#include "fusedmoe/weights.h"

namespace fusedmoe {

struct FormatInfo {
  WeightFormat format = WeightFormat::f32;
  const char* name = "";
  int bits_per_weight = 0;  // without scales
  bool built = false;       // false: known by name, refused with a reason
  // The value at (expert, n, k) of a tensor, whatever its layout and strides.
  double (*decode)(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                   std::int64_t k) = nullptr;
  // Stores `value`, rounded to nearest even, at (expert, n, k); for tests and tools. `data` is
  // tensor.data, writable.
  void (*encode)(void* data, const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                 std::int64_t k, double value) = nullptr;
};

// All formats, in order of WeightFormat.
std::span<const FormatInfo> all_formats() noexcept;
const FormatInfo& format_info(WeightFormat format) noexcept;

// Element index of (expert, n, k): the one place where layout and strides are resolved.
std::int64_t element_index(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                           std::int64_t k) noexcept;
// Elements between stored rows (outputs for nk, inputs for kn), and between experts.
std::int64_t row_stride_of(const WeightTensor& tensor) noexcept;
std::int64_t expert_stride_of(const WeightTensor& tensor) noexcept;

}  // namespace fusedmoe
