// The quantization_config that the compressed-tensors package writes.
#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

#include "checkpoint/json_value.h"
#include "checkpoint/quant_config.h"
#include "checkpoint/text.h"

namespace fusedmoe::checkpoint {
namespace {

struct FormatRow {
  std::string_view format;
  std::string_view type;
  std::int64_t bits;
  std::string_view strategy;
  LayoutId layout;
};
constexpr FormatRow kFormats[] = {
    {"float-quantized", "float", 8, "tensor", LayoutId::fp8_tensor},
    {"float-quantized", "float", 8, "channel", LayoutId::fp8_channel},
    {"float-quantized", "float", 8, "block", LayoutId::ct_fp8_block},
    {"naive-quantized", "float", 8, "tensor", LayoutId::fp8_tensor},
    {"naive-quantized", "float", 8, "channel", LayoutId::fp8_channel},
    {"naive-quantized", "float", 8, "block", LayoutId::ct_fp8_block},
    {"int-quantized", "int", 8, "channel", LayoutId::ct_int8},
    {"int-quantized", "int", 8, "group", LayoutId::ct_int8},
    {"naive-quantized", "int", 8, "channel", LayoutId::ct_int8},
    {"naive-quantized", "int", 8, "group", LayoutId::ct_int8},
    {"pack-quantized", "int", 8, "channel", LayoutId::ct_int8_packed},
    {"pack-quantized", "int", 8, "group", LayoutId::ct_int8_packed},
    {"pack-quantized", "int", 4, "channel", LayoutId::ct_int4_packed},
    {"pack-quantized", "int", 4, "group", LayoutId::ct_int4_packed},
    {"nvfp4-pack-quantized", "float", 4, "tensor_group", LayoutId::ct_nvfp4},
    {"nvfp4-pack-quantized", "float", 4, "group", LayoutId::ct_nvfp4},
    {"mxfp4-pack-quantized", "float", 4, "group", LayoutId::ct_mxfp4},
};

// The major and minor number of "0.13.0".
std::optional<std::pair<int, int>> parse_version(std::string_view text) {
  const char* const end = text.data() + text.size();
  int major = 0;
  const auto [dot, error] = std::from_chars(text.data(), end, major);
  if (error != std::errc() || dot == end || *dot != '.') return std::nullopt;
  int minor = 0;
  if (std::from_chars(dot + 1, end, minor).ec != std::errc()) return std::nullopt;
  return std::pair(major, minor);
}

// compressed-tensors before 0.14 took 2 off the exponents of mxfp4 scales twice, so that what it
// wrote is a quarter of the weights (vllm-project/compressed-tensors#538 and #541). Which of its
// development versions did so cannot be told: refused, not guessed.
void check_mxfp4_writer(const ConfigReader& config, QuantScheme& scheme) {
  const std::optional<std::string> version = config.text({"version"});
  if (!version) {
    scheme.notes.push_back(config.file() +
                           " has no version; compressed-tensors before 0.14 wrote mxfp4 scales "
                           "that are 4 times too small");
    return;
  }
  const auto number = parse_version(*version);
  if (number && *number >= std::pair(0, 14)) return;
  config.fail_unsupported("version is " + quote(*version) +
                          "; mxfp4 scales of compressed-tensors before 0.14 are 4 times too small "
                          "(exponents with bias 125): quantise again with 0.14 or later");
}

void read_block(const ConfigReader& weights, QuantNumbers& numbers) {
  const ConfigReader::Found found = weights.find({"block_structure"});
  if (!found) weights.fail("block_structure", "is missing; strategy block needs it");
  std::vector<std::int64_t> sizes;
  if (const auto* const text = found.value->as<std::string>()) {  // "128x128", in older files
    const std::size_t x = text->find('x');
    std::int64_t n = 0;
    std::int64_t k = 0;
    const char* const begin = text->data();
    if (x != std::string::npos && std::from_chars(begin, begin + x, n).ptr == begin + x &&
        std::from_chars(begin + x + 1, begin + text->size(), k).ptr == begin + text->size()) {
      sizes = {n, k};
    }
  } else {
    sizes = *weights.integers({"block_structure"}, 1, kMaxSize);
  }
  if (sizes.size() != 2 || *std::min_element(sizes.begin(), sizes.end()) < 1 ||
      *std::max_element(sizes.begin(), sizes.end()) > kMaxSize) {
    weights.fail("block_structure", "is " + to_text(*found.value) + "; expected [N, K] of a block");
  }
  numbers.block_n = sizes[0];
  numbers.block_k = sizes[1];
}

void refuse_act_order(const ConfigReader& weights) {
  const ConfigReader::Found found = weights.find({"actorder"});
  if (!found) return;
  const auto* const text = found.value->as<std::string>();
  const auto* const flag = found.value->as<bool>();
  // "weight" (or "static") quantises in another order and stores in the usual one.
  if ((flag != nullptr && !*flag) ||
      (text != nullptr && (*text == "weight" || *text == "static"))) {
    return;
  }
  weights.fail_unsupported("actorder is " + to_text(*found.value) +
                           "; activation order (act-order) is not supported");
}

QuantScheme read_weights(const ConfigReader& weights, const std::string& format) {
  refuse_act_order(weights);
  const std::string type = weights.require_text({"type"});
  const std::int64_t bits = weights.require_integer({"num_bits"}, 1, 64);
  const std::int64_t group = weights.integer({"group_size"}, -1, kMaxSize).value_or(-1);
  // Old files leave it out where the group says it.
  const std::string strategy = weights.text({"strategy"}).value_or(group > 0 ? "group" : "tensor");
  const auto* const row =
      std::find_if(std::begin(kFormats), std::end(kFormats), [&](const FormatRow& candidate) {
        return candidate.format == format && candidate.type == type && candidate.bits == bits &&
               candidate.strategy == strategy;
      });
  if (row == std::end(kFormats)) {
    weights.fail_unsupported("format " + quote(format) + " with type " + quote(type) +
                             ", num_bits " + std::to_string(bits) + " and strategy " +
                             quote(strategy) + " is not read");
  }
  QuantScheme scheme{.layout = &storage_layout(row->layout)};
  const bool is_int = type == "int";
  scheme.numbers.asymmetric = is_int && !weights.boolean({"symmetric"}).value_or(true);
  if (scheme.numbers.asymmetric && bits == 8) {
    weights.fail_unsupported("symmetric is false; int8 is read without zero points only");
  }
  if (weights.boolean({"dynamic"}).value_or(false)) {
    weights.fail_unsupported("dynamic is true; weights have static scales");
  }
  if (strategy == "block") read_block(weights, scheme.numbers);
  if (strategy == "group" || strategy == "tensor_group") {
    if (group == 0) weights.fail("group_size", "is 0; expected -1 or the size of a group");
    const std::int64_t fixed = scheme.layout->group;
    if (fixed != 0 && group != -1 && group != fixed) {
      weights.fail_unsupported("group_size is " + std::to_string(group) + "; supported for " +
                               std::string(scheme.layout->name) + " is " + std::to_string(fixed));
    }
    scheme.numbers.group_size = fixed != 0 || group == -1 ? 0 : group;
  }
  return scheme;
}

}  // namespace

QuantScheme read_compressed_tensors(const ConfigReader& config) {
  if (const JsonValue* const sparsity = config.find({"sparsity_config"}).value) {
    const JsonValue* const name = sparsity->find("format");
    const auto* const text = name == nullptr ? nullptr : name->as<std::string>();
    if (text != nullptr && *text != "dense") {
      config.fail_unsupported("sparsity_config.format is " + quote(*text) +
                              "; only dense weights are read");
    }
  }
  const JsonValue* const groups = config.find({"config_groups"}).value;
  const auto* const members = groups == nullptr ? nullptr : groups->as<JsonObject>();
  if (members == nullptr) config.fail("config_groups", "is missing, or no object");
  std::optional<QuantScheme> result;
  std::string first;
  for (std::size_t i = 0; i < members->keys.size(); ++i) {
    const JsonValue& group = members->values[i];
    const JsonValue* const weights = group.find("weights");
    if (weights == nullptr) continue;  // activations only
    const std::string name = "config_groups." + members->keys[i];
    if (weights->as<JsonObject>() == nullptr) config.fail(name, "weights is no object");
    const ConfigReader outer(group, "", config.file() + ": " + name);
    const std::optional<std::string> own = outer.text({"format"});
    const std::string format = own ? *own : config.require_text({"format"});
    const ConfigReader inner(*weights, "", outer.file() + ".weights");
    const QuantScheme scheme = read_weights(inner, format);
    if (result && !(*result == scheme)) {
      outer.fail_unsupported("quantises otherwise than " + first +
                             "; only checkpoints with one quantisation of weights are read");
    }
    if (!result) first = name;
    result = scheme;
  }
  if (!result) config.fail("config_groups", "has no group with weights");
  if (result->layout == &storage_layout(LayoutId::ct_mxfp4)) check_mxfp4_writer(config, *result);
  return *std::move(result);
}

}  // namespace fusedmoe::checkpoint
