// The table of kernels that kernels.inc describes.
#include <algorithm>
#include <iterator>

#include "backends/cpu/kernels/declarations.h"

namespace fusedmoe::cpu {
namespace {

constexpr GemmInputs kInputs[] = {
#define FUSEDMOE_INPUTS(isa, dtype, k_group, k_multiple, lanes, row_multiple, max_rows, \
                        rows_per_pass, kib)                                             \
  {CpuIsa::isa,   DType::dtype, {k_group, k_multiple, lanes}, row_multiple, max_rows,   \
   rows_per_pass, (kib)*1024,   &load_rows_##isa##_##dtype},
#include "backends/cpu/kernels/kernels.inc"
};

constexpr GemmKernel kGemm[] = {
#define FUSEDMOE_GEMM(isa, format, dtype, recipe)                              \
  {CpuIsa::isa, WeightFormat::format,  DType::dtype, "gemm_" #isa "_" #format, \
   recipe,      &gemm_##isa##_##format},
#define FUSEDMOE_GEMM_A8(isa, format, recipe)                                     \
  {CpuIsa::isa, WeightFormat::format,     DType::i8, "gemm_a8_" #isa "_" #format, \
   recipe,      &gemm_a8_##isa##_##format},
#include "backends/cpu/kernels/kernels.inc"
};

constexpr RowKernels kRows[] = {
#define FUSEDMOE_ROWS(isa) {CpuIsa::isa, &activate_##isa, &combine_##isa},
#include "backends/cpu/kernels/kernels.inc"
};

}  // namespace

std::span<const GemmKernel> gemm_kernels() noexcept { return kGemm; }
std::span<const GemmInputs> gemm_inputs() noexcept { return kInputs; }

const GemmInputs& inputs_of(const GemmKernel& kernel) noexcept {
  return *std::find_if(std::begin(kInputs), std::end(kInputs), [&](const GemmInputs& inputs) {
    return inputs.isa == kernel.isa && inputs.dtype == kernel.dtype;
  });
}

const GemmKernel* find_gemm(CpuIsa isa, WeightFormat format, DType dtype,
                            ComputeMode mode) noexcept {
  const GemmKernel* best = nullptr;
  for (const GemmKernel& kernel : kGemm) {
    if (kernel.isa > isa || kernel.format != format) continue;
    const bool integers = kernel.dtype == DType::i8;
    if (integers != (mode == ComputeMode::a8)) continue;
    if (!integers && kernel.dtype != DType::f32 && kernel.dtype != dtype) continue;
    if (best == nullptr || kernel.isa > best->isa) best = &kernel;
  }
  return best;
}

const RowKernels& row_kernels(CpuIsa isa) noexcept {
  const RowKernels* best = &kRows[0];
  for (const RowKernels& rows : kRows) {
    if (rows.isa <= isa && rows.isa > best->isa) best = &rows;
  }
  return *best;
}

}  // namespace fusedmoe::cpu
