// Borrowed views of expert weights, as they lie in a checkpoint or in an engine.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "fusedmoe/export.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {

// How weights are stored.
enum class WeightFormat : std::uint8_t {
  f32 = 0,
  f16,
  bf16,
  fp8_e4m3,
  fp8_e5m2,
  mxfp8,
  mxfp4,
  nvfp4,
  int8,
  int4,
  q4_k,
  q5_k,
  q6_k
};
FUSEDMOE_EXPORT const char* to_string(WeightFormat format) noexcept;

// N = outputs, K = inputs. nk is checkpoint order, kn what vllm-xpu-kernels keeps.
enum class WeightLayout : std::uint8_t { nk = 0, kn };
FUSEDMOE_EXPORT const char* to_string(WeightLayout layout) noexcept;

// What one scale covers.
enum class ScaleLayout : std::uint8_t {
  none = 0,  // there are none: the format has none, or (q4_k, q5_k, q6_k) keeps them in the data
  tensor,    // an expert's matrix: [E], or [E, 2] when it has two parts
  channel,   // an output: [E, N]
  group,     // group_size k of an output: [E, N, ceil(K / group_size)]
  block,     // block_n outputs by block_k k: [E, ceil(N / block_n), ceil(K / block_k)]
};
enum class ScaleType : std::uint8_t { f32 = 0, f16, bf16, e8m0, e4m3 };
FUSEDMOE_EXPORT const char* to_string(ScaleLayout layout) noexcept;
FUSEDMOE_EXPORT const char* to_string(ScaleType type) noexcept;

// Gate and up in one w13 are often quantised apart, as two matrices of N / 2 rows. Then scales per
// tensor and nvfp4's global scales are [E, 2], and block scales have ceil(N / 2 / block_n) rows for
// each. Scales per channel or group follow their rows: nothing changes for them.
enum class ScaleParts : std::uint8_t {
  one = 0,
  halves,       // the first N / 2 rows, then the others
  interleaved,  // even rows, odd rows; not for block
};

struct WeightScales {
  const void* data = nullptr;  // dense, any alignment
  ScaleType type = ScaleType::f32;
  ScaleLayout layout = ScaleLayout::none;
  ScaleParts parts = ScaleParts::one;
  std::int64_t group_size = 0;        // along K, for group; the last one may be partial
  std::int64_t block_n = 0;           // for block
  std::int64_t block_k = 0;           // for block
  bool transposed = false;            // group and block: [E, along K, along N]
  const void* zero_points = nullptr;  // int4: u8, shape of the scales; null = 8
  const float* global = nullptr;      // nvfp4: [E], or [E, 2] when there are two parts
};

// One stack of matrices: [experts, outputs, inputs] (nk) or [experts, inputs, outputs] (kn; formats
// of 8 bits and more). Formats of 4 bits keep two k in a byte, the even one in its low nibble, and
// a row starts a byte; q4_k, q5_k and q6_k keep blocks of 256 k, as GGUF does.
struct WeightTensor {
  const void* data = nullptr;  // any alignment
  WeightFormat format = WeightFormat::bf16;
  WeightLayout layout = WeightLayout::nk;
  std::int64_t experts = 0;
  std::int64_t outputs = 0;  // N
  std::int64_t inputs = 0;   // K
  // Elements between rows as stored, a multiple of those that share bytes; 0 = dense.
  std::int64_t row_stride = 0;
  std::int64_t expert_stride = 0;  // elements between experts; 0 = dense
  WeightScales scales = {};

  bool empty() const noexcept { return outputs == 0 && data == nullptr; }
};

// [experts, size], dense; f32, f16 or bf16.
struct BiasTensor {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t experts = 0;
  std::int64_t size = 0;

  bool empty() const noexcept { return size == 0 && data == nullptr; }
};

// The weights of all local experts, in order of their local id. Views: the caller owns the memory
// and keeps it for as long as the call that takes them; for borrowed storage, and with
// StalePolicy::refresh, for as long as the plan may read them.
struct ExpertWeights {
  // [E, 2I, H], rows by MoeConfig::gate_up_layout and gate_up_order ([E, I, H] without a gate).
  // When w13_up is given, w13 is [E, I, H] with the gate rows alone, whatever the layout says.
  WeightTensor w13 = {};
  WeightTensor w13_up = {};  // [E, I, H], optional
  WeightTensor w2 = {};      // [E, H, I]
  BiasTensor w13_bias = {};  // [E, 2I], order as the rows of w13; optional
  BiasTensor w2_bias = {};   // [E, H], optional; under tensor parallelism for one rank only
  const float* w13_input_scales = nullptr;  // static activation scales: not used in a16
  const float* w2_input_scales = nullptr;

  // Instead of stacks, one expert at a time: called once per local expert, in ascending order,
  // from the thread that calls create or refresh; the views it returns hold one expert
  // (experts = 1) and need to live until its next call. It may throw; the exception passes through
  // (std::bad_alloc as out_of_memory).
  // The tensors above then state shapes, formats and layouts, with null data; any address in
  // scales.zero_points says that there are some.
  std::function<ExpertWeights(std::int64_t local_expert)> source = {};

  // Whatever keeps the tensors alive, if the caller likes: the plan holds it for as long as it may
  // read them (borrowed storage, and with StalePolicy::refresh), and destroys it on any thread.
  std::shared_ptr<const void> owner = {};

  // A counter that the owner of the memory bumps after changing it; optional. See
  // FusedMoe::weights_version().
  const std::atomic<std::uint64_t>* version = nullptr;
  std::shared_ptr<const void> version_owner = {};  // the same for the counter
};

// The experts of one rank out of weights that hold all: what a plan of that map takes. Yields one
// expert at a time by local id, as views; nothing is copied.
//
//   all         whole stacks, or a source that takes global ids; must outlive the result
//   expert_map  [num_experts], local id or -1: ExpertMap::resolve gives it
//
// Throws invalid_argument for a map of another length than a tensor has experts, and for local ids
// that are not 0..n-1, each once.
FUSEDMOE_EXPORT ExpertWeights local_experts(const ExpertWeights& all,
                                            std::span<const std::int32_t> expert_map);

}  // namespace fusedmoe
