// The two grouped GEMMs of a layer on the CPU, with everything that is fused into them: gathering
// the rows, the activation, and the weighted sum per token. One schedule serves decode and prefill:
// work is cut into (expert, block of rows, panel of outputs), by cost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "backends/cpu/kernels/kernels.h"
#include "backends/cpu/weight_storage.h"
#include "core/backend.h"
#include "routing/permutation.h"

namespace fusedmoe::cpu {

// What stays the same from call to call.
struct Layer {
  const PlanSpec* spec = nullptr;
  KernelChoice kernels{};
  PackedLayout layout;
  const WeightStorage* packed = nullptr;  // or
  const ExpertWeights* borrowed = nullptr;

  // Of the activated intermediate: what gemm2 multiplies.
  DType compute_dtype() const { return spec->config.dtype; }
};

// What belongs to one call (one chunk of tokens).
struct CallState {
  const ApplyCall* call = nullptr;
  routing::Permutation permutation;
  std::span<const std::int32_t> active_experts;  // local ids with rows, ascending
  void* activated = nullptr;                     // [rows, intermediate_size] of compute_dtype
  float* sums = nullptr;                         // [num_tokens, sums_stride], when top_k > 1
  std::int64_t sums_stride = 0;
  std::byte* thread_scratch = nullptr;  // thread_scratch_bytes(layer) for each thread
};

std::int64_t thread_scratch_bytes(const Layer& layer);
// How many threads the work of a call can keep busy, at most `limit`.
int useful_threads(const Layer& layer, const CallState& state, int limit);

// Thread `thread` of `threads` does its share. All of gemm1 must have ended before gemm2 starts.
void gemm1(const Layer& layer, const CallState& state, int thread, int threads);
void gemm2(const Layer& layer, const CallState& state, int thread, int threads);

}  // namespace fusedmoe::cpu
