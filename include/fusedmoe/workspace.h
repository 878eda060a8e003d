// Scratch memory of apply: how much, whose, and which views of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "fusedmoe/config.h"
#include "fusedmoe/export.h"

namespace fusedmoe {

class FusedMoe;

struct WorkspaceSize {
  std::int64_t bytes = 0;
  std::int64_t alignment = 1;  // of the first byte, a power of two
};

// bytes(n) = fixed + per_token * n, exactly; for engines that size buffers symbolically.
struct WorkspaceFormula {
  std::int64_t fixed = 0;
  std::int64_t per_token = 0;
  std::int64_t alignment = 1;

  WorkspaceSize size(std::int64_t num_tokens) const {
    return {fixed + per_token * num_tokens, alignment};
  }
};

// Non-owning view of scratch. Contents never matter before or after a call. One workspace serves
// all layers and all plans, one call at a time.
struct Workspace {
  std::span<std::byte> workspace13 = {};  // empty when there is one span
  std::span<std::byte> workspace2 = {};
  bool allocate = true;  // neither span was given: apply allocates for this call alone

  Workspace() = default;
  // One span of workspace_size(num_tokens).
  Workspace(std::span<std::byte> span)  // NOLINT(google-explicit-constructor)
      : workspace2(span), allocate(false) {}
  Workspace(void* data, std::int64_t bytes)
      : Workspace(std::span(static_cast<std::byte*>(data), static_cast<std::size_t>(bytes))) {}
  // Two spans of workspace_sizes_13_2(num_tokens), for engines that lend two.
  Workspace(std::span<std::byte> first, std::span<std::byte> second)
      : workspace13(first), workspace2(second), allocate(false) {}
};

// Owning scratch on a device. Not for concurrent use of its own members.
class FUSEDMOE_EXPORT WorkspaceBuffer {
 public:
  explicit WorkspaceBuffer(Device device = Device::cpu());
  WorkspaceBuffer(Device device, WorkspaceSize size);
  WorkspaceBuffer(WorkspaceBuffer&&) noexcept;
  WorkspaceBuffer& operator=(WorkspaceBuffer&&) noexcept;
  WorkspaceBuffer(const WorkspaceBuffer&) = delete;
  WorkspaceBuffer& operator=(const WorkspaceBuffer&) = delete;
  ~WorkspaceBuffer();

  // Grows to at least `size`; never shrinks, contents are not kept. Throws workspace_too_small
  // with need and have once locked, out_of_memory when there is none.
  void reserve(WorkspaceSize size);
  // From now on growth throws: an engine calls it after warm-up.
  void lock() noexcept;
  bool locked() const noexcept;

  std::span<std::byte> span() const noexcept;
  std::int64_t bytes() const noexcept;
  const Device& device() const noexcept;
  operator Workspace() const { return Workspace(span()); }  // NOLINT(google-explicit-constructor)

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// One buffer per lane (micro-batch, stream), each as large as the largest plan that registered.
// Safe from any thread.
class FUSEDMOE_EXPORT WorkspacePool {
 public:
  // Throws invalid_argument unless num_lanes > 0.
  WorkspacePool(Device device, int num_lanes);
  WorkspacePool(const WorkspacePool&) = delete;
  WorkspacePool& operator=(const WorkspacePool&) = delete;
  ~WorkspacePool();

  // Makes every lane large enough for `plan` at max_tokens. Throws workspace_too_small once locked.
  void register_plan(const FusedMoe& plan, std::int64_t max_tokens);
  // Allocates what is registered and refuses growth from now on.
  void lock();
  // The lane's workspace; allocates it when it is not there yet. One call at a time per lane.
  Workspace lane(int index);
  int num_lanes() const noexcept;
  std::int64_t bytes_per_lane() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fusedmoe
