// nvfp4 weights: e2m1 times an e4m3 scale per 16 k times a global scale.
#pragma once

#include "formats/bytes.h"
#include "formats/scales.h"
#include "formats/small_floats.h"

namespace fusedmoe::formats {

inline double decode_nvfp4(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                           std::int64_t k) {
  const std::uint8_t code = load_nibble(tensor, element_index(tensor, expert, n, k));
  return static_cast<double>(e2m1_to_f32(code)) * scale_at(tensor, expert, n, k);
}

inline void encode_nvfp4(void* data, const WeightTensor& tensor, std::int64_t expert,
                         std::int64_t n, std::int64_t k, double value) {
  store_nibble(data, element_index(tensor, expert, n, k),
               f64_to_e2m1(value / scale_at(tensor, expert, n, k)));
}

}  // namespace fusedmoe::formats
