// Which kernels a plan runs: by instruction set, the weights' format and the compute dtype.
#pragma once

#include "backends/cpu/kernels/kernels.h"
#include "core/backend.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cpu {

struct KernelChoice {
  CpuIsa isa;
  const GemmKernel* gemm13;
  const GemmKernel* gemm2;
  const GemmInputs* inputs13;
  const GemmInputs* inputs2;
  const RowKernels* rows;
};

KernelChoice choose_kernels(const PlanSpec& spec, const ExpertWeights& weights);

}  // namespace fusedmoe::cpu
