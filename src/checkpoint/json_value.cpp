// Implementation of json_value.h: a SAX consumer, so that limits hold while reading.
#include "checkpoint/json_value.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>

#include "checkpoint/text.h"

namespace fusedmoe::checkpoint {
namespace {

constexpr std::size_t kMaxDepth = 64;
constexpr std::size_t kMaxValues = 4'000'000;

class TreeBuilder {
 public:
  using Json = nlohmann::json;

  TreeBuilder(std::string_view file, JsonValue& root) : file_(file), root_(root) {}

  bool null() { return add({}); }
  bool boolean(bool value) { return add({value}); }
  bool number_integer(std::int64_t value) { return add({value}); }
  bool number_unsigned(std::uint64_t value) {
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return add({static_cast<double>(value)});
    }
    return add({static_cast<std::int64_t>(value)});
  }
  bool number_float(double value, const std::string&) { return add({value}); }
  bool string(std::string& value) { return add({std::move(value)}); }
  bool binary(Json::binary_t&) { return false; }

  bool start_object(std::size_t) { return open({JsonObject()}); }
  bool end_object() { return close(); }
  bool start_array(std::size_t) { return open({JsonArray()}); }
  bool end_array() { return close(); }
  bool key(std::string& name) {
    if (!levels_.back().keys.insert(name).second) {
      fail_io(file_, "key " + quote(name) + " stands twice in one object; remove one of them");
    }
    levels_.back().key = std::move(name);
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const Json::exception& error) {
    fail_io(file_, "not valid JSON at byte " + std::to_string(position) + ": " +
                       printable_ascii(error.what()));
  }

 private:
  struct Level {
    JsonValue value;
    std::string key;
    std::unordered_set<std::string> keys;
  };

  bool add(JsonValue value) {
    if (++num_values_ > kMaxValues) {
      fail_io(file_, "holds more than " + std::to_string(kMaxValues) + " values");
    }
    if (levels_.empty()) {
      root_ = std::move(value);
      return true;
    }
    Level& level = levels_.back();
    if (auto* const array = std::get_if<JsonArray>(&level.value.data)) {
      array->push_back(std::move(value));
    } else {
      auto& object = std::get<JsonObject>(level.value.data);
      object.keys.push_back(std::move(level.key));
      object.values.push_back(std::move(value));
    }
    return true;
  }
  bool open(JsonValue value) {
    if (levels_.size() == kMaxDepth) {
      fail_io(file_, "nested deeper than " + std::to_string(kMaxDepth) + " levels");
    }
    levels_.emplace_back();
    levels_.back().value = std::move(value);
    return true;
  }
  bool close() {
    JsonValue value = std::move(levels_.back().value);
    levels_.pop_back();
    return add(std::move(value));
  }

  std::string_view file_;
  JsonValue& root_;
  std::vector<Level> levels_;
  std::size_t num_values_ = 0;
};

// Replaces the words of Python's json module in place, keeping every byte position: "" and blanks.
void blank_python_numbers(std::string& text) {
  constexpr std::string_view kWords[] = {"-Infinity", "Infinity", "NaN"};
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (in_string && text[i] == '\\') {
      ++i;
    } else if (text[i] == '"') {
      in_string = !in_string;
    } else if (!in_string) {
      for (const std::string_view word : kWords) {
        if (text.compare(i, word.size(), word) != 0) continue;
        text.replace(i, word.size(), word.size(), ' ');
        text.replace(i, 2, "\"\"");
        i += word.size() - 1;
        break;
      }
    }
  }
}

}  // namespace

const JsonValue* JsonValue::find(std::string_view key) const noexcept {
  const auto* const object = as<JsonObject>();
  if (object == nullptr) return nullptr;
  const auto found = std::find(object->keys.begin(), object->keys.end(), key);
  if (found == object->keys.end()) return nullptr;
  const JsonValue& value = object->values[found - object->keys.begin()];
  return value.is_null() ? nullptr : &value;
}

bool operator==(const JsonObject& a, const JsonObject& b) {
  return a.keys == b.keys && a.values == b.values;
}

bool operator==(const JsonValue& a, const JsonValue& b) { return a.data == b.data; }

std::string to_text(const JsonValue& value) {
  if (value.is_null()) return "null";
  if (const auto* const flag = value.as<bool>()) return *flag ? "true" : "false";
  if (const auto* const integer = value.as<std::int64_t>()) return std::to_string(*integer);
  if (const auto* const real = value.as<double>()) {
    char buffer[32];
    std::snprintf(buffer, sizeof buffer, "%.9g", *real);
    return buffer;
  }
  if (const auto* const text = value.as<std::string>()) return quote(*text);
  if (value.as<JsonObject>() != nullptr) return "an object";
  const JsonArray& array = *value.as<JsonArray>();
  std::string out = "[";
  for (std::size_t i = 0; i < std::min<std::size_t>(array.size(), 8); ++i) {
    if (i > 0) out += ", ";
    // One level only: this is for messages about lists of numbers.
    out += array[i].as<JsonArray>() != nullptr ? "[...]" : to_text(array[i]);
  }
  return out + (array.size() > 8 ? ", ...]" : "]");
}

JsonValue parse_json(std::string_view text, std::string_view file) {
  // The parser takes a NUL byte for the end of its input and would not look at what follows.
  if (text.find('\0') != std::string_view::npos) fail_io(file, "not valid JSON: a NUL byte");
  std::string clean(text);
  blank_python_numbers(clean);
  JsonValue root;
  TreeBuilder builder(file, root);
  const char* const begin = clean.data();
  if (!nlohmann::json::sax_parse(begin, begin + clean.size(), &builder)) {
    fail_io(file, "not valid JSON");
  }
  return root;
}

}  // namespace fusedmoe::checkpoint
