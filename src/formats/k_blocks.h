// What the K-quants share: blocks of 256 k, in GGUF's layout, whose scales are integers times one
// f16 of the block.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "formats/bytes.h"
#include "formats/float_bits.h"

namespace fusedmoe::formats {

inline constexpr int kBlockK = 256;

// The block that holds (expert, n, k).
inline const std::uint8_t* k_block(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                                   std::int64_t k) {
  return static_cast<const std::uint8_t*>(tensor.data) +
         byte_offset(tensor, element_index(tensor, expert, n, k));
}

inline float load_f16(const std::uint8_t* at) {
  std::uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return f16_to_f32(bits);
}
inline float store_f16(std::uint8_t* at, double value) {
  const std::uint16_t bits = f32_to_f16(static_cast<float>(value));
  std::memcpy(at, &bits, sizeof bits);
  return f16_to_f32(bits);
}

// Scale and minimum of sub-block j of q4_k and q5_k, 6 bits each, out of 12 bytes.
struct SixBits {
  int scale, minimum;
};
inline SixBits six_bits(const std::uint8_t* b, int j) {
  if (j < 4) return {b[j] & 63, b[j + 4] & 63};
  return {(b[j + 4] & 15) | (b[j - 4] >> 6) << 4, (b[j + 4] >> 4) | (b[j] >> 6) << 4};
}
inline void store_six_bits(std::uint8_t* b, int j, SixBits six) {
  const auto merge = [](std::uint8_t& byte, int mask, int bits) {
    byte = static_cast<std::uint8_t>((byte & ~mask) | bits);
  };
  if (j < 4) {
    merge(b[j], 63, six.scale);
    merge(b[j + 4], 63, six.minimum);
  } else {
    merge(b[j + 4], 255, (six.scale & 15) | (six.minimum & 15) << 4);
    merge(b[j - 4], 0xc0, (six.scale >> 4) << 6);
    merge(b[j], 0xc0, (six.minimum >> 4) << 6);
  }
}

// Encodes a block of q4_k (kMax 15) or q5_k (kMax 31): for each sub-block of 32 the scale and
// minimum that hold its range, in 6 bits of the block's largest; store(index, code) keeps a code.
template <int kMax, class Store>
void encode_affine_block(const float* values, std::uint8_t* block, const Store& store) {
  double scales[8], minima[8];
  for (int j = 0; j < 8; ++j) {
    double low = 0, high = 0;
    for (int i = 0; i < 32; ++i) {
      low = std::min(low, static_cast<double>(values[32 * j + i]));
      high = std::max(high, static_cast<double>(values[32 * j + i]));
    }
    scales[j] = (high - low) / kMax;
    minima[j] = -low;
  }
  const double d =
      static_cast<double>(store_f16(block, *std::max_element(scales, scales + 8) / 63));
  const double dmin =
      static_cast<double>(store_f16(block + 2, *std::max_element(minima, minima + 8) / 63));
  std::memset(block + 4, 0, 12);
  for (int j = 0; j < 8; ++j) {
    const SixBits six = {nearest_int(scales[j], d, 0, 63), nearest_int(minima[j], dmin, 0, 63)};
    store_six_bits(block + 4, j, six);
    for (int i = 0; i < 32; ++i) {
      store(32 * j + i, nearest_int(static_cast<double>(values[32 * j + i]) + dmin * six.minimum,
                                    d * six.scale, 0, kMax));
    }
  }
}

}  // namespace fusedmoe::formats
