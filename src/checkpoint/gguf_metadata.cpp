// Implementation of gguf_metadata.h.
#include "checkpoint/gguf_metadata.h"

#include <limits>
#include <string>
#include <unordered_set>
#include <utility>

#include "checkpoint/text.h"

namespace fusedmoe::checkpoint {
namespace {

// Longer arrays are vocabularies; one value for each layer is what a reader looks for.
constexpr std::uint64_t kMaxKeptValues = 10'000;

enum class ValueType : std::uint32_t {
  u8 = 0,
  i8,
  u16,
  i16,
  u32,
  i32,
  f32,
  boolean,
  string,
  array,
  u64,
  i64,
  f64,
};

// 0 for what has no fixed size.
std::uint64_t bytes_of(ValueType type) {
  switch (type) {
    case ValueType::u8:
    case ValueType::i8:
    case ValueType::boolean:
      return 1;
    case ValueType::u16:
    case ValueType::i16:
      return 2;
    case ValueType::u32:
    case ValueType::i32:
    case ValueType::f32:
      return 4;
    case ValueType::u64:
    case ValueType::i64:
    case ValueType::f64:
      return 8;
    default:
      return 0;
  }
}

class MetadataReader {
 public:
  explicit MetadataReader(GgufCursor& cursor) : cursor_(cursor) {}

  JsonValue read(std::uint64_t count) {
    JsonObject object;
    std::unordered_set<std::string_view> keys;
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::string_view key = cursor_.string("a metadata key");
      what_ = "metadata key '" + printable_ascii(key) + "'";
      if (!keys.insert(key).second) cursor_.fail(what_ + " stands twice; keep one of them");
      const ValueType type = read_type();
      JsonValue value = type == ValueType::array ? read_array() : read_scalar(type);
      if (value.is_null()) continue;
      object.keys.emplace_back(key);
      object.values.push_back(std::move(value));
    }
    return {std::move(object)};
  }

 private:
  ValueType read_type() {
    const std::uint64_t at = cursor_.offset();
    const auto type = cursor_.number<std::uint32_t>(what_);
    if (type > static_cast<std::uint32_t>(ValueType::f64)) {
      cursor_.fail(what_ + " has type " + std::to_string(type) + " at offset " +
                   std::to_string(at) + "; expected 0 to 12");
    }
    return static_cast<ValueType>(type);
  }

  JsonValue read_scalar(ValueType type) {
    switch (type) {
      case ValueType::u8:
        return integer<std::uint8_t>();
      case ValueType::i8:
        return integer<std::int8_t>();
      case ValueType::u16:
        return integer<std::uint16_t>();
      case ValueType::i16:
        return integer<std::int16_t>();
      case ValueType::u32:
        return integer<std::uint32_t>();
      case ValueType::i32:
        return integer<std::int32_t>();
      case ValueType::i64:
        return integer<std::int64_t>();
      case ValueType::u64: {
        const auto value = cursor_.number<std::uint64_t>(what_);
        // Beyond 63 bits as double, as in JSON: no size that anything accepts.
        if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
          return {static_cast<double>(value)};
        }
        return {static_cast<std::int64_t>(value)};
      }
      case ValueType::f32:
        return {static_cast<double>(cursor_.number<float>(what_))};
      case ValueType::f64:
        return {cursor_.number<double>(what_)};
      case ValueType::boolean: {
        const std::uint64_t at = cursor_.offset();
        const auto value = cursor_.number<std::uint8_t>(what_);
        if (value > 1) {
          cursor_.fail(what_ + " is " + std::to_string(value) + " at offset " + std::to_string(at) +
                       "; expected a boolean, 0 or 1");
        }
        return {value == 1};
      }
      default:
        return {std::string(cursor_.string(what_))};
    }
  }

  template <typename T>
  JsonValue integer() {
    return {static_cast<std::int64_t>(cursor_.number<T>(what_))};
  }

  // Null for an array that is not kept.
  JsonValue read_array() {
    const ValueType type = read_type();
    const std::uint64_t at = cursor_.offset();
    const auto count = cursor_.number<std::uint64_t>(what_);
    if (type == ValueType::array)
      cursor_.fail(what_ + " is an array of arrays; no reader has them");
    const std::uint64_t bytes = bytes_of(type);
    const std::uint64_t least = bytes == 0 ? sizeof(std::uint64_t) : bytes;  // a string's length
    if (count > cursor_.remaining() / least) {
      cursor_.fail(what_ + " has " + std::to_string(count) + " values at offset " +
                   std::to_string(at) + ", more than the file can hold");
    }
    if (type == ValueType::string) {
      for (std::uint64_t i = 0; i < count; ++i) cursor_.string(what_);
      return {};
    }
    if (count > kMaxKeptValues) {
      cursor_.skip(count * bytes, what_);
      return {};
    }
    JsonArray array;
    array.reserve(count);
    for (std::uint64_t i = 0; i < count; ++i) array.push_back(read_scalar(type));
    return {std::move(array)};
  }

  GgufCursor& cursor_;
  std::string what_;
};

}  // namespace

JsonValue read_gguf_metadata(GgufCursor& cursor, std::uint64_t count) {
  return MetadataReader(cursor).read(count);
}

}  // namespace fusedmoe::checkpoint
