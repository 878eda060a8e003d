// Implementation of mapped_file.h with POSIX calls.
#include "checkpoint/mapped_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string_view>
#include <system_error>

#include "checkpoint/text.h"

namespace fusedmoe::checkpoint {
namespace {

class Descriptor {
 public:
  // O_NONBLOCK: opening a FIFO must fail below, not wait for a writer.
  explicit Descriptor(const char* path) : value_(::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int value() const noexcept { return value_; }

 private:
  int value_;
};

[[noreturn]] void fail_errno(const std::string& path, const char* what, int error) {
  fail_io(path, std::string(what) + ": " + std::generic_category().message(error));
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path.string()) {
  const Descriptor file(path_.c_str());
  if (file.value() < 0) fail_errno(path_, "cannot be opened", errno);
  struct stat status = {};
  if (::fstat(file.value(), &status) != 0) fail_errno(path_, "cannot be examined", errno);
  if (S_ISDIR(status.st_mode)) fail_io(path_, "is a folder; expected a file");
  if (!S_ISREG(status.st_mode)) fail_io(path_, "is not a regular file; expected one");
  if (status.st_size <= 0) fail_io(path_, "is empty (file size 0); fetch it again");
  size_ = static_cast<std::size_t>(status.st_size);
  void* const address = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.value(), 0);
  if (address == MAP_FAILED) fail_errno(path_, "cannot be mapped", errno);
  data_ = static_cast<const std::byte*>(address);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

std::string read_text_file(const std::filesystem::path& path, std::size_t max_bytes) {
  const MappedFile file(path);
  const std::span<const std::byte> bytes = file.bytes();
  if (bytes.size() > max_bytes) {
    fail_io(file.path(), "file size " + std::to_string(bytes.size()) + " is beyond the limit of " +
                             std::to_string(max_bytes) + " bytes for a file of this kind");
  }
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<std::filesystem::path> list_folder(const std::filesystem::path& folder) {
  // Not directory_iterator: that of GCC 12 ends the process when memory runs out.
  struct Close {
    void operator()(DIR* stream) const noexcept { ::closedir(stream); }
  };
  const std::unique_ptr<DIR, Close> stream(::opendir(folder.c_str()));
  if (stream == nullptr) fail_errno(folder.string(), "cannot be listed", errno);
  std::vector<std::filesystem::path> entries;
  errno = 0;
  while (const dirent* const entry = ::readdir(stream.get())) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") entries.push_back(folder / name);
    errno = 0;
  }
  if (errno != 0) fail_errno(folder.string(), "cannot be listed", errno);
  std::sort(entries.begin(), entries.end());
  return entries;
}

}  // namespace fusedmoe::checkpoint
