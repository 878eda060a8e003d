// The table of kernels that kernels.inc describes.
#include <algorithm>
#include <array>

#include "backends/cpu/kernels/declarations.h"

namespace fusedmoe::cpu {
namespace {

constexpr GemmKernel kGemm[] = {
#define FUSEDMOE_GEMM(isa, format, recipe) \
  {CpuIsa::isa, WeightFormat::format, "gemm_" #isa "_" #format, recipe, &gemm_##isa##_##format},
#include "backends/cpu/kernels/kernels.inc"
};

constexpr RowKernels kRows[] = {
#define FUSEDMOE_ROWS(isa) {CpuIsa::isa, &load_rows_##isa, &activate_##isa, &combine_##isa},
#include "backends/cpu/kernels/kernels.inc"
};

}  // namespace

std::span<const GemmKernel> gemm_kernels() noexcept { return kGemm; }

const GemmKernel* find_gemm(CpuIsa isa, WeightFormat format) noexcept {
  const auto* found = std::find_if(std::begin(kGemm), std::end(kGemm), [&](const GemmKernel& k) {
    return k.isa == isa && k.format == format;
  });
  return found == std::end(kGemm) ? nullptr : found;
}

const RowKernels& row_kernels(CpuIsa isa) noexcept {
  return *std::find_if(std::begin(kRows), std::end(kRows),
                       [&](const RowKernels& k) { return k.isa == isa; });
}

}  // namespace fusedmoe::cpu
