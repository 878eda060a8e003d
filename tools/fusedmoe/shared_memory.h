// Memory that this process and the peers of bench map: no file, no name, gone with the last of
// them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fusedmoe::tool {

class SharedMemory {
 public:
  // Empty. A process that is started later has it open under the same number. Throws out_of_memory.
  SharedMemory();
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // At least that many bytes; what was in it is lost. Throws out_of_memory.
  void reserve(std::size_t bytes);
  // Gives the memory back; whoever still maps it must not touch it.
  void clear();

  int fd() const { return fd_; }
  std::byte* data() const { return data_; }

 private:
  int fd_ = -1;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Offsets of parts that follow each other in such memory, each on a cache line of its own.
class SharedLayout {
 public:
  std::size_t add(std::size_t bytes) {
    const std::size_t offset = bytes_;
    bytes_ += (bytes + 63) / 64 * 64;
    return offset;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_ = 0;
};

}  // namespace fusedmoe::tool
