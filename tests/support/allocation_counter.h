// Counts every allocation of the process and can make one fail: replaces operator new in all its
// forms and, but under a sanitizer, malloc and its kin, mmap and pthread_create. For exactly one
// source of a binary (tests/isolated).
#pragma once

#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace fusedmoe::test::allocation {

inline std::atomic<bool> counting{false};
inline std::atomic<long> news{0}, deletes{0}, mallocs{0}, frees{0}, maps{0}, threads{0};
inline std::atomic<long> live_bytes{0}, peak_bytes{0};  // by operator new
inline std::atomic<long> mapped_bytes{0};               // by mmap
inline std::atomic<long> until_failure{-1};             // operator new; negative: never
inline std::atomic<bool> failed{false};

inline void note(std::atomic<long>& counter) {
  if (counting.load(std::memory_order_relaxed)) ++counter;
}

struct Counts {
  long news, deletes, mallocs, frees, maps, threads;
  long all() const { return news + deletes + mallocs + frees + maps + threads; }
};

// What f does, on all threads.
template <class F>
Counts count(const F& f) {
  for (auto* counter : {&news, &deletes, &mallocs, &frees, &maps, &threads}) *counter = 0;
  counting = true;
  f();
  counting = false;
  return {news, deletes, mallocs, frees, maps, threads};
}

// The n-th operator new of f from here fails (once). False when f has fewer.
template <class F>
bool fail_nth(long n, const F& f) {
  failed = false;
  until_failure = n;
  try {
    f();
  } catch (...) {
    until_failure = -1;
    throw;
  }
  until_failure = -1;
  return failed;
}

inline void* raw(std::size_t size, std::size_t alignment) noexcept;
inline void raw_free(void* memory) noexcept;

inline void* allocate(std::size_t size, std::size_t alignment) noexcept {
  note(news);
  if (until_failure.load() >= 0 && until_failure.fetch_sub(1) == 0) {
    failed = true;
    return nullptr;
  }
  void* const memory = raw(size > 0 ? size : 1, alignment);
  if (memory == nullptr) return nullptr;
  const auto bytes = static_cast<long>(malloc_usable_size(memory));
  const long live = live_bytes.fetch_add(bytes) + bytes;
  long peak = peak_bytes.load();
  while (live > peak && !peak_bytes.compare_exchange_weak(peak, live)) {
  }
  return memory;
}

inline void* allocate_or_throw(std::size_t size, std::size_t alignment) {
  void* const memory = allocate(size, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

inline void release(void* memory) noexcept {
  if (memory == nullptr) return;
  note(deletes);
  live_bytes -= static_cast<long>(malloc_usable_size(memory));
  raw_free(memory);
}

inline constexpr std::size_t kDefault = alignof(std::max_align_t);

}  // namespace fusedmoe::test::allocation

#pragma GCC visibility push(default)  // shared libraries call these, too
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
void __libc_free(void*);

void* malloc(std::size_t size) noexcept {
  fusedmoe::test::allocation::note(fusedmoe::test::allocation::mallocs);
  return __libc_malloc(size);
}
void* calloc(std::size_t count, std::size_t size) noexcept {
  fusedmoe::test::allocation::note(fusedmoe::test::allocation::mallocs);
  return __libc_calloc(count, size);
}
void* realloc(void* memory, std::size_t size) noexcept {
  fusedmoe::test::allocation::note(fusedmoe::test::allocation::mallocs);
  return __libc_realloc(memory, size);
}
void* memalign(std::size_t alignment, std::size_t size) noexcept {
  fusedmoe::test::allocation::note(fusedmoe::test::allocation::mallocs);
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(std::size_t alignment, std::size_t size) noexcept {
  return memalign(alignment, size);
}
int posix_memalign(void** memory, std::size_t alignment, std::size_t size) noexcept {
  *memory = memalign(alignment, size);
  return *memory != nullptr ? 0 : 12;
}
void free(void* memory) noexcept {
  if (memory != nullptr) fusedmoe::test::allocation::note(fusedmoe::test::allocation::frees);
  __libc_free(memory);
}
void* mmap(void* address, std::size_t size, int protection, int flags, int fd,
           off_t offset) noexcept {
  fusedmoe::test::allocation::note(fusedmoe::test::allocation::maps);
  const long result = syscall(SYS_mmap, address, size, protection, flags, fd, offset);
  if (result != -1) fusedmoe::test::allocation::mapped_bytes += static_cast<long>(size);
  return reinterpret_cast<void*>(result);
}
int munmap(void* address, std::size_t size) noexcept {
  fusedmoe::test::allocation::note(fusedmoe::test::allocation::maps);
  fusedmoe::test::allocation::mapped_bytes -= static_cast<long>(size);
  return static_cast<int>(syscall(SYS_munmap, address, size));
}
int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                   void* argument) noexcept {
  fusedmoe::test::allocation::note(fusedmoe::test::allocation::threads);
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto next = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return next(thread, attributes, start, argument);
}
}  // extern "C"
#pragma GCC visibility pop

inline void* fusedmoe::test::allocation::raw(std::size_t size, std::size_t alignment) noexcept {
  return alignment <= kDefault ? __libc_malloc(size) : __libc_memalign(alignment, size);
}
inline void fusedmoe::test::allocation::raw_free(void* memory) noexcept { __libc_free(memory); }

namespace fta = fusedmoe::test::allocation;
// The array forms forward to these; so do the sized forms of delete.
void* operator new(std::size_t size) { return fta::allocate_or_throw(size, fta::kDefault); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return fta::allocate(size, fta::kDefault);
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  return fta::allocate_or_throw(size, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return fta::allocate(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { fta::release(memory); }
void operator delete(void* memory, std::size_t) noexcept { fta::release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { fta::release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { fta::release(memory); }
