// WorkspaceBuffer and WorkspacePool: scratch that the library allocates when asked to.
#include "fusedmoe/workspace.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "core/translate.h"
#include "fusedmoe/error.h"
#include "fusedmoe/fused_moe.h"

namespace fusedmoe {

struct WorkspaceBuffer::Impl {
  Device device;
  const Backend* backend = nullptr;
  std::byte* data = nullptr;
  WorkspaceSize size;
  bool locked = false;

  ~Impl() {
    if (data != nullptr) backend->deallocate(device, data, size);
  }
};

WorkspaceBuffer::WorkspaceBuffer(Device device)
    : impl_(translate("workspace", [] { return std::make_unique<Impl>(); })) {
  impl_->backend = &backend_for(device);
  impl_->device = std::move(device);
}

WorkspaceBuffer::WorkspaceBuffer(Device device, WorkspaceSize size)
    : WorkspaceBuffer(std::move(device)) {
  reserve(size);
}

WorkspaceBuffer::WorkspaceBuffer(WorkspaceBuffer&&) noexcept = default;
WorkspaceBuffer& WorkspaceBuffer::operator=(WorkspaceBuffer&&) noexcept = default;
WorkspaceBuffer::~WorkspaceBuffer() = default;

void WorkspaceBuffer::reserve(WorkspaceSize size) {
  if (size.bytes < 0 || size.alignment <= 0 || (size.alignment & (size.alignment - 1)) != 0) {
    throw Error(ErrorCode::invalid_argument,
                "size: expected bytes >= 0 and an alignment that is a power of two, got " +
                    std::to_string(size.bytes) + " and " + std::to_string(size.alignment) +
                    "; pass what workspace_size() returns");
  }
  if (size.bytes <= impl_->size.bytes && size.alignment <= impl_->size.alignment) return;
  if (impl_->locked) {
    throw Error(ErrorCode::workspace_too_small,
                "workspace: expected at least " + std::to_string(size.bytes) + " bytes, got " +
                    std::to_string(impl_->size.bytes) +
                    " in a locked buffer; reserve the largest size before lock(), or pass the "
                    "buffer as it is: apply works in chunks");
  }
  size.bytes = std::max(size.bytes, impl_->size.bytes);
  size.alignment = std::max(size.alignment, impl_->size.alignment);
  std::byte* data = impl_->backend->allocate(impl_->device, size);
  if (impl_->data != nullptr) {
    impl_->backend->deallocate(impl_->device, impl_->data, impl_->size);
  }
  impl_->data = data;
  impl_->size = size;
}

void WorkspaceBuffer::lock() noexcept { impl_->locked = true; }
bool WorkspaceBuffer::locked() const noexcept { return impl_->locked; }
std::int64_t WorkspaceBuffer::bytes() const noexcept { return impl_->size.bytes; }
const Device& WorkspaceBuffer::device() const noexcept { return impl_->device; }
std::span<std::byte> WorkspaceBuffer::span() const noexcept {
  return {impl_->data, static_cast<std::size_t>(impl_->size.bytes)};
}

struct WorkspacePool::Impl {
  std::mutex mutex;
  WorkspaceSize size;
  bool locked = false;
  std::vector<WorkspaceBuffer> lanes;
  Device device;
};

WorkspacePool::WorkspacePool(Device device, int num_lanes)
    : impl_(translate("pool", [] { return std::make_unique<Impl>(); })) {
  if (num_lanes <= 0) {
    throw Error(ErrorCode::invalid_argument, "num_lanes: expected 1 or more, got " +
                                                 std::to_string(num_lanes) +
                                                 "; use one lane per concurrent call");
  }
  translate("pool", [&] {
    for (int i = 0; i < num_lanes; ++i) impl_->lanes.emplace_back(device);
  });
  impl_->device = std::move(device);
}

WorkspacePool::~WorkspacePool() = default;

void WorkspacePool::register_plan(const FusedMoe& plan, std::int64_t max_tokens) {
  const WorkspaceSize size = plan.workspace_size(max_tokens);
  if (!(plan.device() == impl_->device)) {
    throw Error(ErrorCode::invalid_argument,
                "plan: expected a plan on " + to_string(impl_->device) + ", got one on " +
                    to_string(plan.device()) + "; use one pool per device");
  }
  const std::lock_guard lock(impl_->mutex);
  if (impl_->locked && size.bytes > impl_->size.bytes) {
    throw Error(ErrorCode::workspace_too_small,
                "pool: expected at least " + std::to_string(size.bytes) + " bytes per lane, got " +
                    std::to_string(impl_->size.bytes) +
                    " in a locked pool; register every plan before lock()");
  }
  impl_->size.bytes = std::max(impl_->size.bytes, size.bytes);
  impl_->size.alignment = std::max(impl_->size.alignment, size.alignment);
}

void WorkspacePool::lock() {
  const std::lock_guard lock(impl_->mutex);
  for (WorkspaceBuffer& lane : impl_->lanes) {
    lane.reserve(impl_->size);
    lane.lock();
  }
  impl_->locked = true;
}

Workspace WorkspacePool::lane(int index) {
  const std::lock_guard lock(impl_->mutex);
  if (index < 0 || index >= static_cast<int>(impl_->lanes.size())) {
    throw Error(ErrorCode::invalid_argument,
                "lane: expected 0 to " + std::to_string(impl_->lanes.size() - 1) + ", got " +
                    std::to_string(index) + "; build the pool with more lanes");
  }
  impl_->lanes[index].reserve(impl_->size);
  return impl_->lanes[index];
}

int WorkspacePool::num_lanes() const noexcept { return static_cast<int>(impl_->lanes.size()); }

std::int64_t WorkspacePool::bytes_per_lane() const noexcept {
  const std::lock_guard lock(impl_->mutex);
  return impl_->size.bytes;
}

}  // namespace fusedmoe
