// q6_k weights: blocks of 256 k in 210 bytes, 128 bytes of low halves, 64 of upper bits, 16 signed
// scales, f16 d; value = d * scale * (code - 32), scale per 16 k.
#pragma once

#include "formats/k_blocks.h"

namespace fusedmoe::formats {

struct Q6kBlock {
  const std::uint8_t* bytes;
  float d() const { return load_f16(bytes + 208); }
  int scale(int j) const { return static_cast<std::int8_t>(bytes[192 + j]); }
  int code(int i) const {  // of each 128 k, 64 low bytes hold 32 and 32, low halves first
    const int half = i / 128, quarter = i % 128 / 32, n = i % 32;
    const std::uint8_t low = bytes[64 * half + quarter % 2 * 32 + n];
    const int upper = bytes[128 + 32 * half + n] >> 2 * quarter & 3;
    return (quarter < 2 ? low & 15 : low >> 4) | upper << 4;
  }
};

inline double decode_q6_k(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                          std::int64_t k) {
  const Q6kBlock block{k_block(tensor, expert, n, k)};
  const int i = static_cast<int>(k % kBlockK);
  return static_cast<double>(block.d()) * block.scale(i / 16) * (block.code(i) - 32);
}

inline void encode_q6_k(const float* values, void* to) {
  auto* block = static_cast<std::uint8_t*>(to);
  std::memset(block, 0, 210);
  double scales[16];  // signed, so that the value furthest from zero is code 0: -32 steps
  for (int j = 0; j < 16; ++j) {
    double furthest = 0;
    for (int i = 16 * j; i < 16 * j + 16; ++i) {
      if (std::fabs(values[i]) > std::fabs(furthest)) furthest = static_cast<double>(values[i]);
    }
    scales[j] = furthest / -32;
  }
  double largest = 0;
  for (const double scale : scales) largest = std::max(largest, std::fabs(scale));
  const double d = static_cast<double>(store_f16(block + 208, largest / 127));
  for (int j = 0; j < 16; ++j) {
    const int scale = nearest_int(scales[j], d, -128, 127);
    block[192 + j] = static_cast<std::uint8_t>(scale);
    for (int i = 16 * j; i < 16 * j + 16; ++i) {
      const int code = nearest_int(static_cast<double>(values[i]), d * scale, -32, 31) + 32;
      const int half = i / 128, quarter = i % 128 / 32, n = i % 32;
      block[64 * half + quarter % 2 * 32 + n] |=
          static_cast<std::uint8_t>((code & 15) << (quarter < 2 ? 0 : 4));
      block[128 + 32 * half + n] |= static_cast<std::uint8_t>((code >> 4) << 2 * quarter);
    }
  }
}

}  // namespace fusedmoe::formats
