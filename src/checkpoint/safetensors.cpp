// Implementation of safetensors.h. The header is read by a SAX consumer that knows its schema, so
// that a hostile header is refused at its first wrong value, whatever its size or depth.
#include "checkpoint/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_set>
#include <utility>

#include "checkpoint/text.h"

namespace fusedmoe::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little, "checkpoints are little-endian");

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeader = 100'000'000;  // the limit of the format's own library
constexpr std::size_t kMaxRank = 16;
constexpr std::uint64_t kMaxInt64 = std::numeric_limits<std::int64_t>::max();

std::string range_text(std::uint64_t begin, std::uint64_t end) {
  return "[" + std::to_string(begin) + ", " + std::to_string(end) + ")";
}

class HeaderReader {
 public:
  using Json = nlohmann::json;

  HeaderReader(std::string_view file, SafetensorsContent& content)
      : file_(file), content_(content) {}

  bool null() { return unexpected("null"); }
  bool boolean(bool) { return unexpected("a boolean"); }
  bool number_integer(std::int64_t) { return unexpected("a negative number"); }
  bool number_float(double, const std::string&) {
    return unexpected("a number that is no integer of 64 bits");
  }
  bool number_unsigned(std::uint64_t value) {
    if (where_ != Where::shape && where_ != Where::offsets) return unexpected("a number");
    if (value > kMaxInt64) {
      fail(std::string(where_ == Where::shape ? "shape" : "data_offsets") + " holds " +
           std::to_string(value) + ", beyond 63 bits");
    }
    if (where_ == Where::offsets) {
      if (num_offsets_ == 2) fail("data_offsets has more than two values; expected [begin, end]");
      offsets_[num_offsets_++] = value;
    } else {
      if (tensor_.shape.size() == kMaxRank) {
        fail("shape has more than " + std::to_string(kMaxRank) + " dimensions");
      }
      tensor_.shape.push_back(static_cast<std::int64_t>(value));
    }
    return true;
  }
  bool string(std::string& value) {
    if (where_ == Where::metadata) {
      if (!content_.metadata.emplace(key_, value).second) {
        fail_io(file_, "header: __metadata__ has key " + quote(key_) + " twice");
      }
      return true;
    }
    if (where_ != Where::tensor || key_ != "dtype") return unexpected("a string");
    const std::optional<TensorType> type = parse_tensor_type(value);
    if (!type) fail("dtype " + quote(value) + " is not known; expected one as BF16, F16 or F32");
    if (std::exchange(has_type_, true)) fail("dtype stands twice");
    tensor_.type = *type;
    return true;
  }
  bool binary(Json::binary_t&) { return unexpected("binary data"); }

  bool start_object(std::size_t) {
    if (where_ == Where::start) {
      where_ = Where::root;
    } else if (where_ == Where::root && key_ == "__metadata__") {
      if (std::exchange(has_metadata_, true)) fail_io(file_, "header: __metadata__ stands twice");
      where_ = Where::metadata;
    } else if (where_ == Where::root) {
      where_ = Where::tensor;
      tensor_ = {};
      tensor_.name = key_;
      has_type_ = has_shape_ = has_offsets_ = false;
      num_offsets_ = 0;
      if (!names_.insert(key_).second) fail("is listed twice in the header; write the file again");
    } else {
      return unexpected("an object");
    }
    return true;
  }
  bool key(std::string& name) {
    key_ = std::move(name);
    if (where_ == Where::tensor && key_ != "dtype" && key_ != "shape" && key_ != "data_offsets") {
      fail("has key " + quote(key_) + "; expected dtype, shape and data_offsets");
    }
    return true;
  }
  bool end_object() {
    if (where_ == Where::tensor) finish_tensor();
    where_ = where_ == Where::root ? Where::end : Where::root;
    return true;
  }
  bool start_array(std::size_t) {
    if (where_ == Where::tensor && key_ == "shape") {
      if (std::exchange(has_shape_, true)) fail("shape stands twice");
      where_ = Where::shape;
    } else if (where_ == Where::tensor && key_ == "data_offsets") {
      if (std::exchange(has_offsets_, true)) fail("data_offsets stands twice");
      where_ = Where::offsets;
    } else {
      return unexpected("an array");
    }
    return true;
  }
  bool end_array() {
    where_ = Where::tensor;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const Json::exception& error) {
    fail_io(file_, "header is not valid JSON in UTF-8 at offset " +
                       std::to_string(kLengthBytes + position) + ": " +
                       printable_ascii(error.what()) + "; fetch the file again");
  }

