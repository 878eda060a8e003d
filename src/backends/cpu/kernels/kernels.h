// What a kernel is: the few functions in which an instruction set differs. Everything around them,
// schedules, packing, threads, is common. The table of all kernels is kernels.inc.
#pragma once

#include <cstdint>
#include <span>

#include "backends/cpu/cpu_isa.h"
#include "fusedmoe/config.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cpu {

// Outputs of one panel of packed weights. A panel of a gated w13 is 16 gate rows and the 16 up rows
// that belong to them, so that the activation finds both in one tile.
inline constexpr int kPanelOutputs = 32;
inline constexpr int kGatedOutputs = kPanelOutputs / 2;

// Brings a piece of some rows, from[r][k0 .. k0+k), into the order and type in which the kernels of
// one instruction set multiply them. Only those kernels know the order; `to` has room for
// GemmInputs::bytes(rows, k).
struct LoadRows {
  const void* const* from;  // [rows] addresses of rows
  DType dtype;              // GemmInputs::dtype, or any when that is f32
  std::int64_t k0;
  std::int64_t k;
  int rows;
  void* to;
};

// accumulators[rows][32] (+)= a[rows][k] * panel[k][32]. The numeric recipe: one chain of
// multiply-adds per output, in ascending k; it holds for any number of rows and any split of k at
// multiples of GemmInputs::k_multiple, since accumulators between two pieces stay in fp32.
struct GemmTile {
  const void* a;  // as load_rows of the kernel's inputs left it, for these rows and this k
  int rows;
  const void* panel;  // a piece of a packed panel: pack.h
  std::int64_t k;
  const void* next;     // the piece that comes after this one, to be prefetched; never null
  float* accumulators;  // [rows rounded up to GemmInputs::row_multiple][32]
  bool first;           // start at zero instead of what accumulators hold
};

// How a piece of a panel lies in memory: [k / k_group][32][k_group] elements, with zeros up to a
// multiple of k_multiple.
struct PanelLayout {
  int k_group = 1;
  int k_multiple = 1;

  std::int64_t padded(std::int64_t k) const {
    return (k + k_multiple - 1) / k_multiple * k_multiple;
  }
  friend bool operator==(const PanelLayout&, const PanelLayout&) = default;
};

// How rows come to the multipliers of an instruction set.
struct GemmInputs {
  CpuIsa isa;
  DType dtype;        // what is multiplied: f32 takes rows of every dtype, else only its own
  PanelLayout panel;  // what the weights have to look like
  int row_multiple;   // accumulators and loaded rows have room for a multiple of this many rows
  int max_rows;       // that pass over a panel together
  // Rows whose multiplication takes as long as reading the panel; with fewer, its bytes decide.
  int rows_per_pass;
  std::int64_t bytes_at_once;  // of loaded rows: what leaves room in L2 for a panel
  void (*load_rows)(const LoadRows&);

  std::int64_t padded_rows(std::int64_t rows) const {
    return (rows + row_multiple - 1) / row_multiple * row_multiple;
  }
  // Of one loaded row, with a pad that keeps rows from aliasing in L1.
  std::int64_t row_bytes(std::int64_t k) const {
    return panel.padded(k) * bytes_per_element(dtype) + 64;
  }
  std::int64_t bytes(std::int64_t rows, std::int64_t k) const {
    return padded_rows(rows) * row_bytes(k);
  }
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
  DType dtype;  // of its inputs
  const char* name;
  const char* recipe;  // the same text = the same bits
  GemmFunction run;
};

struct RowKernels {
  CpuIsa isa;
  void (*activate)(const ActivateTile&);
  void (*combine)(const CombineTile&);
};

std::span<const GemmKernel> gemm_kernels() noexcept;
std::span<const GemmInputs> gemm_inputs() noexcept;
const GemmInputs& inputs_of(const GemmKernel& kernel) noexcept;
// The best kernel of `isa`, or of the sets that it includes, for weights of a format and a compute
// dtype; null when there is none for the format.
const GemmKernel* find_gemm(CpuIsa isa, WeightFormat format, DType dtype) noexcept;
// The best of `isa` or of the sets that it includes.
const RowKernels& row_kernels(CpuIsa isa) noexcept;

}  // namespace fusedmoe::cpu
