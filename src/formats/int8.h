// int8 weights: signed integers times a scale per channel or group.
#pragma once

#include "formats/bytes.h"
#include "formats/scales.h"

namespace fusedmoe::formats {

inline double decode_int8(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                          std::int64_t k) {
  const auto code =
      static_cast<std::int8_t>(load_byte(tensor, element_index(tensor, expert, n, k)));
  return static_cast<double>(code) * scale_at(tensor, expert, n, k);
}

inline void encode_int8(void* data, const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                        std::int64_t k, double value) {
  const int code = nearest_int(value, scale_at(tensor, expert, n, k), -128, 127);
  store_byte(data, element_index(tensor, expert, n, k), static_cast<std::uint8_t>(code));
}

}  // namespace fusedmoe::formats
