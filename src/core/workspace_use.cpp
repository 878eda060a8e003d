#include "core/workspace_use.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <string>

#include "fusedmoe/error.h"

namespace fusedmoe {
namespace {

// One cache line per running call. begin: 0 = free, 1 = being written, else the first address.
struct alignas(64) Slot {
  std::atomic<std::uintptr_t> begin{0};
  std::atomic<std::uintptr_t> end{0};
};
constexpr std::uintptr_t kFree = 0;
constexpr std::uintptr_t kWriting = 1;
// Two per call that runs at the same time (two spans): 512 calls at once.
constexpr int kSlots = 1024;
std::array<Slot, kSlots> g_slots;
std::atomic<int> g_high_water{0};  // slots beyond were never used: a scan stops there

int claim_slot() {
  for (int i = 0; i < kSlots; ++i) {
    std::uintptr_t expected = kFree;
    if (g_slots[i].begin.load(std::memory_order_relaxed) == kFree &&
        g_slots[i].begin.compare_exchange_strong(expected, kWriting)) {
      int high = g_high_water.load();
      while (high < i + 1 && !g_high_water.compare_exchange_weak(high, i + 1)) {
      }
      return i;
    }
  }
  throw Error(ErrorCode::busy, "workspace: expected at most " + std::to_string(kSlots / 2) +
                                   " calls of apply at the same time in one process, got more; "
                                   "let some of them end first");
}

// True when slot i holds a range that overlaps [begin, end).
bool overlaps(int i, std::uintptr_t begin, std::uintptr_t end) {
  std::uintptr_t other = g_slots[i].begin.load();
  for (;;) {
    // A range that is being written is published before its owner looks at ours.
    if (other == kFree || other == kWriting) return false;
    const std::uintptr_t other_end = g_slots[i].end.load();
    const std::uintptr_t again = g_slots[i].begin.load();
    if (again == other) return other < end && begin < other_end;
    other = again;
  }
}

}  // namespace

WorkspaceUse::WorkspaceUse(std::span<const std::byte> range) {
  if (range.empty()) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(range.data());
  const auto end = begin + range.size();
  slot_ = claim_slot();
  // Publish, then look (all sequentially consistent): of two overlapping calls at least the later
  // one sees the other.
  g_slots[slot_].end.store(end);
  g_slots[slot_].begin.store(begin);
  const int high = g_high_water.load();
  for (int i = 0; i < high; ++i) {
    if (i == slot_ || !overlaps(i, begin, end)) continue;
    g_slots[slot_].begin.store(kFree);
    slot_ = -1;
    std::array<char, 160> text{};
    std::snprintf(text.data(), text.size(),
                  "workspace: expected memory that no other call uses, got [%#zx, %#zx), which a "
                  "running call of apply uses",
                  static_cast<std::size_t>(begin), static_cast<std::size_t>(end));
    throw Error(ErrorCode::busy,
                std::string(text.data()) + "; give each concurrent call its own workspace");
  }
}

WorkspaceUse::~WorkspaceUse() {
  if (slot_ >= 0) g_slots[slot_].begin.store(kFree);
}

void WorkspaceUse::forget_all() noexcept {
  for (Slot& slot : g_slots) slot.begin.store(kFree);
}

}  // namespace fusedmoe
