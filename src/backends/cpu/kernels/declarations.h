// The functions behind the lines of kernels.inc.
#pragma once

#include "backends/cpu/kernels/kernels.h"

namespace fusedmoe::cpu {

#define FUSEDMOE_GEMM(isa, format, recipe) void gemm_##isa##_##format(const GemmTile& tile);
#define FUSEDMOE_ROWS(isa)                       \
  void load_rows_##isa(const LoadRows& rows);    \
  void activate_##isa(const ActivateTile& tile); \
  void combine_##isa(const CombineTile& tile);
#include "backends/cpu/kernels/kernels.inc"  // IWYU pragma: keep

}  // namespace fusedmoe::cpu
