#include "core/workspace_layout.h"

#include <algorithm>
#include <numeric>

namespace fusedmoe {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

bool alive_together(const ScratchRequest& a, const ScratchRequest& b) {
  return a.first <= b.last && b.first <= a.last;
}

}  // namespace

WorkspaceLayout::WorkspaceLayout(std::span<const ScratchRequest> requests, std::int64_t alignment)
    : arenas_{{0, 0, alignment}, {0, 0, alignment}}, placed_(requests.size()) {
  // Largest first, each at the lowest offset where nothing that is alive with it lies. Spans that
  // scale with the tokens share one half of an arena, fixed ones the other, so sizes stay affine.
  std::vector<std::size_t> order(requests.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto size_of = [&](std::size_t i) {
    return round_up(std::max(requests[i].fixed, requests[i].per_token), alignment);
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return size_of(a) > size_of(b); });
  std::vector<std::size_t> done;
  for (const std::size_t i : order) {
    Placed& mine = placed_[i];
    mine = {requests[i].in_workspace13 ? 0 : 1, 0, requests[i].per_token > 0};
    std::vector<std::size_t> rivals;
    for (const std::size_t j : done) {
      if (placed_[j].arena == mine.arena && placed_[j].scales == mine.scales &&
          alive_together(requests[i], requests[j])) {
        rivals.push_back(j);
      }
    }
    std::sort(rivals.begin(), rivals.end(),
              [&](std::size_t a, std::size_t b) { return placed_[a].offset < placed_[b].offset; });
    for (const std::size_t j : rivals) {
      if (mine.offset + size_of(i) <= placed_[j].offset) break;
      mine.offset = std::max(mine.offset, placed_[j].offset + size_of(j));
    }
    WorkspaceFormula& arena = arenas_[mine.arena];
    std::int64_t& total = mine.scales ? arena.per_token : arena.fixed;
    total = std::max(total, mine.offset + size_of(i));
    done.push_back(i);
  }
}

WorkspaceFormula WorkspaceLayout::formula() const {
  return {arenas_[0].fixed + arenas_[1].fixed, arenas_[0].per_token + arenas_[1].per_token,
          arenas_[0].alignment};
}

void WorkspaceLayout::place(std::byte* workspace13, std::byte* workspace2, std::int64_t num_tokens,
                            std::span<std::byte*> addresses) const {
  for (std::size_t i = 0; i < placed_.size(); ++i) {
    const Placed& span = placed_[i];
    std::byte* base = span.arena == 0 ? workspace13 : workspace2;
    addresses[i] =
        base + (span.scales ? arenas_[span.arena].fixed + span.offset * num_tokens : span.offset);
  }
}

}  // namespace fusedmoe
