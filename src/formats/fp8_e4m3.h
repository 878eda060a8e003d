// fp8_e4m3 weights: e4m3fn times a scale per tensor, channel or block.
#pragma once

#include "formats/bytes.h"
#include "formats/scales.h"
#include "formats/small_floats.h"

namespace fusedmoe::formats {

inline double decode_fp8_e4m3(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                              std::int64_t k) {
  const std::uint8_t code = load_byte(tensor, element_index(tensor, expert, n, k));
  return static_cast<double>(e4m3_to_f32(code)) * scale_at(tensor, expert, n, k);
}

inline void encode_fp8_e4m3(void* data, const WeightTensor& tensor, std::int64_t expert,
                            std::int64_t n, std::int64_t k, double value) {
  store_byte(data, element_index(tensor, expert, n, k),
             f64_to_e4m3(value / scale_at(tensor, expert, n, k)));
}

}  // namespace fusedmoe::formats
