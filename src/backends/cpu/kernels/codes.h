// What the codes of packed weights are worth, and where they lie in a panel: for every kernel and
// for packing. Which formats are made of which code is in code_of.
#pragma once

#include <array>
#include <cstdint>

#include "backends/cpu/kernels/kernels.h"
#include "formats/float_bits.h"
#include "formats/small_floats.h"

namespace fusedmoe::cpu {

constexpr Code code_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::f32:
      return Code::f32;
    case WeightFormat::f16:
      return Code::f16;
    case WeightFormat::bf16:
      return Code::bf16;
    case WeightFormat::fp8_e4m3:
    case WeightFormat::mxfp8:
      return Code::e4m3;
    case WeightFormat::fp8_e5m2:
      return Code::e5m2;
    case WeightFormat::mxfp4:
    case WeightFormat::nvfp4:
      return Code::e2m1;
    case WeightFormat::int4:
    case WeightFormat::q4_k:
      return Code::u4;
    default:
      return Code::s8;
  }
}

constexpr int bits_of(Code code) {
  switch (code) {
    case Code::f32:
      return 32;
    case Code::f16:
    case Code::bf16:
      return 16;
    case Code::e2m1:
    case Code::u4:
      return 4;
    default:
      return 8;
  }
}

// Of a piece of k inputs, padded: 32 outputs.
constexpr std::int64_t code_bytes(Code code, std::int64_t padded_k) {
  return padded_k * kPanelOutputs * bits_of(code) / 8;
}

// Where code `index` of a line of 128 four-bit codes lies: byte, and shift in it.
struct NibblePlace {
  int byte, shift;
};
constexpr NibblePlace nibble_place(int lanes, int index) {
  const int bit = index / lanes * 4;
  return {index % lanes * (64 / lanes) + bit / 8, bit % 8};
}

// Kernels that widen eight bits to sixteen do so within 16 bytes: their lines of 64 bytes hold the
// first and second 32 bytes in turns of 8. Position in the line of natural byte `index`.
constexpr int zipped_byte(int index) { return index % 32 / 8 * 16 + index / 32 * 8 + index % 8; }

// Values of the sixteen codes of four bits. u4 is worth code - 8 where there are no other offsets.
inline constexpr std::array<float, 16> kE2m1Values = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,
                                                      4.0F,  6.0F,  -0.0F, -0.5F, -1.0F, -1.5F,
                                                      -2.0F, -3.0F, -4.0F, -6.0F};
inline constexpr std::array<float, 16> kU4Values = {0, 1, 2,  3,  4,  5,  6,  7,
                                                    8, 9, 10, 11, 12, 13, 14, 15};
inline constexpr std::array<float, 16> kCentredValues = {-8, -7, -6, -5, -4, -3, -2, -1,
                                                         0,  1,  2,  3,  4,  5,  6,  7};

template <Code kCode>
const std::array<float, 16>& nibble_values(SegmentLayout::Offset offset) {
  if constexpr (kCode == Code::e2m1) return kE2m1Values;
  return offset == SegmentLayout::Offset::centre ? kCentredValues : kU4Values;
}

}  // namespace fusedmoe::cpu
