// A JSON document as plain values, with what configs need and parsers leave open: duplicate keys
// are errors, depth is limited, and destroying a value allocates nothing. nlohmann::json reads it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace fusedmoe::checkpoint {

struct JsonValue;
using JsonArray = std::vector<JsonValue>;
// In the order of the file; as many keys as values.
struct JsonObject {
  std::vector<std::string> keys;
  std::vector<JsonValue> values;
};

struct JsonValue {
  // Integers that need more than 63 bits are held as double, as JSON's own numbers are.
  std::variant<std::monostate, bool, std::int64_t, double, std::string, JsonArray, JsonObject> data;

  template <typename T>
  const T* as() const noexcept {
    return std::get_if<T>(&data);
  }
  bool is_null() const noexcept { return data.index() == 0; }
  // The member of an object; null when this is no object, has no such key, or the value is null.
  const JsonValue* find(std::string_view key) const noexcept;
};

bool operator==(const JsonObject& a, const JsonObject& b);
bool operator==(const JsonValue& a, const JsonValue& b);

// As it would stand in a file, shortened: for messages.
std::string to_text(const JsonValue& value);

// Throws Error{io} naming `file` and the byte where it stops being JSON. NaN, Infinity and
// -Infinity, which Python writes into configs although JSON has no such words, become "".
JsonValue parse_json(std::string_view text, std::string_view file);

}  // namespace fusedmoe::checkpoint
