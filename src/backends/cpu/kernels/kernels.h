// What a kernel is: the few functions in which an instruction set differs. Everything around them,
// schedules, packing, threads, is common. The table of all kernels is kernels.inc.
#pragma once

#include <cstddef>
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

// What packed weights are made of, as kernels know them: several formats share one.
enum class Code : std::uint8_t {
  f32,
  f16,
  bf16,
  s8,    // int8; q6_k less 32, and q5_k
  e4m3,  // fp8_e4m3, mxfp8
  e5m2,
  e2m1,  // mxfp4, nvfp4
  u4,    // int4, q4_k
};

// What the codes of a panel are multiplied by, where that changes along K: in each segment of k an
// output is worth scale * code + offset. Where it does not change, it is a scale per output in the
// epilogue.
struct SegmentLayout {
  // Of a scale. one: none, the segment only ends a sum of integers. six_bits: u8 times an f16 that
  // 256 k share (q4_k, q5_k); signed_bits: s8 times that (q6_k).
  enum class Scale : std::uint8_t { one, f32, f16, bf16, e8m0, e4m3, six_bits, signed_bits };
  enum class Offset : std::uint8_t {
    none,         // codes are signed
    centre,       // -8 * scale: u4 without zero points
    zero_points,  // -zero * scale: u8 [32] behind the scales
    minima,       // -minimum: six_bits, behind the scales
  };
  std::int64_t k = 0;  // a multiple of 4; 0 = there are no segments
  Scale scale = Scale::one;
  Offset offset = Offset::none;
  bool per_half = false;  // a scale for each 16 outputs instead of for each

  static constexpr std::int64_t kSuperK = 256;  // that share the f16 of six_bits and signed_bits
  // Whether an offset stands in the records: then kernels need sums of inputs.
  bool has_offsets() const { return offset == Offset::zero_points || offset == Offset::minima; }
  bool has_supers() const { return scale >= Scale::six_bits; }
  // Where a piece of K may start.
  std::int64_t period() const { return k == 0 ? 1 : has_supers() ? kSuperK : k; }
  std::int64_t count(std::int64_t of_k) const { return k == 0 ? 0 : (of_k + k - 1) / k; }
  // Of one segment: scales, then zero points or minima.
  std::int64_t record_bytes() const {
    const std::int64_t bytes = scale == Scale::one                           ? 0
                               : scale == Scale::f32                         ? 4
                               : scale == Scale::f16 || scale == Scale::bf16 ? 2
                                                                             : 1;
    return bytes * (per_half ? 2 : kPanelOutputs) + (has_offsets() ? kPanelOutputs : 0);
  }
  // Of 256 k: f16 [32] for the scales, and for the minima.
  std::int64_t super_bytes() const {
    return has_supers() ? kPanelOutputs * (offset == Offset::minima ? 4 : 2) : 0;
  }
  friend bool operator==(const SegmentLayout&, const SegmentLayout&) = default;
};

// The segments that belong to a piece of a panel.
struct Segments {
  SegmentLayout layout;
  const std::byte* records = nullptr;  // of the piece's first segment
  const std::byte* supers = nullptr;   // of its first 256 k
};

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
  // Only where products of codes need them (a8, and offsets of segments):
  std::int64_t row_k = 0;      // of whole rows, which a8 takes its scales from
  std::int64_t segment_k = 0;  // sums of the inputs of every segment, ...
  void* sums = nullptr;        // ... [segments][rows], f32 or i32
  float* scales = nullptr;     // [rows], a8: what the integers stand for
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
  Segments segments = {};
  const void* sums = nullptr;  // of the rows' segments, as load_rows left them
};

// How a piece of a panel lies in memory: [k / k_group][32][k_group] codes, with zeros up to a
// multiple of k_multiple. Codes of four bits lie in planes: of 128 codes in that order, the line of
// 64 bytes holds the first `lanes` in the lowest bits of its lanes, the next ones four bits above,
// so that one shift brings a vector of codes into place.
struct PanelLayout {
  int k_group = 1;
  int k_multiple = 4;
  int lanes = 64;  // of 512 / lanes bits

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
  // Rows whose multiplication takes as long as reading a panel of 16 bits per weight (8 for i8);
  // with fewer, its bytes decide.
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
  const float* row_scale;  // [rows] router weights that go on the input, and a8's; or null
  const float* scale;      // [32] in the panel's order, of the weights, or null
  const float* bias;       // [32] likewise
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
  const float* row_scale;    // [rows] of a8, or null
  const float* scale;        // [32] of the weights, or null
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
  DType dtype;  // of its inputs; i8 = mode a8
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
// The best kernel of `isa`, or of the sets that it includes, for weights of a format, a compute
// dtype and a mode; null when there is none.
const GemmKernel* find_gemm(CpuIsa isa, WeightFormat format, DType dtype,
                            ComputeMode mode = ComputeMode::a16) noexcept;
// The best of `isa` or of the sets that it includes.
const RowKernels& row_kernels(CpuIsa isa) noexcept;

}  // namespace fusedmoe::cpu
