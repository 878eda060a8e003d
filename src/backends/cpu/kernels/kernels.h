// What a kernel is: the few functions in which an instruction set differs. Everything around them,
// schedules, packing, threads, is common. The table of all kernels is kernels.inc.
#pragma once

#include <cstdint>
#include <span>

#include "backends/cpu/cpu_isa.h"
#include "fusedmoe/config.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cpu {

// Outputs of one panel of packed weights: [K][32]. A panel of a gated w13 is 16 gate rows and the
// 16 up rows that belong to them, so that the activation finds both in one tile.
inline constexpr int kPanelOutputs = 32;
inline constexpr int kGatedOutputs = kPanelOutputs / 2;

// accumulators[rows][32] (+)= a[rows][k] * panel[k][32]. The numeric recipe: one chain of
// multiply-adds per output, in ascending k; it holds for any number of rows and any split of k,
// since accumulators between two pieces of k stay in fp32.
struct GemmTile {
  const float* a;         // [rows][a_stride]
  std::int64_t a_stride;  // elements
  int rows;
  const void* panel;  // [k][32] in the weight's format
  std::int64_t k;
  float* accumulators;  // [rows][32]
  bool first;           // start at zero instead of what accumulators hold
};

// Widens a piece of each row to fp32: to[r][0..k) = from[r][k0..k0+k).
struct LoadRows {
  const void* const* from;  // [rows] addresses of rows
  DType dtype;
  std::int64_t k0;
  std::int64_t k;
  int rows;
  float* to;               // [rows][to_stride]
  std::int64_t to_stride;  // elements
};

// The epilogue of gemm1: scale, bias, activation, one rounding.
struct ActivateTile {
  const float* accumulators;  // [rows][32]: 16 gate and 16 up, or 32 up without a gate
  int rows;
  int outputs;             // valid channels: up to 16, or 32 without a gate
  const float* row_scale;  // [rows] router weights that go on the input, or null
  const float* bias;       // [32] in the panel's order, or null
  const ActivationConfig* activation;
  float clamp_limit;  // 0 = off
  void* to;           // [rows][to_stride] of dtype
  DType dtype;
  std::int64_t to_stride;  // elements
};

// One row of an expert: where it came from and what becomes of its result.
struct RowTarget {
  std::int64_t token;
  float weight;  // of the router, on the output
  bool first;    // of its token's rows in ascending order: starts the sum
  bool last;     // ends it: rounds it into the output
};

// The epilogue of gemm2: bias, router weight, and the sum over a token's rows, kept in fp32.
struct CombineTile {
  const float* accumulators;  // [rows][32]
  int rows;
  int outputs;               // valid columns, up to 32
  const float* bias;         // [32] or null
  const RowTarget* targets;  // [rows]
  float* sums;               // at the panel's first column: [num_tokens][sums_stride]
  std::int64_t sums_stride;
  void* output;  // at the panel's first column: [num_tokens][output_stride] of dtype
  DType dtype;
  std::int64_t output_stride;
};

using GemmFunction = void (*)(const GemmTile&);

struct GemmKernel {
  CpuIsa isa;
  WeightFormat format;
  const char* name;
  const char* recipe;  // the same text = the same bits
  GemmFunction run;
};

struct RowKernels {
  CpuIsa isa;
  void (*load_rows)(const LoadRows&);
  void (*activate)(const ActivateTile&);
  void (*combine)(const CombineTile&);
};

std::span<const GemmKernel> gemm_kernels() noexcept;
// Null when the instruction set has none for the format.
const GemmKernel* find_gemm(CpuIsa isa, WeightFormat format) noexcept;
const RowKernels& row_kernels(CpuIsa isa) noexcept;

}  // namespace fusedmoe::cpu
