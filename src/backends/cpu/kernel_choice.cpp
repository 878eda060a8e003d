#include "backends/cpu/kernel_choice.h"

namespace fusedmoe::cpu {

KernelChoice choose_kernels(const PlanSpec& spec, const ExpertWeights& weights) {
  const CpuIsa isa = choose_isa(spec.options.isa);
  // What is not built was refused before, but for a plan without experts: its weights may say
  // anything, and nobody multiplies by them.
  const auto find = [&](WeightFormat format) {
    const GemmKernel* kernel = find_gemm(isa, format, spec.config.dtype, spec.options.mode);
    return kernel != nullptr ? kernel : find_gemm(isa, WeightFormat::f32, spec.config.dtype);
  };
  const GemmKernel* gemm13 = find(weights.w13.format);
  const GemmKernel* gemm2 = find(weights.w2.format);
  return {isa, gemm13, gemm2, &inputs_of(*gemm13), &inputs_of(*gemm2), &row_kernels(isa)};
}

}  // namespace fusedmoe::cpu
