#include "bench_allocations.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <new>

namespace fusedmoe::tool {
namespace {

struct Block {
  void* data;
  std::size_t bytes;
};

// Blocks that were allocated while armed and still live: a handful, so a search is enough, and an
// exact one, where malloc_usable_size would round up. Beyond this many, bytes are not counted.
constexpr std::size_t kMaxBlocks = 4096;

std::atomic<bool> g_armed{false};
std::atomic<std::int64_t> g_live_blocks{0};
std::mutex g_mutex;
std::array<Block, kMaxBlocks> g_blocks;
std::size_t g_num_blocks = 0;
std::int64_t g_allocations = 0;
std::int64_t g_alive = 0;
std::int64_t g_peak = 0;

void note_allocation(void* data, std::size_t bytes) noexcept {
  if (!g_armed.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(g_mutex);
  ++g_allocations;
  if (g_num_blocks == kMaxBlocks) return;
  g_blocks[g_num_blocks++] = {data, bytes};
  g_live_blocks.store(static_cast<std::int64_t>(g_num_blocks), std::memory_order_relaxed);
  g_alive += static_cast<std::int64_t>(bytes);
  g_peak = std::max(g_peak, g_alive);
}

// Blocks may be freed while nothing is armed: they are looked for as long as any is known.
void note_free(void* data) noexcept {
  if (data == nullptr || g_live_blocks.load(std::memory_order_relaxed) == 0) return;
  const std::lock_guard lock(g_mutex);
  for (std::size_t i = g_num_blocks; i-- > 0;) {
    if (g_blocks[i].data != data) continue;
    g_alive -= static_cast<std::int64_t>(g_blocks[i].bytes);
    g_blocks[i] = g_blocks[--g_num_blocks];
    g_live_blocks.store(static_cast<std::int64_t>(g_num_blocks), std::memory_order_relaxed);
    return;
  }
}

void* allocate(std::size_t bytes, std::size_t alignment) noexcept {
  for (;;) {
    const std::size_t size = std::max<std::size_t>(bytes, 1);
    void* data =
        alignment <= __STDCPP_DEFAULT_NEW_ALIGNMENT__
            ? std::malloc(size)
            : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    if (data != nullptr) {
      note_allocation(data, bytes);
      return data;
    }
    const std::new_handler handler = std::get_new_handler();
    if (handler == nullptr) return nullptr;
    try {
      handler();
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
  }
}

void* allocate_or_throw(std::size_t bytes, std::size_t alignment) {
  void* data = allocate(bytes, alignment);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

void deallocate(void* data) noexcept {
  note_free(data);
  std::free(data);
}

constexpr std::size_t kDefault = __STDCPP_DEFAULT_NEW_ALIGNMENT__;
constexpr std::size_t value(std::align_val_t alignment) {
  return static_cast<std::size_t>(alignment);
}

}  // namespace

AllocationCounter::AllocationCounter() {
  const std::lock_guard lock(g_mutex);
  g_num_blocks = 0;
  g_live_blocks.store(0);
  g_allocations = g_alive = g_peak = 0;
}
AllocationCounter::~AllocationCounter() { g_live_blocks.store(0); }
AllocationCounter::Armed::Armed() { g_armed.store(true); }
AllocationCounter::Armed::~Armed() { g_armed.store(false); }

std::int64_t AllocationCounter::allocations() const {
  const std::lock_guard lock(g_mutex);
  return g_allocations;
}
std::int64_t AllocationCounter::peak_bytes() const {
  const std::lock_guard lock(g_mutex);
  return g_peak;
}

}  // namespace fusedmoe::tool

using fusedmoe::tool::allocate;
using fusedmoe::tool::allocate_or_throw;
using fusedmoe::tool::deallocate;
using fusedmoe::tool::kDefault;
using fusedmoe::tool::value;

void* operator new(std::size_t n) { return allocate_or_throw(n, kDefault); }
void* operator new[](std::size_t n) { return allocate_or_throw(n, kDefault); }
void* operator new(std::size_t n, std::align_val_t a) { return allocate_or_throw(n, value(a)); }
void* operator new[](std::size_t n, std::align_val_t a) { return allocate_or_throw(n, value(a)); }
void* operator new(std::size_t n, const std::nothrow_t&) noexcept { return allocate(n, kDefault); }
void* operator new[](std::size_t n, const std::nothrow_t&) noexcept {
  return allocate(n, kDefault);
}
void* operator new(std::size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return allocate(n, value(a));
}
void* operator new[](std::size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return allocate(n, value(a));
}
void operator delete(void* p) noexcept { deallocate(p); }
void operator delete[](void* p) noexcept { deallocate(p); }
void operator delete(void* p, std::size_t) noexcept { deallocate(p); }
void operator delete[](void* p, std::size_t) noexcept { deallocate(p); }
void operator delete(void* p, std::align_val_t) noexcept { deallocate(p); }
void operator delete[](void* p, std::align_val_t) noexcept { deallocate(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { deallocate(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { deallocate(p); }
void operator delete(void* p, const std::nothrow_t&) noexcept { deallocate(p); }
void operator delete[](void* p, const std::nothrow_t&) noexcept { deallocate(p); }
void operator delete(void* p, std::align_val_t, const std::nothrow_t&) noexcept { deallocate(p); }
void operator delete[](void* p, std::align_val_t, const std::nothrow_t&) noexcept { deallocate(p); }
