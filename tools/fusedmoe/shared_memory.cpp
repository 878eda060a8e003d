#include "shared_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "fusedmoe/error.h"

namespace fusedmoe::tool {
namespace {

[[noreturn]] void refuse(std::size_t bytes) {
  throw Error(ErrorCode::out_of_memory, "--compare: expected " + std::to_string(bytes) +
                                            " bytes to share with the peers, got none from the "
                                            "system; free some, or take a smaller model");
}

}  // namespace

SharedMemory::SharedMemory() : fd_(memfd_create("fusedmoe_peers", 0)) {
  if (fd_ < 0) refuse(0);
}

SharedMemory::~SharedMemory() {
  clear();
  close(fd_);
}

void SharedMemory::reserve(std::size_t bytes) {
  if (bytes <= bytes_) return;
  if (data_ != nullptr) munmap(data_, bytes_);
  data_ = nullptr;
  bytes_ = 0;
  if (ftruncate(fd_, static_cast<off_t>(bytes)) != 0) refuse(bytes);
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (data == MAP_FAILED) refuse(bytes);
  data_ = static_cast<std::byte*>(data);
  bytes_ = bytes;
}

void SharedMemory::clear() {
  if (data_ != nullptr) munmap(data_, bytes_);
  data_ = nullptr;
  bytes_ = 0;
  (void)!ftruncate(fd_, 0);
}

}  // namespace fusedmoe::tool
