// The permutation: a stable counting sort of slots by local expert, into tables that the caller
// gives. For the backends; nothing here allocates or throws.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "fusedmoe/tensor.h"

namespace fusedmoe::routing {

// slot = token * top_k + k. A row is the place of a slot after sorting by local expert; rows of
// one expert keep the order of their slots.
struct Permutation {
  std::span<std::int32_t> expert_offsets = {};  // [num_local_experts + 1], expert e: rows [e, e+1)
  std::span<std::int32_t> row_to_slot = {};     // [num_tokens * top_k], the first num_rows valid
  std::span<std::int32_t> slot_to_row = {};     // [num_tokens * top_k], -1 = skipped
};

struct BadId {
  std::int64_t token = 0;
  std::int64_t k = 0;
  std::int64_t id = 0;
};

// The first id outside [-1, num_experts), if there is one.
// topk_ids: [num_tokens, top_k], i32 or i64, strided
std::optional<BadId> find_bad_id(const ConstMatrixView& topk_ids,
                                 std::int64_t num_experts) noexcept;

// Fills the tables and returns num_rows. Skips ids outside [0, num_experts) and experts that are
// not local, without an access out of bounds whatever ids and map hold.
// topk_ids: [num_tokens, top_k], i32 or i64, strided; num_tokens * top_k < 2^31
// expert_map: [num_experts], local id or -1; empty = local ids are global ids
std::int32_t permute(const ConstMatrixView& topk_ids, std::int64_t num_experts,
                     std::span<const std::int32_t> expert_map, std::int64_t num_local_experts,
                     const Permutation& p) noexcept;

}  // namespace fusedmoe::routing
