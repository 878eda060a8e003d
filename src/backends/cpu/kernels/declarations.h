// The functions behind the lines of kernels.inc.
#pragma once

#include "backends/cpu/kernels/kernels.h"

namespace fusedmoe::cpu {

#define FUSEDMOE_INPUTS(isa, dtype, ...) void load_rows_##isa##_##dtype(const LoadRows& rows);
#define FUSEDMOE_GEMM(isa, format, dtype, recipe) void gemm_##isa##_##format(const GemmTile& tile);
#define FUSEDMOE_GEMM_A8(isa, format, recipe) void gemm_a8_##isa##_##format(const GemmTile& tile);
#define FUSEDMOE_ROWS(isa)                       \
  void activate_##isa(const ActivateTile& tile); \
  void combine_##isa(const CombineTile& tile);
#include "backends/cpu/kernels/kernels.inc"  // IWYU pragma: keep

}  // namespace fusedmoe::cpu
