// AMX's tiles in plain C++, as Intel's manual describes the instructions: what the kernels do with
// them is tested on machines without (option FUSEDMOE_AMX_MODEL, and tests/backends/cpu).
#pragma once

#include <cstdint>
#include <cstring>

#include "formats/float_bits.h"

namespace fusedmoe::cpu {

class AmxModel {
 public:
  static void configure(int rows) {
    for (int tile = 0; tile < 8; ++tile) tiles_[tile] = {tile < 6 ? rows : 16, {}};
  }
  // Tiles of no rows: what is used without being configured changes nothing.
  static void release() {
    for (Tile& tile : tiles_) tile = {};
  }
  template <int kTile>
  static void zero() {
    std::memset(tiles_[kTile].data, 0, sizeof(Tile::data));
  }
  template <int kTile>
  static void load(const void* from, std::int64_t stride) {
    for (int r = 0; r < tiles_[kTile].rows; ++r) {
      std::memcpy(tiles_[kTile].data[r], static_cast<const char*>(from) + r * stride, 64);
    }
  }
  template <int kTile>
  static void store(void* to, std::int64_t stride) {
    for (int r = 0; r < tiles_[kTile].rows; ++r) {
      std::memcpy(static_cast<char*>(to) + r * stride, tiles_[kTile].data[r], 64);
    }
  }
  // tdpbf16ps: even and odd k are summed apart, then both are added to the sum.
  template <int kSums, int kRows, int kWeights>
  static void dot() {
    for (int m = 0; m < tiles_[kSums].rows; ++m) {
      float sums[16];
      std::memcpy(sums, tiles_[kSums].data[m], 64);
      float even[16] = {};
      float odd[16] = {};
      for (int k = 0; k < tiles_[kWeights].rows; ++k) {
        const float x0 = element(tiles_[kRows], m, 2 * k);
        const float x1 = element(tiles_[kRows], m, 2 * k + 1);
        for (int n = 0; n < 16; ++n) {
          even[n] += x0 * element(tiles_[kWeights], k, 2 * n);
          odd[n] += x1 * element(tiles_[kWeights], k, 2 * n + 1);
        }
      }
      for (int n = 0; n < 16; ++n) sums[n] += even[n] + odd[n];
      std::memcpy(tiles_[kSums].data[m], sums, 64);
    }
  }

 protected:
  struct Tile {
    int rows;
    alignas(64) std::uint8_t data[16][64];
  };
  static float element(const Tile& tile, int row, int index) {
    std::uint16_t bits;
    std::memcpy(&bits, tile.data[row] + 2 * index, 2);
    return bf16_to_f32(bits);
  }
  inline static thread_local Tile tiles_[8];
};

// With tdpbssd for a product: four signed bytes to a sum.
class AmxByteModel : public AmxModel {
 public:
  template <int kSums, int kRows, int kWeights>
  static void dot() {
    for (int m = 0; m < tiles_[kSums].rows; ++m) {
      std::int32_t sums[16];
      std::memcpy(sums, tiles_[kSums].data[m], 64);
      for (int k = 0; k < 4 * tiles_[kWeights].rows; ++k) {
        const auto x = static_cast<std::int8_t>(tiles_[kRows].data[m][k]);
        for (int n = 0; n < 16; ++n) {
          sums[n] += x * static_cast<std::int8_t>(tiles_[kWeights].data[k / 4][4 * n + k % 4]);
        }
      }
      std::memcpy(tiles_[kSums].data[m], sums, 64);
    }
  }
};

}  // namespace fusedmoe::cpu
