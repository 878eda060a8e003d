// Typed look-ups in config.json that name file and key when a value is missing, of another type,
// out of range, or said twice with two values. What the keys mean is in model_config.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/json_value.h"

namespace fusedmoe::checkpoint {

// Sizes beyond this are taken for damage.
inline constexpr std::int64_t kMaxSize = 1'000'000;
inline constexpr std::int64_t kMaxLayers = 10'000;

// Names of one quantity, at least one: families spell it differently. A view, for parameters only.
class Keys {
 public:
  Keys(std::initializer_list<std::string_view> names)  // NOLINT(google-explicit-constructor)
      : names_(names.begin(), names.size()) {}
  template <std::size_t kCount>
  Keys(const std::string_view (&names)[kCount])  // NOLINT(google-explicit-constructor)
      : names_(names) {}

  std::span<const std::string_view> names() const noexcept { return names_; }

 private:
  std::span<const std::string_view> names_;
};

class ConfigReader {
 public:
  // `section`: an object inside the root whose keys stand beside the root's; empty = none. Both
  // arguments must outlive the reader. Throws when the section is missing or no object.
  ConfigReader(const JsonValue& root, std::string_view section, std::string_view file);

  struct Found {
    const JsonValue* value = nullptr;  // null: none of the keys is there
    std::string key = {};              // as it stands in the file

    explicit operator bool() const noexcept { return value != nullptr; }
  };

  // The one value under any of these keys, in the root or the section. Throws Error{io} when two
  // of them differ.
  Found find(Keys keys) const;

  // Throw Error{io} unless the value, when present, has that type and lies in [min, max]; `require`
  // also when it is missing.
  std::optional<std::int64_t> integer(Keys keys, std::int64_t min, std::int64_t max) const;
  std::int64_t require_integer(Keys keys, std::int64_t min, std::int64_t max) const;
  std::optional<double> positive_number(Keys keys) const;
  double require_positive_number(Keys keys) const;
  std::optional<bool> boolean(Keys keys) const;
  std::optional<std::string> text(Keys keys) const;
  std::string require_text(Keys keys) const;
  std::optional<std::vector<std::int64_t>> integers(Keys keys, std::int64_t min,
                                                    std::int64_t max) const;

  // One value, or a list of num_layers values; always returns num_layers of them.
  std::vector<std::int64_t> integer_by_layer(Keys keys, std::int64_t min, std::int64_t max,
                                             std::int64_t num_layers) const;

  const std::string& file() const noexcept { return file_; }
  [[noreturn]] void fail(std::string_view key, const std::string& text) const;
  [[noreturn]] void fail_unsupported(const std::string& text) const;

 private:
  std::int64_t checked_integer(const JsonValue& value, std::string_view key, std::int64_t min,
                               std::int64_t max) const;
  [[noreturn]] void fail_missing(Keys keys) const;

  const JsonValue& root_;
  const JsonValue* section_ = nullptr;
  std::string section_name_;
  std::string file_;
};

}  // namespace fusedmoe::checkpoint
