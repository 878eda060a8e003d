// Process-wide, lock-free record of the host scratch that running calls use, so that two calls in
// one workspace are refused instead of corrupting each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace fusedmoe {

// Holds one address range for the length of a call. Throws busy when it overlaps a range that is
// held. When two overlapping calls start at the same instant, both may be refused; never both run.
class WorkspaceUse {
 public:
  explicit WorkspaceUse(std::span<const std::byte> range);
  WorkspaceUse(const WorkspaceUse&) = delete;
  WorkspaceUse& operator=(const WorkspaceUse&) = delete;
  ~WorkspaceUse();

  // After fork, in the child: no call is running there.
  static void forget_all() noexcept;

 private:
  int slot_ = -1;
};

}  // namespace fusedmoe
