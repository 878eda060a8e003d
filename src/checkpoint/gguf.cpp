// Implementation of gguf.h. Source of the layout: the GGUF specification of the ggml project.
#include "checkpoint/gguf.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>
#include <unordered_set>
#include <utility>

#include "checkpoint/gguf_cursor.h"
#include "checkpoint/gguf_metadata.h"
#include "checkpoint/text.h"
#include "fusedmoe/error.h"

namespace fusedmoe::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little, "checkpoints are little-endian");

constexpr std::uint64_t kMaxRank = 4;  // of ggml
constexpr std::uint64_t kDefaultAlignment = 32;
constexpr std::uint64_t kMaxAlignment = 1U << 20U;
// The least that a pair and a tensor take: lengths, types, counts, offsets.
constexpr std::uint64_t kLeastPairBytes = 8 + 4 + 1;
constexpr std::uint64_t kLeastTensorBytes = 8 + 4 + 4 + 8;

[[noreturn]] void fail_unsupported(std::string_view file, const std::string& text) {
  throw Error(ErrorCode::unsupported, std::string(file) + ": " + text);
}

void check_version(GgufCursor& cursor) {
  const auto version = cursor.number<std::uint32_t>("the version");
  if (version == 2 || version == 3) return;
  if (version != 0 && (version & 0xffffU) == 0) {
    fail_unsupported(cursor.file(), "is a big-endian GGUF file; only little-endian ones are read");
  }
  const std::string text =
      "has GGUF version " + std::to_string(version) + " at offset 4; versions 2 and 3 are read";
  if (version == 1) fail_unsupported(cursor.file(), text + ": convert it again");
  fail_unsupported(cursor.file(), text);
}

std::uint64_t read_count(GgufCursor& cursor, std::string_view what, std::uint64_t least_bytes) {
  const std::uint64_t at = cursor.offset();
  const auto count = cursor.number<std::uint64_t>(what);
  if (count > cursor.remaining() / least_bytes) {
    cursor.fail(std::string(what) + " " + std::to_string(count) + " at offset " +
                std::to_string(at) + " is more than a file with " +
                std::to_string(cursor.remaining()) + " further bytes can hold");
  }
  return count;
}

std::uint64_t read_alignment(const JsonValue& metadata, std::string_view file) {
  const JsonValue* const value = metadata.find("general.alignment");
  if (value == nullptr) return kDefaultAlignment;
  const auto* const number = value->as<std::int64_t>();
  if (number == nullptr || *number < 1 || static_cast<std::uint64_t>(*number) > kMaxAlignment ||
      !std::has_single_bit(static_cast<std::uint64_t>(*number))) {
    fail_io(file, "general.alignment is " + to_text(*value) + "; expected a power of two up to " +
                      std::to_string(kMaxAlignment));
  }
  return static_cast<std::uint64_t>(*number);
}

