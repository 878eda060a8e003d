// q4_k weights: blocks of 256 k in 144 bytes, f16 d, f16 dmin, 12 bytes of scales, 128 of codes;
// value = d * scale * code - dmin * minimum, scale and minimum per 32 k.
#pragma once

#include "formats/k_blocks.h"

namespace fusedmoe::formats {

struct Q4kBlock {
  const std::uint8_t* bytes;
  float d() const { return load_f16(bytes); }
  float dmin() const { return load_f16(bytes + 2); }
  SixBits sub_block(int j) const { return six_bits(bytes + 4, j); }
  int code(int i) const {  // 64 k share 32 bytes: the first 32 are low halves
    const std::uint8_t byte = bytes[16 + i / 64 * 32 + i % 32];
    return i % 64 < 32 ? byte & 15 : byte >> 4;
  }
};

inline double decode_q4_k(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                          std::int64_t k) {
  const Q4kBlock block{k_block(tensor, expert, n, k)};
  const int i = static_cast<int>(k % kBlockK);
  const SixBits six = block.sub_block(i / 32);
  return static_cast<double>(block.d()) * six.scale * block.code(i) -
         static_cast<double>(block.dmin()) * six.minimum;
}

inline void encode_q4_k(const float* values, void* to) {
  auto* block = static_cast<std::uint8_t*>(to);
  std::memset(block, 0, 144);
  encode_affine_block<15>(values, block, [&](int i, int code) {
    block[16 + i / 64 * 32 + i % 32] |= static_cast<std::uint8_t>(code << (i % 64 < 32 ? 0 : 4));
  });
}

}  // namespace fusedmoe::formats
