// Tensor names -> layer, expert, matrix and part of it, by the patterns of a family and the layout
// of its weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/families.h"
#include "checkpoint/storage_layouts.h"

namespace fusedmoe::checkpoint {

// Where a name belongs. Numbers of more digits than 64 bits hold come out as the largest value.
struct ExpertName {
  std::int64_t layer = 0;
  // False for a name that stands where the family's experts stand but fits none of its patterns.
  bool known = false;
  std::size_t pattern = 0;  // index into Family::patterns
  std::size_t tensor = 0;   // index into ExpertPattern::tensors
  Part part = Part::data;
  std::int64_t expert = 0;  // 0 where one tensor holds all experts
};

bool is_bias(Matrix matrix) noexcept;

// The layout that tensors of a pattern may have: `layout`, or unquantised where `layout` is null or
// is not for stacks of experts and the pattern has them.
const StorageLayout& layout_for(const ExpertPattern& pattern, const StorageLayout* layout) noexcept;

// Nothing for every other tensor: attention, routers, shared experts, dense layers.
// `first_pattern`: patterns before it are passed over; several may have a name in common.
std::optional<ExpertName> match_expert_name(const Family& family, const StorageLayout* layout,
                                            std::string_view name,
                                            std::size_t first_pattern = 0) noexcept;

// The name of an expert's tensor; `expert` is ignored where one tensor holds all experts. `suffix`
// is that of a part (PartRule), ".weight" for unquantised weights; ignored for biases.
std::string expert_tensor_name(const Family& family, std::int64_t layer,
                               const TensorPattern& pattern, std::string_view suffix,
                               std::int64_t expert);

// `rest` behind the prefix of the family's layer.
std::string layer_tensor_name(const Family& family, std::int64_t layer, std::string_view rest);

// Whether a name that fits no pattern ends as the tensors of quantised checkpoints do.
bool looks_quantized(std::string_view name) noexcept;

}  // namespace fusedmoe::checkpoint
