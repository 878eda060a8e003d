// mxfp4 weights: e2m1 times a power of two per 32 k.
#pragma once

#include "formats/bytes.h"
#include "formats/scales.h"
#include "formats/small_floats.h"

namespace fusedmoe::formats {

inline double decode_mxfp4(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                           std::int64_t k) {
  const std::uint8_t code = load_nibble(tensor, element_index(tensor, expert, n, k));
  return static_cast<double>(e2m1_to_f32(code)) * scale_at(tensor, expert, n, k);
}

inline void encode_mxfp4(void* data, const WeightTensor& tensor, std::int64_t expert,
                         std::int64_t n, std::int64_t k, double value) {
  store_nibble(data, element_index(tensor, expert, n, k),
               f64_to_e2m1(value / scale_at(tensor, expert, n, k)));
}

}  // namespace fusedmoe::formats
