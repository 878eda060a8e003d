// The stable counting sort of permutation.h. The table of offsets is its own counter.
#include "routing/permutation.h"

#include <algorithm>
#include <cstddef>

#include "routing/element.h"

namespace fusedmoe::routing {
namespace {

// Calls body(slot, id) for all slots in order, with the dtype looked at once.
template <typename Id, typename Body>
void for_each_slot(const ConstMatrixView& topk_ids, Body&& body) {
  std::int64_t slot = 0;
  for (std::int64_t token = 0; token < topk_ids.rows; ++token) {
    const std::int64_t begin = token * topk_ids.row_stride;
    for (std::int64_t k = 0; k < topk_ids.columns; ++k, ++slot) {
      body(static_cast<std::size_t>(slot), std::int64_t{load_as<Id>(topk_ids.data, begin + k)});
    }
  }
}

template <typename Body>
void for_each_slot(const ConstMatrixView& topk_ids, Body&& body) {
  if (topk_ids.dtype == DType::i64) {
    for_each_slot<std::int64_t>(topk_ids, body);
  } else {
    for_each_slot<std::int32_t>(topk_ids, body);
  }
}

}  // namespace

std::optional<BadId> find_bad_id(const ConstMatrixView& topk_ids,
                                 std::int64_t num_experts) noexcept {
  for (std::int64_t token = 0; token < topk_ids.rows; ++token) {
    for (std::int64_t k = 0; k < topk_ids.columns; ++k) {
      const std::int64_t id =
          load_id(topk_ids.data, topk_ids.dtype, token * topk_ids.row_stride + k);
      if (id < -1 || id >= num_experts) return BadId{token, k, id};
    }
  }
  return std::nullopt;
}

std::int32_t permute(const ConstMatrixView& topk_ids, std::int64_t num_experts,
                     std::span<const std::int32_t> expert_map, std::int64_t num_local_experts,
                     const Permutation& p) noexcept {
  const auto num_global = static_cast<std::uint64_t>(
      expert_map.empty() ? num_experts
                         : std::min(num_experts, static_cast<std::int64_t>(expert_map.size())));
  const auto num_local = static_cast<std::uint64_t>(num_local_experts);
  // The local expert, or num_local: skipped. Unsigned, so that negative is too large as well.
  const auto local_expert = [&](std::int64_t id) {
    const auto global = static_cast<std::uint64_t>(id);
    if (global >= num_global) return num_local;
    const auto local =
        expert_map.empty() ? global : static_cast<std::uint64_t>(std::int64_t{expert_map[global]});
    return std::min(local, num_local);
  };

  // Counts, then beginnings: place e holds where expert e's next row goes, place num_local (which
  // counted what is skipped) the number of rows.
  std::int32_t* offsets = p.expert_offsets.data();
  std::fill_n(offsets, num_local + 1, 0);
  for_each_slot(topk_ids, [&](std::size_t, std::int64_t id) { ++offsets[local_expert(id)]; });
  std::int32_t num_rows = 0;
  for (std::uint64_t e = 0; e < num_local; ++e) {
    const std::int32_t count = offsets[e];
    offsets[e] = num_rows;
    num_rows += count;
  }
  offsets[num_local] = num_rows;

  for_each_slot(topk_ids, [&](std::size_t slot, std::int64_t id) {
    const std::uint64_t e = local_expert(id);
    if (e == num_local) {
      p.slot_to_row[slot] = -1;
      return;
    }
    const std::int32_t row = offsets[e]++;
    p.slot_to_row[slot] = row;
    p.row_to_slot[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(slot);
  });

  // Now place e holds the end of expert e, the beginning of e + 1: one step back.
  std::copy_backward(offsets, offsets + num_local, offsets + num_local + 1);
  offsets[0] = 0;
  return num_rows;
}

}  // namespace fusedmoe::routing
