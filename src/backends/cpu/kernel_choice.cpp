#include "backends/cpu/kernel_choice.h"

#include "backends/cpu/panel_format.h"

namespace fusedmoe::cpu {

KernelChoice choose_kernels(const PlanSpec& spec, const ExpertWeights& weights) {
  const CpuIsa isa = choose_isa(spec.options.isa);
  // What is not built was refused before, but for a plan without experts: its weights may say
  // anything, and nobody multiplies by them.
  const auto find = [&](const WeightTensor& tensor) {
    const WeightFormat format = tensor.format;
    const GemmKernel* kernel = find_gemm(isa, format, spec.config.dtype, spec.options.mode);
    // A group of int8 that is no whole step of AMX's goes to the kernel of the set below.
    if (kernel != nullptr && kernel->isa == CpuIsa::amx_int8 &&
        panel_format(tensor, *kernel).segments.k % inputs_of(*kernel).panel.k_multiple != 0) {
      kernel = find_gemm(CpuIsa::amx_bf16, format, spec.config.dtype, spec.options.mode);
    }
    return kernel != nullptr ? kernel : find_gemm(isa, WeightFormat::f32, spec.config.dtype);
  };
  const GemmKernel* gemm13 = find(weights.w13);
  const GemmKernel* gemm2 = find(weights.w2);
  return {isa, gemm13, gemm2, &inputs_of(*gemm13), &inputs_of(*gemm2), &row_kernels(isa)};
}

}  // namespace fusedmoe::cpu
