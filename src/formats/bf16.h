// bf16 weights: the upper half of an f32.
#pragma once

#include <cstring>

#include "formats/float_bits.h"
#include "formats/format.h"

namespace fusedmoe::formats {

inline double decode_bf16(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                          std::int64_t k) {
  std::uint16_t bits;  // weights may lie at any address
  std::memcpy(&bits,
              static_cast<const char*>(tensor.data) + 2 * element_index(tensor, expert, n, k), 2);
  return static_cast<double>(bf16_to_f32(bits));
}

inline void encode_bf16(void* data, const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                        std::int64_t k, double value) {
  const std::uint16_t bits = f32_to_bf16(static_cast<float>(value));
  std::memcpy(static_cast<char*>(data) + 2 * element_index(tensor, expert, n, k), &bits, 2);
}

}  // namespace fusedmoe::formats
