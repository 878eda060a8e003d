// f32 weights: themselves.
#pragma once

#include <cstring>

#include "formats/format.h"

namespace fusedmoe::formats {

inline double decode_f32(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                         std::int64_t k) {
  float value;  // weights may lie at any address
  std::memcpy(&value,
              static_cast<const char*>(tensor.data) + 4 * element_index(tensor, expert, n, k), 4);
  return static_cast<double>(value);
}

inline void encode_f32(void* data, const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                       std::int64_t k, double value) {
  const auto rounded = static_cast<float>(value);
  std::memcpy(static_cast<char*>(data) + 4 * element_index(tensor, expert, n, k), &rounded, 4);
}

}  // namespace fusedmoe::formats
