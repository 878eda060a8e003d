// int4 weights: unsigned integers less a zero point, times a scale per channel or group.
#pragma once

#include "formats/bytes.h"
#include "formats/scales.h"

namespace fusedmoe::formats {

inline constexpr int kInt4ZeroPoint = 8;  // of a tensor without zero points

inline double decode_int4(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                          std::int64_t k) {
  const int code = load_nibble(tensor, element_index(tensor, expert, n, k));
  return (code - zero_point_at(tensor, expert, n, k, kInt4ZeroPoint)) *
         scale_at(tensor, expert, n, k);
}

inline void encode_int4(void* data, const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                        std::int64_t k, double value) {
  const int zero = zero_point_at(tensor, expert, n, k, kInt4ZeroPoint);
  const int code = nearest_int(value, scale_at(tensor, expert, n, k), -zero, 15 - zero);
  store_nibble(data, element_index(tensor, expert, n, k), static_cast<std::uint8_t>(code + zero));
}

}  // namespace fusedmoe::formats
