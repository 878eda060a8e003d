// Reads the parts of a GGUF header one after the other, never beyond the file.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/text.h"

namespace fusedmoe::checkpoint {

class GgufCursor {
 public:
  GgufCursor(std::span<const std::byte> bytes, std::string_view file)
      : bytes_(bytes), file_(file) {}

  std::uint64_t offset() const noexcept { return offset_; }
  std::uint64_t remaining() const noexcept { return bytes_.size() - offset_; }
  std::string_view file() const noexcept { return file_; }

  // Throw Error{io}; `what` names what is being read.
  template <typename T>
  T number(std::string_view what) {
    need(sizeof(T), what);
    T value;
    std::memcpy(&value, bytes_.data() + offset_, sizeof value);
    offset_ += sizeof value;
    return value;
  }

  std::string_view string(std::string_view what) {
    const std::uint64_t at = offset_;
    const auto length = number<std::uint64_t>(what);
    if (length > remaining()) {
      fail("string length " + std::to_string(length) + " of " + std::string(what) + " at offset " +
           std::to_string(at) + " goes beyond the end of the file (file size " +
           std::to_string(bytes_.size()) + ")");
    }
    const auto* const begin = reinterpret_cast<const char*>(bytes_.data()) + offset_;
    offset_ += length;
    return {begin, static_cast<std::size_t>(length)};
  }

  void skip(std::uint64_t bytes, std::string_view what) {
    need(bytes, what);
    offset_ += bytes;
  }

  [[noreturn]] void fail(const std::string& text) const { fail_io(file_, text); }

 private:
  void need(std::uint64_t bytes, std::string_view what) const {
    if (bytes <= remaining()) return;
    fail("ends inside " + std::string(what) + " at offset " + std::to_string(offset_) +
         " (file size " + std::to_string(bytes_.size()) + "); fetch the file again");
  }

  std::span<const std::byte> bytes_;
  std::string_view file_;
  std::uint64_t offset_ = 0;
};

}  // namespace fusedmoe::checkpoint
