// q5_k weights: blocks of 256 k in 176 bytes, as q4_k with 32 bytes of fifth bits before the codes.
#pragma once

#include "formats/k_blocks.h"

namespace fusedmoe::formats {

struct Q5kBlock {
  const std::uint8_t* bytes;
  float d() const { return load_f16(bytes); }
  float dmin() const { return load_f16(bytes + 2); }
  SixBits sub_block(int j) const { return six_bits(bytes + 4, j); }
  int code(int i) const {  // bit j of fifth byte n belongs to element n of sub-block j
    const std::uint8_t byte = bytes[48 + i / 64 * 32 + i % 32];
    const int low = i % 64 < 32 ? byte & 15 : byte >> 4;
    return low | (bytes[16 + i % 32] >> i / 32 & 1) << 4;
  }
};

inline double decode_q5_k(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                          std::int64_t k) {
  const Q5kBlock block{k_block(tensor, expert, n, k)};
  const int i = static_cast<int>(k % kBlockK);
  const SixBits six = block.sub_block(i / 32);
  return static_cast<double>(block.d()) * six.scale * block.code(i) -
         static_cast<double>(block.dmin()) * six.minimum;
}

inline void encode_q5_k(const float* values, void* to) {
  auto* block = static_cast<std::uint8_t*>(to);
  std::memset(block, 0, 176);
  encode_affine_block<31>(values, block, [&](int i, int code) {
    block[48 + i / 64 * 32 + i % 32] |=
        static_cast<std::uint8_t>((code & 15) << (i % 64 < 32 ? 0 : 4));
    block[16 + i % 32] |= static_cast<std::uint8_t>((code >> 4) << i / 32);
  });
}

}  // namespace fusedmoe::formats
