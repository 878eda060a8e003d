// Memory with an unmapped page directly in front of it or directly behind it: an access one byte
// out of bounds on that side ends the test.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>

namespace fusedmoe::test {

enum class Side { front, back };

class GuardedBuffer {
 public:
  // Behind: data() + bytes is the guard, so its alignment is that of `bytes`.
  GuardedBuffer(std::int64_t bytes, Side side, std::byte fill = std::byte{0xff}) : bytes_(bytes) {
    const std::int64_t page = sysconf(_SC_PAGESIZE);
    const std::int64_t inner = (bytes + page - 1) / page * page;
    mapped_ = static_cast<std::size_t>(inner + 2 * page);
    void* pages = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<std::byte*>(pages);
    if (mprotect(base_ + page, static_cast<std::size_t>(inner), PROT_READ | PROT_WRITE) != 0) {
      throw std::bad_alloc();
    }
    data_ = base_ + page + (side == Side::back ? inner - bytes : 0);
    if (bytes > 0) std::memset(data_, static_cast<int>(fill), static_cast<std::size_t>(bytes));
  }
  GuardedBuffer(const void* from, std::int64_t bytes, Side side) : GuardedBuffer(bytes, side) {
    if (bytes > 0) std::memcpy(data_, from, static_cast<std::size_t>(bytes));
  }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;
  ~GuardedBuffer() { munmap(base_, mapped_); }

  std::byte* data() const { return data_; }
  std::span<std::byte> span() const { return {data_, static_cast<std::size_t>(bytes_)}; }

 private:
  std::int64_t bytes_;
  std::size_t mapped_ = 0;
  std::byte* base_ = nullptr;
  std::byte* data_ = nullptr;
};

}  // namespace fusedmoe::test
