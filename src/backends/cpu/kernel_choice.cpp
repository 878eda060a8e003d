#include "backends/cpu/kernel_choice.h"

namespace fusedmoe::cpu {

KernelChoice choose_kernels(const PlanSpec& spec, const ExpertWeights& weights) {
  const CpuIsa isa = choose_isa(spec.options.isa);
  // What is not built was refused before: these two are found for every unquantised format.
  const GemmKernel* gemm13 = find_gemm(isa, weights.w13.format, spec.config.dtype);
  const GemmKernel* gemm2 = find_gemm(isa, weights.w2.format, spec.config.dtype);
  return {isa, gemm13, gemm2, &inputs_of(*gemm13), &inputs_of(*gemm2), &row_kernels(isa)};
}

}  // namespace fusedmoe::cpu