std::uint64_t rounded_up(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// One entry of the list. Its offset is from the data's start, for now.
Tensor read_tensor(GgufCursor& cursor) {
  Tensor tensor;
  const std::string_view name = cursor.string("a tensor name");
  for (const char c : name) {
    if (c > 0x20 && c < 0x7f) continue;
    cursor.fail("tensor '" + printable_ascii(name) +
                "': its name has characters beyond printable "
                "ASCII");
  }
  tensor.name = name;
  const std::string what = "tensor " + quote(name);
  const auto fail = [&](const std::string& text) { cursor.fail(what + ": " + text); };
  const auto rank = cursor.number<std::uint32_t>(what);
  if (rank > kMaxRank) fail("has " + std::to_string(rank) + " dimensions; ggml has at most 4");
  std::uint64_t elements = 1;
  for (std::uint32_t d = 0; d < rank; ++d) {
    const auto size = cursor.number<std::uint64_t>(what);
    if (size > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      fail("shape holds " + std::to_string(size) + ", beyond 63 bits");
    }
    tensor.shape.push_back(static_cast<std::int64_t>(size));
  }
  const bool empty = std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end();
  const std::int64_t row = tensor.shape.empty() ? 1 : tensor.shape.front();
  std::reverse(tensor.shape.begin(), tensor.shape.end());
  for (const std::int64_t size : tensor.shape) {
    if (empty) {
      elements = 0;
    } else if (__builtin_mul_overflow(elements, static_cast<std::uint64_t>(size), &elements)) {
      fail("shape " + shape_text(tensor.shape) + " has more elements than 64 bits can count");
    }
  }
  const auto number = cursor.number<std::uint32_t>(what);
  const std::optional<TensorType> type = ggml_tensor_type(number);
  if (!type) {
    fail_unsupported(cursor.file(),
                     what + " has ggml type " + std::to_string(number) + ", which is not known");
  }
  tensor.type = *type;
  const TypeBlock block = block_of(*type);
  if (row % block.elements != 0) {
    fail("shape " + shape_text(tensor.shape) + " has rows of " + std::to_string(row) +
         " elements, no multiple of the " + std::to_string(block.elements) + " of a " +
         to_string(*type) + " block");
  }
  std::uint64_t bytes = 0;
  if (__builtin_mul_overflow(elements / static_cast<std::uint64_t>(block.elements),
                             static_cast<std::uint64_t>(block.bytes), &bytes) ||
      bytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    fail("shape " + shape_text(tensor.shape) + " takes more bytes than 63 bits can count");
  }
  tensor.bytes = static_cast<std::int64_t>(bytes);
  const auto offset = cursor.number<std::uint64_t>(what);
  if (offset > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    fail("its offset " + std::to_string(offset) + " is beyond 63 bits");
  }
  tensor.offset = static_cast<std::int64_t>(offset);
  tensor.file = cursor.file();
  return tensor;
}

// Sorts by offset; every tensor begins aligned, ends inside the file, and only padding lies
// between.
void place(std::vector<Tensor>& tensors, std::uint64_t data_start, std::uint64_t file_size,
           std::uint64_t alignment, std::string_view file) {
  std::sort(tensors.begin(), tensors.end(), [](const Tensor& a, const Tensor& b) {
    return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
  });
  const std::uint64_t data_size = file_size > data_start ? file_size - data_start : 0;
  std::uint64_t covered = 0;
  const Tensor* before = nullptr;
  for (const Tensor& tensor : tensors) {
    const auto begin = static_cast<std::uint64_t>(tensor.offset);
    const auto bytes = static_cast<std::uint64_t>(tensor.bytes);
    const auto fail = [&](const std::string& text) {
      fail_io(file, "tensor " + quote(tensor.name) + ": offset " + std::to_string(begin) +
                        " (from file offset " + std::to_string(data_start) + ") " + text);
    };
    if (begin % alignment != 0) {
      fail("is no multiple of general.alignment " + std::to_string(alignment));
    }
    if (begin > data_size || bytes > data_size - begin) {
      fail("and its " + std::to_string(bytes) + " bytes, shape " + shape_text(tensor.shape) +
           ", go beyond the end of the file (file size " + std::to_string(file_size) +
           "); the file is cut short");
    }
    if (begin < covered) {
      fail("overlaps tensor " + quote(before->name) + ", which ends at offset " +
           std::to_string(covered));
    }
    if (begin != rounded_up(covered, alignment)) {
      fail("leaves bytes from offset " + std::to_string(covered) + " that belong to no tensor");
    }
    covered = begin + bytes;
    before = &tensor;
  }
  if (data_size > rounded_up(covered, alignment)) {
    fail_io(file, "bytes from file offset " + std::to_string(data_start + covered) +
                      " to the end (file size " + std::to_string(file_size) +
                      ") belong to no tensor");
  }
}

}  // namespace

GgufContent parse_gguf(std::span<const std::byte> bytes, std::string_view file) {
  GgufCursor cursor(bytes, file);
  const auto magic = cursor.number<std::uint32_t>("the magic number");
  if (magic != 0x46554747U) {
    fail_io(file, "does not begin with the magic bytes GGUF; no GGUF file");
  }
  check_version(cursor);
  const std::uint64_t num_tensors = read_count(cursor, "tensor count", kLeastTensorBytes);
  const std::uint64_t num_pairs = read_count(cursor, "metadata count", kLeastPairBytes);
  GgufContent content;
  content.metadata = read_gguf_metadata(cursor, num_pairs);
  const std::uint64_t alignment = read_alignment(content.metadata, file);
  std::unordered_set<std::string> names;
  for (std::uint64_t i = 0; i < num_tensors; ++i) {
    content.tensors.push_back(read_tensor(cursor));
    const std::string& name = content.tensors.back().name;
    if (names.insert(name).second) continue;
    fail_io(file, "tensor " + quote(name) + " is listed twice; write the file again");
  }
  const std::uint64_t data_start = rounded_up(cursor.offset(), alignment);
  place(content.tensors, data_start, bytes.size(), alignment, file);
  for (Tensor& tensor : content.tensors) {
    tensor.offset += static_cast<std::int64_t>(data_start);
    // Without tensors that have bytes, the data may begin behind the file's end.
    tensor.data = tensor.bytes > 0 ? bytes.data() + tensor.offset : bytes.data();
  }
  return content;
}

GgufFile::GgufFile(const std::filesystem::path& path)
    : file_(std::in_place, path),
      location_(file_->path()),
      content_(parse_gguf(file_->bytes(), location_)) {
  index_names();
}

GgufFile::GgufFile(std::span<const std::byte> bytes, std::string location)
    : location_(std::move(location)), content_(parse_gguf(bytes, location_)) {
  index_names();
}

void GgufFile::index_names() {
  by_name_.reserve(content_.tensors.size());
  for (const Tensor& tensor : content_.tensors) by_name_.emplace(tensor.name, &tensor);
}

std::vector<std::string_view> GgufFile::names() const {
  std::vector<std::string_view> result;
  result.reserve(content_.tensors.size());
  for (const Tensor& tensor : content_.tensors) result.emplace_back(tensor.name);
  return result;
}

const Tensor* GgufFile::find(std::string_view name) {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

}  // namespace fusedmoe::checkpoint
