// Implementation of config_reader.h.
#include "checkpoint/config_reader.h"

#include <cmath>
#include <utility>

#include "checkpoint/text.h"

namespace fusedmoe::checkpoint {

ConfigReader::ConfigReader(const JsonValue& root, std::string_view section, std::string_view file)
    : root_(root), section_name_(section), file_(file) {
  if (section.empty()) return;
  section_ = root.find(section);
  if (section_ == nullptr) {
    fail(section, "is missing; expected an object");
  }
  if (section_->as<JsonObject>() == nullptr) {
    fail(section, "is " + to_text(*section_) + "; expected an object");
  }
}

void ConfigReader::fail(std::string_view key, const std::string& text) const {
  fail_io(file_, std::string(key) + " " + text);
}

void ConfigReader::fail_unsupported(const std::string& text) const {
  throw Error(ErrorCode::unsupported, file_ + ": " + text);
}

void ConfigReader::fail_missing(Keys keys) const {
  std::string names;
  for (const std::string_view key : keys.names())
    (names += names.empty() ? "" : " or ").append(key);
  if (section_ != nullptr) names += " (at the top level or in " + section_name_ + ")";
  fail_io(file_, "key " + names + " is missing; add it as the model's publisher gives it");
}

ConfigReader::Found ConfigReader::find(Keys keys) const {
  Found found;
  for (const JsonValue* const object : {&root_, section_}) {
    if (object == nullptr) continue;
    for (const std::string_view key : keys.names()) {
      const JsonValue* const value = object->find(key);
      if (value == nullptr) continue;
      std::string name = (object == section_ ? section_name_ + "." : std::string()).append(key);
      if (!found) {
        found = {value, std::move(name)};
      } else if (!(*found.value == *value)) {
        fail(found.key, "is " + to_text(*found.value) + ", but " + name + " is " + to_text(*value) +
                            "; they say the same thing and must agree");
      }
    }
  }
  return found;
}

std::int64_t ConfigReader::checked_integer(const JsonValue& value, std::string_view key,
                                           std::int64_t min, std::int64_t max) const {
  const auto* const number = value.as<std::int64_t>();
  if (number == nullptr || *number < min || *number > max) {
    fail(key, "is " + to_text(value) + "; expected an integer from " + std::to_string(min) +
                  " to " + std::to_string(max));
  }
  return *number;
}

std::optional<std::int64_t> ConfigReader::integer(Keys keys, std::int64_t min,
                                                  std::int64_t max) const {
  const Found found = find(keys);
  if (!found) return std::nullopt;
  return checked_integer(*found.value, found.key, min, max);
}

std::int64_t ConfigReader::require_integer(Keys keys, std::int64_t min, std::int64_t max) const {
  const std::optional<std::int64_t> value = integer(keys, min, max);
  if (!value) fail_missing(keys);
  return *value;
}

std::optional<double> ConfigReader::positive_number(Keys keys) const {
  const Found found = find(keys);
  if (!found) return std::nullopt;
  double number = 0;
  if (const auto* const integer = found.value->as<std::int64_t>()) {
    number = static_cast<double>(*integer);
  } else if (const auto* const real = found.value->as<double>()) {
    number = *real;
  }
  // float is what takes it in the end.
  if (!(number > 0) || !std::isfinite(static_cast<float>(number))) {
    fail(found.key, "is " + to_text(*found.value) + "; expected a finite number above 0");
  }
  return number;
}

double ConfigReader::require_positive_number(Keys keys) const {
  const std::optional<double> value = positive_number(keys);
  if (!value) fail_missing(keys);
  return *value;
}

std::optional<bool> ConfigReader::boolean(Keys keys) const {
  const Found found = find(keys);
  if (!found) return std::nullopt;
  const auto* const flag = found.value->as<bool>();
  if (flag == nullptr) fail(found.key, "is " + to_text(*found.value) + "; expected true or false");
  return *flag;
}

std::optional<std::string> ConfigReader::text(Keys keys) const {
  const Found found = find(keys);
  if (!found) return std::nullopt;
  const auto* const string = found.value->as<std::string>();
  if (string == nullptr) fail(found.key, "is " + to_text(*found.value) + "; expected a string");
  return *string;
}

std::string ConfigReader::require_text(Keys keys) const {
  std::optional<std::string> value = text(keys);
  if (!value) fail_missing(keys);
  return *std::move(value);
}

std::optional<std::vector<std::int64_t>> ConfigReader::integers(Keys keys, std::int64_t min,
                                                                std::int64_t max) const {
  const Found found = find(keys);
  if (!found) return std::nullopt;
  const auto* const array = found.value->as<JsonArray>();
  if (array == nullptr) {
    fail(found.key, "is " + to_text(*found.value) + "; expected a list of integers");
  }
  std::vector<std::int64_t> result;
  result.reserve(array->size());
  for (const JsonValue& element : *array) {
    result.push_back(checked_integer(element, found.key, min, max));
  }
  return result;
}

std::vector<std::int64_t> ConfigReader::integer_by_layer(Keys keys, std::int64_t min,
                                                         std::int64_t max,
                                                         std::int64_t num_layers) const {
  const Found found = find(keys);
  if (!found) fail_missing(keys);
  const auto count = static_cast<std::size_t>(num_layers);
  if (found.value->as<JsonArray>() == nullptr) {
    return std::vector<std::int64_t>(count, checked_integer(*found.value, found.key, min, max));
  }
  std::vector<std::int64_t> result = *integers(keys, min, max);
  if (result.size() != count) {
    fail(found.key, "lists " + std::to_string(result.size()) + " values; expected one for " +
                        "each of the " + std::to_string(num_layers) + " layers");
  }
  return result;
}

}  // namespace fusedmoe::checkpoint
