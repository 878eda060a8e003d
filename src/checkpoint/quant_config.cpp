// Implementation of quant_config.h.
#include "checkpoint/quant_config.h"

#include <algorithm>
#include <cctype>
#include <optional>
#include <string_view>

#include "checkpoint/json_value.h"
#include "checkpoint/mapped_file.h"
#include "checkpoint/text.h"

namespace fusedmoe::checkpoint {
namespace {

constexpr std::size_t kMaxConfigBytes = 16'000'000;
constexpr std::string_view kExceptions[] = {"modules_to_not_convert", "ignored_layers", "ignore",
                                            "exclude_modules"};

bool lists_something(const ConfigReader& config) {
  for (const std::string_view key : kExceptions) {
    const ConfigReader::Found found = config.find({key});
    if (!found) continue;
    const auto* const list = found.value->as<JsonArray>();
    if (list == nullptr) config.fail(key, "is " + to_text(*found.value) + "; expected a list");
    if (!list->empty()) return true;
  }
  return false;
}

void expect_integer(const ConfigReader& config, std::string_view key, std::int64_t due) {
  const std::int64_t value = config.require_integer({key}, -1, kMaxSize);
  if (value == due) return;
  config.fail_unsupported(std::string(key) + " is " + std::to_string(value) + "; supported is " +
                          std::to_string(due));
}

std::string lower_case(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

void expect_one_of(const ConfigReader& config, std::string_view key, const std::string& value,
                   std::initializer_list<std::string_view> supported) {
  if (std::find(supported.begin(), supported.end(), value) != supported.end()) return;
  std::string list;
  for (const std::string_view word : supported) (list += list.empty() ? "" : ", ").append(word);
  config.fail_unsupported(std::string(key) + " is " + quote(value) + "; supported: " + list);
}

// -1 says that a group is a row; 0 here.
std::int64_t read_group_size(const ConfigReader& config) {
  const std::int64_t group = config.require_integer({"group_size"}, -1, kMaxSize);
  if (group == 0) config.fail("group_size", "is 0; expected -1 or the size of a group");
  return group == -1 ? 0 : group;
}

QuantScheme read_fp8(const ConfigReader& config) {
  QuantScheme scheme;
  const std::string format = config.text({"fmt"}).value_or("e4m3");
  expect_one_of(config, "fmt", format, {"e4m3", "float8_e4m3fn", "e5m2", "float8_e5m2"});
  const auto block = config.integers({"weight_block_size"}, 1, kMaxSize);
  if (!block) {
    scheme.layout = &storage_layout(LayoutId::fp8_tensor);
    return scheme;
  }
  if (block->size() != 2) {
    config.fail("weight_block_size",
                "has " + std::to_string(block->size()) + " values; expected 2, along N and K");
  }
  scheme.layout = &storage_layout(LayoutId::fp8_block);
  scheme.numbers.block_n = (*block)[0];
  scheme.numbers.block_k = (*block)[1];
  return scheme;
}

QuantScheme read_gptq(const ConfigReader& config) {
  QuantScheme scheme{.layout = &storage_layout(LayoutId::gptq)};
  expect_integer(config, "bits", 4);
  scheme.numbers.group_size = read_group_size(config);
  scheme.numbers.asymmetric = true;  // there are always zero points
  const std::string format = config.text({"checkpoint_format", "format"}).value_or("gptq");
  expect_one_of(config, "checkpoint_format", format, {"gptq", "gptq_v2"});
  expect_one_of(config, "pack_dtype", config.text({"pack_dtype"}).value_or("int32"), {"int32"});
  // Files of the first format store z - 1.
  scheme.numbers.zero_offset = format == "gptq" ? 1 : 0;
  scheme.numbers.may_store_largest_zero =
      format == "gptq" && !config.boolean({"sym"}).value_or(false);
  if (config.boolean({"is_marlin_format"}).value_or(false)) {
    config.fail_unsupported("is_marlin_format is true; that order of weights is not read");
  }
  if (const JsonValue* const dynamic = config.find({"dynamic"}).value) {
    const auto* const rules = dynamic->as<JsonObject>();
    if (rules == nullptr) {
      // false: none.
      if (dynamic->as<bool>() == nullptr) config.fail("dynamic", "is no object");
    } else {
      for (const std::string& rule : rules->keys) {
        if (!rule.starts_with("-:")) {
          config.fail_unsupported("dynamic has rule " + quote(rule) +
                                  "; only rules that leave modules out (-:) are read");
        }
        scheme.lists_exceptions = true;
      }
    }
  }
  return scheme;
}

QuantScheme read_awq(const ConfigReader& config) {
  QuantScheme scheme{.layout = &storage_layout(LayoutId::awq)};
  expect_integer(config, "bits", 4);
  scheme.numbers.group_size = read_group_size(config);
  scheme.numbers.asymmetric = true;
  expect_one_of(config, "version", lower_case(config.text({"version"}).value_or("gemm")), {"gemm"});
  if (!config.boolean({"zero_point"}).value_or(true)) {
    config.fail_unsupported("zero_point is false; only AWQ with zero points is read");
  }
  return scheme;
}

QuantScheme read_mxfp4(const ConfigReader&) {
  return {.layout = &storage_layout(LayoutId::gpt_oss_mxfp4)};
}

// The settings stand at the top, or in an object "quantization".
QuantScheme read_modelopt(const ConfigReader& config) {
  if (const JsonValue* const inner = config.find({"quantization"}).value) {
    return read_modelopt(ConfigReader(*inner, "", config.file() + ": quantization"));
  }
  QuantScheme scheme;
  const std::string algorithm = config.require_text({"quant_algo"});
  expect_one_of(config, "quant_algo", algorithm, {"NVFP4", "FP8"});
  const bool nvfp4 = algorithm == "NVFP4";
  scheme.layout = &storage_layout(nvfp4 ? LayoutId::modelopt_nvfp4 : LayoutId::fp8_tensor);
  if (nvfp4 && config.find({"group_size"})) expect_integer(config, "group_size", 16);
  scheme.lists_exceptions = lists_something(config);
  const JsonValue* const groups = config.find({"config_groups"}).value;
  const auto* const members = groups == nullptr ? nullptr : groups->as<JsonObject>();
  if (!nvfp4 || members == nullptr) return scheme;
  for (std::size_t i = 0; i < members->keys.size(); ++i) {
    const JsonValue* const weights = members->values[i].find("weights");
    if (weights == nullptr || weights->as<JsonObject>() == nullptr) continue;
    const ConfigReader group(*weights, "",
                             config.file() + ": config_groups." + members->keys[i] + ".weights");
    expect_integer(group, "num_bits", 4);
    expect_integer(group, "group_size", 16);
  }
  return scheme;
}

struct MethodRow {
  std::string_view name;
  QuantScheme (*read)(const ConfigReader&);
};
constexpr MethodRow kMethods[] = {
    {"fp8", &read_fp8},
    {"compressed-tensors", &read_compressed_tensors},
    {"gptq", &read_gptq},
    {"awq", &read_awq},
    {"mxfp4", &read_mxfp4},
    {"modelopt", &read_modelopt},
    {"modelopt_fp4", &read_modelopt},
};

}  // namespace

bool operator==(const QuantScheme& a, const QuantScheme& b) {
  return a.layout == b.layout && a.numbers.group_size == b.numbers.group_size &&
         a.numbers.block_n == b.numbers.block_n && a.numbers.block_k == b.numbers.block_k &&
         a.numbers.asymmetric == b.numbers.asymmetric &&
         a.numbers.zero_offset == b.numbers.zero_offset;
}

QuantScheme read_quant_scheme(const ConfigReader& config) {
  const ConfigReader::Found found = config.find({"quantization_config", "compression_config"});
  if (!found) return {};
  if (found.value->as<JsonObject>() == nullptr) {
    config.fail(found.key, "is " + to_text(*found.value) + "; expected an object");
  }
  const ConfigReader inner(*found.value, "", config.file() + ": " + found.key);
  const std::string method = inner.require_text({"quant_method"});
  for (const MethodRow& row : kMethods) {
    if (row.name != method) continue;
    QuantScheme scheme = row.read(inner);
    scheme.lists_exceptions = scheme.lists_exceptions || lists_something(inner);
    return scheme;
  }
  std::string known;
  for (const MethodRow& row : kMethods) (known += known.empty() ? "" : ", ").append(row.name);
  inner.fail_unsupported("the checkpoint is quantised by quant_method " + quote(method) +
                         ", which is not read; read are " + known);
}

void merge_modelopt_file(const std::filesystem::path& path, QuantScheme& scheme) {
  const std::string file = path.string();
  const JsonValue root = parse_json(read_text_file(path, kMaxConfigBytes), file);
  const ConfigReader config(root, "quantization", file);
  const ConfigReader inner(*root.find("quantization"), "", file + ": quantization");
  const QuantScheme here = read_modelopt(inner);
  if (scheme.layout == nullptr) {
    scheme = here;
  } else if (scheme.layout != here.layout) {
    inner.fail("quant_algo", "says " + std::string(here.layout->name) + ", but config.json says " +
                                 std::string(scheme.layout->name) + "; they must agree");
  }
  scheme.lists_exceptions = scheme.lists_exceptions || here.lists_exceptions;
}

}  // namespace fusedmoe::checkpoint
