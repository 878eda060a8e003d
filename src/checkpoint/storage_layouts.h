// How one expert's matrix lies in a checkpoint: which tensors it is made of, their shapes, and what
// becomes of them. One row for each layout in storage_layouts.cpp; which row a checkpoint has is
// said by its config (quant_config.h) or, in GGUF, by a tensor's type. How bytes are rearranged is
// in unpack.h.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/tensor_source.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::checkpoint {

// The tensors that a matrix may be made of.
enum class Part : std::uint8_t {
  data,
  plain,  // unquantised weights in a quantised checkpoint, where `data` has another name
  scale,
  zero_point,
  global,       // one number for the matrix
  input_scale,  // of activations: not used in a16
  shape,        // what `data` unpacks to
  group_index,  // the group of each k
};
inline constexpr std::size_t kNumParts = 8;

// In terms of N, K and the quantisation's numbers. A stack of experts has E in front.
enum class PartShape : std::uint8_t {
  matrix,        // [N, K], or [K, N] where the family stores it so
  half_bytes,    // [N, K / 2]
  words,         // [N, ceil(K * bits / 32)]
  scalar,        // [] or [1]
  channels,      // [N, 1]
  groups,        // [N, K / group]; [N, 1] when a group is the row
  blocks,        // [ceil(N / block_n), ceil(K / block_k)]; N in two halves for gate and up in one
  packed_zeros,  // [ceil(N * bits / 32), K / group]
  words_by_k,    // [K * bits / 32, N]
  words_by_n,    // [K, N * bits / 32]
  groups_by_n,   // [K / group, N]
  zeros_by_n,    // [K / group, N * bits / 32]
  inputs,        // [K]
  two,           // [2]
  mx_blocks,     // [N, K / 32, 16]
};

enum class Need : std::uint8_t {
  required,
  optional,  // for all experts or for none
  if_asymmetric,
  refused,
};

struct PartRule {
  Part part;
  // Behind the stem of the matrix's name, which is the name without ".weight". Where the name of
  // the unquantised tensor does not end so, ".weight" in front of a suffix falls away.
  std::string_view suffix;
  PartShape shape;
  std::span<const TensorType> types;
  Need need = Need::required;
};

// What must be done with the bytes.
enum class Conversion : std::uint8_t {
  none,     // views in place
  zeros,    // data in place, zero points unpacked along N
  ct_int8,  // words of q + 128
  gptq,
  awq,
  q8_0,
  q4_0,
  mxfp4_blocks,
  nvfp4_blocks,
};

struct StorageLayout {
  std::string_view name;
  // Of the result; fp8 follows the type of the data.
  WeightFormat format;
  ScaleLayout scales;  // `group` stands for channel, too, when the config's group is the row
  std::span<const PartRule> parts;
  Conversion conversion = Conversion::none;
  std::int64_t group = 0;  // fixed by the format; 0 = what the config says
  bool scales_transposed = false;
  bool stacked = false;  // may be a stack of experts; else a tensor for each expert
  bool global_divides = false;

  const PartRule* find(Part part) const noexcept;
};

// What the config says beyond the layout.
struct QuantNumbers {
  std::int64_t group_size = 0;  // 0 = a group is a row
  std::int64_t block_n = 0;
  std::int64_t block_k = 0;
  bool asymmetric = false;
  int zero_offset = 0;  // added to stored zero points
  bool may_store_largest_zero = false;
};

// N and K of a matrix that belongs to one expert.
struct Extent {
  std::int64_t outputs = 0;
  std::int64_t inputs = 0;
  WeightLayout layout = WeightLayout::nk;
  bool two_parts = false;    // gate and up in one, in halves
  bool interleaved = false;  // gate and up in one, row by row

  std::int64_t rows() const { return layout == WeightLayout::nk ? outputs : inputs; }
  std::int64_t columns() const { return layout == WeightLayout::nk ? inputs : outputs; }
  std::int64_t elements() const { return outputs * inputs; }
};

// Without the experts' dimension. For a scalar: [].
std::vector<std::int64_t> part_shape(PartShape shape, const Extent& extent,
                                     const StorageLayout& layout, const QuantNumbers& numbers);

// Why a matrix of this size cannot be stored so, or nothing.
std::optional<std::string> misfit(const Extent& extent, const StorageLayout& layout,
                                  const QuantNumbers& numbers);

enum class LayoutId : std::uint8_t {
  plain,      // unquantised f32, f16 and bf16
  fp8_block,  // weight_scale_inv
  ct_fp8_block,
  fp8_tensor,
  fp8_channel,
  ct_int8,
  ct_int8_packed,
  ct_int4_packed,
  ct_nvfp4,
  ct_mxfp4,
  gptq,
  awq,
  gpt_oss_mxfp4,
  modelopt_nvfp4,
  gguf,  // unquantised; gguf_layout gives the others
};
const StorageLayout& storage_layout(LayoutId id) noexcept;
// In GGUF: by the type of the data; null for a type that is not read.
const StorageLayout* gguf_layout(TensorType type) noexcept;

std::optional<WeightFormat> plain_format(TensorType type) noexcept;
std::optional<ScaleType> scale_type(TensorType type) noexcept;

}  // namespace fusedmoe::checkpoint
