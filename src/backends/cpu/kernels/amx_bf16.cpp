// Kernels for AMX-BF16: tdpbf16ps multiplies tiles of 16 rows by 32 k with tiles of 32 k by 16
// outputs.
#include "backends/cpu/kernels/amx_kernels.h"
#include "backends/cpu/kernels/codes.h"
#include "backends/cpu/kernels/declarations.h"
#ifdef FUSEDMOE_AMX_MODEL
#include "backends/cpu/kernels/amx_model.h"
#endif

namespace fusedmoe::cpu {
namespace {

#ifdef FUSEDMOE_AMX_MODEL
using Tiles = AmxModel;
#else
// In asm, since the compiler's macros take no tile number that is a template's and do not say that
// they read memory.
struct Tiles {
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
  template <int kSums, int kRows, int kWeights>
  FUSEDMOE_INLINE static void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0"
                 :
                 : "i"(kSums), "i"(kRows), "i"(kWeights));
  }
};
#endif

}  // namespace

#define FUSEDMOE_ONLY FUSEDMOE_AMX_BF16
#define FUSEDMOE_GEMM(isa, format, dtype, recipe)                         \
  void gemm_##isa##_##format(const GemmTile& tile) {                      \
    gemm_tiles<Tiles>(tile, decode_steps(code_of(WeightFormat::format))); \
  }
#include "backends/cpu/kernels/kernels.inc"

void load_rows_amx_bf16_bf16(const LoadRows& rows) { load_tile_rows(rows); }

}  // namespace fusedmoe::cpu