 private:
  enum class Where { start, root, metadata, tensor, shape, offsets, end };

  [[noreturn]] void fail(const std::string& text) const {
    fail_io(file_, "tensor " + quote(tensor_.name) + ": " + text);
  }

  bool unexpected(const char* what) const {
    switch (where_) {
      case Where::metadata:
        fail_io(file_, "header: __metadata__ key " + quote(key_) + " holds " + what +
                           "; expected a string");
      case Where::tensor:
        fail("key " + quote(key_) + " holds " + what + "; expected dtype as a string, shape and " +
             "data_offsets as arrays");
      case Where::shape:
        fail(std::string("shape holds ") + what + "; expected sizes");
      case Where::offsets:
        fail(std::string("data_offsets holds ") + what + "; expected offsets");
      case Where::root:
        fail_io(file_, "header: key " + quote(key_) + " holds " + what +
                           "; expected an object with dtype, shape and data_offsets");
      default:
        fail_io(file_, std::string("header holds ") + what + "; expected an object");
    }
  }

  void finish_tensor() {
    if (!has_type_) fail("has no dtype");
    if (!has_shape_) fail("has no shape");
    if (!has_offsets_ || num_offsets_ != 2) fail("has no data_offsets [begin, end]");
    const auto [begin, end] = std::pair(offsets_[0], offsets_[1]);
    if (begin > end) {
      fail("data_offsets " + range_text(begin, end) + " end before they begin");
    }
    const std::uint64_t span = end - begin;
    const std::uint64_t bytes = bytes_of_shape();
    if (bytes != span) {
      fail(std::string("dtype ") + to_string(tensor_.type) + " with shape " +
           shape_text(tensor_.shape) + " takes " + std::to_string(bytes) +
           " bytes, but its data_offsets " + range_text(begin, end) + " span " +
           std::to_string(span));
    }
    tensor_.bytes = static_cast<std::int64_t>(span);
    tensor_.offset = static_cast<std::int64_t>(begin);  // from the data's start, for now
    tensor_.file = file_;
    content_.tensors.push_back(std::move(tensor_));
  }

  std::uint64_t bytes_of_shape() const {
    const bool empty =
        std::find(tensor_.shape.begin(), tensor_.shape.end(), 0) != tensor_.shape.end();
    if (empty) return 0;
    auto bits = static_cast<std::uint64_t>(bits_per_element(tensor_.type));
    for (const std::int64_t size : tensor_.shape) {
      if (__builtin_mul_overflow(bits, static_cast<std::uint64_t>(size), &bits)) {
        fail("shape " + shape_text(tensor_.shape) + " has more elements than 64 bits can count");
      }
    }
    if (bits % 8 != 0) {
      fail("shape " + shape_text(tensor_.shape) + " of dtype " + to_string(tensor_.type) +
           " does not fill whole bytes");
    }
    return bits / 8;
  }

  std::string_view file_;
  SafetensorsContent& content_;
  Where where_ = Where::start;
  std::string key_;
  std::unordered_set<std::string> names_;
  Tensor tensor_;
  bool has_metadata_ = false;
  bool has_type_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
  std::size_t num_offsets_ = 0;
  std::uint64_t offsets_[2] = {};
};

