#include "checked_memory.h"

#include <algorithm>
#include <cstring>

namespace fusedmoe::tool {
namespace {

constexpr std::size_t kGuard = 64;
constexpr std::byte kGuardByte{0xa5};
constexpr std::byte kDirt{0xff};

bool all_are(std::span<const std::byte> bytes, std::byte value) {
  return std::all_of(bytes.begin(), bytes.end(), [value](std::byte b) { return b == value; });
}

}  // namespace

GuardedMemory::GuardedMemory(std::int64_t bytes, std::int64_t alignment, std::int64_t offset)
    : memory_(static_cast<std::size_t>(bytes + alignment + offset) + 2 * kGuard, kGuardByte),
      size_(static_cast<std::size_t>(bytes)) {
  const auto first = reinterpret_cast<std::uintptr_t>(memory_.data()) + kGuard;
  const auto unit = static_cast<std::uintptr_t>(alignment);
  begin_ = kGuard + (unit - first % unit) % unit + static_cast<std::size_t>(offset);
  dirty();
}

void GuardedMemory::dirty() { std::ranges::fill(span(), kDirt); }

bool GuardedMemory::guards_untouched() const {
  const std::span<const std::byte> all(memory_);
  return all_are(all.first(begin_), kGuardByte) && all_are(all.subspan(begin_ + size_), kGuardByte);
}

const char* to_string(WorkspaceMode mode) noexcept {
  switch (mode) {
    case WorkspaceMode::allocate:
      return "allocate";
    case WorkspaceMode::exact:
      return "exact";
    case WorkspaceMode::two_spans:
      return "two_spans";
    case WorkspaceMode::minimal:
      return "minimal";
    case WorkspaceMode::between:
      return "between";
  }
  return "unknown";
}

Scratch::Scratch(const FusedMoe& plan, WorkspaceMode mode, std::int64_t num_tokens,
                 std::int64_t tokens_between)
    : mode_(mode) {
  WorkspaceSize size;
  switch (mode) {
    case WorkspaceMode::allocate:
      return;
    case WorkspaceMode::two_spans: {
      const FusedMoe::TwoSpans sizes = plan.workspace_sizes_13_2(num_tokens);
      workspace13_ = {sizes.workspace13.bytes, sizes.workspace13.alignment};
      workspace2_ = {sizes.workspace2.bytes, sizes.workspace2.alignment};
      return;
    }
    case WorkspaceMode::exact:
      size = plan.workspace_size(num_tokens);
      break;
    case WorkspaceMode::minimal:
      size = plan.min_workspace_size();
      break;
    case WorkspaceMode::between:
      // One byte short of another token.
      size = plan.workspace_size(tokens_between + 1);
      size.bytes = std::max(size.bytes - 1, plan.min_workspace_size().bytes);
      break;
  }
  workspace2_ = {size.bytes, size.alignment};
}

Workspace Scratch::dirty() {
  if (mode_ == WorkspaceMode::allocate) return {};
  workspace2_.dirty();
  if (mode_ != WorkspaceMode::two_spans) return {workspace2_.span()};
  workspace13_.dirty();
  return {workspace13_.span(), workspace2_.span()};
}

CheckedMatrix::CheckedMatrix(DType dtype, std::int64_t rows, std::int64_t columns,
                             std::int64_t padding, std::int64_t offset)
    : memory_(rows * (columns + padding) * bytes_per_element(dtype), 64,
              offset * bytes_per_element(dtype)),
      view_(memory_.span().data(), dtype, rows, columns, columns + padding) {}

CheckedMatrix::CheckedMatrix(const ConstMatrixView& from, std::int64_t offset)
    : CheckedMatrix(from.dtype, from.rows, from.columns, from.row_stride - from.columns, offset) {
  const std::span<const std::byte> bytes = bytes_of(from);
  if (!bytes.empty()) std::memcpy(view_.data, bytes.data(), bytes.size());
}

std::vector<std::byte> CheckedMatrix::bytes() const {
  std::vector<std::byte> result;
  const auto size = static_cast<std::size_t>(bytes_per_element(view_.dtype));
  const std::size_t row_bytes = static_cast<std::size_t>(view_.columns) * size;
  result.reserve(static_cast<std::size_t>(view_.rows) * row_bytes);
  for (std::int64_t row = 0; row < view_.rows; ++row) {
    const auto begin = static_cast<std::size_t>(row * view_.row_stride) * size;
    const auto part = memory_.span().subspan(begin, row_bytes);
    result.insert(result.end(), part.begin(), part.end());
  }
  return result;
}

bool CheckedMatrix::surroundings_untouched() const {
  if (!memory_.guards_untouched()) return false;
  const auto size = static_cast<std::size_t>(bytes_per_element(view_.dtype));
  const auto padding = static_cast<std::size_t>(view_.row_stride - view_.columns) * size;
  for (std::int64_t row = 0; row < view_.rows; ++row) {
    const auto begin = static_cast<std::size_t>(row * view_.row_stride + view_.columns) * size;
    if (!all_are(memory_.span().subspan(begin, padding), kDirt)) return false;
  }
  return true;
}

std::span<const std::byte> bytes_of(const ConstMatrixView& view) {
  if (view.rows == 0) return {};
  const std::int64_t elements = (view.rows - 1) * view.row_stride + view.columns;
  return {static_cast<const std::byte*>(view.data),
          static_cast<std::size_t>(elements * bytes_per_element(view.dtype))};
}

}  // namespace fusedmoe::tool
