// Access to codes of eight and four bits, for the formats that are made of them.
#pragma once

#include <cmath>
#include <cstdint>

#include "formats/format.h"

namespace fusedmoe::formats {

inline std::uint8_t load_byte(const WeightTensor& tensor, std::int64_t index) {
  return static_cast<const std::uint8_t*>(tensor.data)[index];
}
inline void store_byte(void* data, std::int64_t index, std::uint8_t code) {
  static_cast<std::uint8_t*>(data)[index] = code;
}

// Two codes in a byte, the even one in its low half.
inline std::uint8_t load_nibble(const WeightTensor& tensor, std::int64_t index) {
  const std::uint8_t byte = load_byte(tensor, index / 2);
  return index % 2 == 0 ? byte & 0xfU : byte >> 4;
}
inline void store_nibble(void* data, std::int64_t index, std::uint8_t code) {
  std::uint8_t& byte = static_cast<std::uint8_t*>(data)[index / 2];
  byte = static_cast<std::uint8_t>(index % 2 == 0 ? (byte & 0xf0U) | code
                                                  : (byte & 0x0fU) | code << 4);
}

// `value` / `scale` as an integer of [low, high], to nearest even; NaN and x / 0 give zero.
inline int nearest_int(double value, double scale, int low, int high) {
  const double quotient = value / scale;
  if (!(quotient == quotient) || scale == 0) return 0;
  if (quotient <= low) return low;
  if (quotient >= high) return high;
  const double down = std::floor(quotient);
  const double rest = quotient - down;
  const int whole = static_cast<int>(down);
  return rest > 0.5 || (rest == 0.5 && whole % 2 != 0) ? whole + 1 : whole;
}

}  // namespace fusedmoe::formats
