// The tiles of the machine, or, where FUSEDMOE_AMX_MODEL is set, their model.
#pragma once

#include <cstdint>

#include "backends/cpu/kernels/amx_kernels.h"
#ifdef FUSEDMOE_AMX_MODEL
#include "backends/cpu/kernels/amx_model.h"
#endif

namespace fusedmoe::cpu {

#ifdef FUSEDMOE_AMX_MODEL
using Bf16Tiles = AmxModel;
using ByteTiles = AmxByteModel;
#else
// In asm, since the compiler's macros take no tile number that is a template's and do not say that
// they read memory.
struct MachineTiles {
  FUSEDMOE_INLINE static void configure(int rows) {
    struct alignas(64) Config {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {
      config.rows[tile] = static_cast<std::uint8_t>(tile < 6 ? rows : kTileRows);
    }
    asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }
  // Left in use, tiles would be saved at every switch of the thread, and keep the core from sleep.
  FUSEDMOE_INLINE static void release() { asm volatile("tilerelease" ::: "memory"); }
  template <int kTile>
  FUSEDMOE_INLINE static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kTile>
  FUSEDMOE_INLINE static void load(const void* from, std::int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  FUSEDMOE_INLINE static void store(void* to, std::int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
  }
};

struct Bf16Tiles : MachineTiles {
  template <int kSums, int kRows, int kWeights>
  FUSEDMOE_INLINE static void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0"
                 :
                 : "i"(kSums), "i"(kRows), "i"(kWeights));
  }
};

struct ByteTiles : MachineTiles {
  template <int kSums, int kRows, int kWeights>
  FUSEDMOE_INLINE static void dot() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kRows), "i"(kWeights));
  }
};
#endif

}  // namespace fusedmoe::cpu
