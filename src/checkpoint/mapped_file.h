// A whole file mapped read-only, and the two other things that are asked of a file system. Pages
// of a mapped file are read when they are touched, never all at once.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace fusedmoe::checkpoint {

class MappedFile {
 public:
  // Throws Error{io} when the path is missing, unreadable, empty, or no regular file.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const noexcept { return path_; }
  std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// The whole of a small text file. Throws Error{io} as above, and beyond max_bytes.
std::string read_text_file(const std::filesystem::path& path, std::size_t max_bytes);

// The entries of a folder, sorted. Throws Error{io}.
std::vector<std::filesystem::path> list_folder(const std::filesystem::path& folder);

}  // namespace fusedmoe::checkpoint