// The length of the JSON text, checked against the file.
std::uint64_t header_length(std::span<const std::byte> bytes, std::string_view file) {
  const std::string size = std::to_string(bytes.size());
  if (bytes.size() < kLengthBytes) {
    fail_io(file, "file size " + size + " is less than the 8 bytes of the header length");
  }
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), kLengthBytes);
  if (length > bytes.size() - kLengthBytes) {
    fail_io(file, "header length " + std::to_string(length) +
                      " at offset 0 does not fit file size " + size +
                      "; the file is cut short or no safetensors file");
  }
  if (length > kMaxHeader) {
    fail_io(file, "header length " + std::to_string(length) +
                      " at offset 0 is beyond the limit of " + std::to_string(kMaxHeader));
  }
  return length;
}

// Sorts by offset; every byte of the data belongs to exactly one tensor.
void check_coverage(std::vector<Tensor>& tensors, std::uint64_t data_start, std::uint64_t data_size,
                    std::string_view file) {
  std::sort(tensors.begin(), tensors.end(), [](const Tensor& a, const Tensor& b) {
    return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
  });
  std::uint64_t covered = 0;
  const Tensor* before = nullptr;
  for (const Tensor& tensor : tensors) {
    const auto begin = static_cast<std::uint64_t>(tensor.offset);
    const std::uint64_t end = begin + static_cast<std::uint64_t>(tensor.bytes);
    const auto fail = [&](const std::string& text) {
      fail_io(file, "tensor " + quote(tensor.name) + ": data_offsets " + range_text(begin, end) +
                        " (from file offset " + std::to_string(data_start) + ") " + text);
    };
    if (end > data_size) {
      fail("end beyond the data's " + std::to_string(data_size) + " bytes (file size " +
           std::to_string(data_start + data_size) + "); the file is cut short");
    }
    if (begin < covered) {
      fail("overlap tensor " + quote(before->name) + ", which ends at offset " +
           std::to_string(covered));
    }
    if (begin > covered) {
      fail("leave bytes at offsets " + range_text(covered, begin) + " that belong to no tensor");
    }
    covered = end;
    before = &tensor;
  }
  if (covered != data_size) {
    fail_io(file, "bytes at file offsets " +
                      range_text(data_start + covered, data_start + data_size) +
                      " belong to no tensor");
  }
}

}  // namespace

SafetensorsContent parse_safetensors(std::span<const std::byte> bytes, std::string_view file) {
  const std::uint64_t length = header_length(bytes, file);
  const auto* const text = reinterpret_cast<const char*>(bytes.data()) + kLengthBytes;
  if (length == 0 || text[0] != '{') {
    fail_io(file, "header at offset 8 does not begin with '{'; no safetensors file");
  }
  // The parser takes a NUL byte for the end of its input and would not look at what follows.
  if (std::memchr(text, 0, length) != nullptr) {
    fail_io(file, "header is not valid JSON: it has a NUL byte; fetch the file again");
  }
  SafetensorsContent content;
  HeaderReader reader(file, content);
  if (!nlohmann::json::sax_parse(text, text + length, &reader)) {
    fail_io(file, "header is not valid JSON");
  }
  const std::uint64_t data_start = kLengthBytes + length;
  check_coverage(content.tensors, data_start, bytes.size() - data_start, file);
  for (Tensor& tensor : content.tensors) {
    tensor.offset += static_cast<std::int64_t>(data_start);
    tensor.data = bytes.data() + tensor.offset;
  }
  return content;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : file_(path), content_(parse_safetensors(file_.bytes(), file_.path())) {
  by_name_.reserve(content_.tensors.size());
  for (const Tensor& tensor : content_.tensors) by_name_.emplace(tensor.name, &tensor);
}

std::vector<std::string_view> SafetensorsFile::names() const {
  std::vector<std::string_view> result;
  result.reserve(content_.tensors.size());
  for (const Tensor& tensor : content_.tensors) result.emplace_back(tensor.name);
  return result;
}

const Tensor* SafetensorsFile::find(std::string_view name) {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

}  // namespace fusedmoe::checkpoint
