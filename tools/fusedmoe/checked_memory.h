// Memory for calls that are being checked: full of 0xFF where contents must not matter, with guard
// bytes around it that must stay what they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fusedmoe/fused_moe.h"

namespace fusedmoe::tool {

// `bytes` of memory at `offset` bytes behind a multiple of `alignment`, with guards on both sides.
class GuardedMemory {
 public:
  GuardedMemory() = default;
  GuardedMemory(std::int64_t bytes, std::int64_t alignment, std::int64_t offset = 0);
  // Moved memory stays where it is; a copy would lie elsewhere, aligned otherwise.
  GuardedMemory(GuardedMemory&&) = default;
  GuardedMemory& operator=(GuardedMemory&&) = default;

  std::span<std::byte> span() { return std::span(memory_).subspan(begin_, size_); }
  std::span<const std::byte> span() const { return std::span(memory_).subspan(begin_, size_); }
  // 0xFF in every byte: a NaN in every float format, -1 in every integer.
  void dirty();
  bool guards_untouched() const;

 private:
  std::vector<std::byte> memory_;
  std::size_t begin_ = 0;
  std::size_t size_ = 0;
};

// Who owns the scratch of a call, and how much there is.
enum class WorkspaceMode : std::uint8_t {
  allocate = 0,  // nobody: apply allocates
  exact,         // workspace_size(num_tokens) in one span
  two_spans,     // workspace_sizes_13_2(num_tokens)
  minimal,       // min_workspace_size()
  between,       // more than minimal, not enough for one piece
};
const char* to_string(WorkspaceMode mode) noexcept;

class Scratch {
 public:
  // tokens_between: how many tokens a piece has with WorkspaceMode::between.
  Scratch(const FusedMoe& plan, WorkspaceMode mode, std::int64_t num_tokens,
          std::int64_t tokens_between = 1);
  // Full of 0xFF again.
  Workspace dirty();
  bool guards_untouched() const {
    return workspace13_.guards_untouched() && workspace2_.guards_untouched();
  }

 private:
  WorkspaceMode mode_;
  GuardedMemory workspace13_;
  GuardedMemory workspace2_;
};

// A matrix that owns its memory: rows are `columns + padding` elements apart.
class CheckedMatrix {
 public:
  // offset: elements by which it starts off a 64-byte boundary.
  CheckedMatrix(DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t padding = 0,
                std::int64_t offset = 0);
  // A copy of every byte, padding too.
  explicit CheckedMatrix(const ConstMatrixView& from, std::int64_t offset = 0);

  MatrixView view() { return view_; }
  ConstMatrixView view() const { return view_; }
  void dirty() { memory_.dirty(); }
  // Without padding, for comparisons bit by bit.
  std::vector<std::byte> bytes() const;
  // Whether padding, as long as it was 0xFF, and guards are what they were.
  bool surroundings_untouched() const;

 private:
  GuardedMemory memory_;
  MatrixView view_;
};

// The bytes of a view from the first element to the last, padding between rows included.
std::span<const std::byte> bytes_of(const ConstMatrixView& view);

}  // namespace fusedmoe::tool
