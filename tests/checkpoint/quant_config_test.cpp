// What configs say of quantisation: which layout and numbers come of it, and that nothing wrong,
// contradictory or unknown passes.
#include "checkpoint/quant_config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "quantised_files.h"

namespace fusedmoe::checkpoint {
namespace {

using nlohmann::json;

QuantScheme parse(const json& quantization) {
  const JsonValue root = parse_json(json{{"quantization_config", quantization}}.dump(), "c.json");
  return read_quant_scheme(ConfigReader(root, "", "c.json"));
}

void expect_refused(const json& quantization, ErrorCode code, std::vector<std::string> parts) {
  SCOPED_TRACE(quantization.dump());
  parts.emplace_back("c.json");
  expect_error(code, parts, [&] { parse(quantization); });
}

json ct(const std::string& format, const json& weights) {
  return {{"quant_method", "compressed-tensors"},
          {"format", format},
          {"config_groups", {{"group_0", {{"targets", {"Linear"}}, {"weights", weights}}}}}};
}

bool is(const QuantScheme& scheme, LayoutId layout) {
  return scheme.layout == &storage_layout(layout);
}

TEST(QuantConfig, NothingSaid) {
  const JsonValue root = parse_json("{}", "c.json");
  EXPECT_EQ(read_quant_scheme(ConfigReader(root, "", "c.json")).layout, nullptr);
}

TEST(QuantConfig, Methods) {
  expect_refused({{"quant_method", "bitsandbytes"}}, ErrorCode::unsupported,
                 {"'bitsandbytes'", "fp8", "awq", "modelopt"});
  expect_refused(json::object(), ErrorCode::io, {"quant_method", "missing"});
  expect_refused({{"quant_method", 3}}, ErrorCode::io, {"quant_method"});
  expect_refused(json::array(), ErrorCode::io, {"quantization_config", "expected an object"});
  const JsonValue both = parse_json(
      R"({"quantization_config":{"quant_method":"awq"},"compression_config":{"quant_method":"fp8"}})",
      "c.json");
  expect_error(ErrorCode::io, {"quantization_config", "compression_config", "must agree"},
               [&] { read_quant_scheme(ConfigReader(both, "", "c.json")); });
}

TEST(QuantConfig, Fp8) {
  const json block = {{"quant_method", "fp8"}, {"weight_block_size", {64, 128}}};
  EXPECT_TRUE(is(parse(block), LayoutId::fp8_block));
  EXPECT_EQ(parse(block).numbers.block_n, 64);
  EXPECT_EQ(parse(block).numbers.block_k, 128);
  EXPECT_FALSE(parse(block).lists_exceptions);
  EXPECT_TRUE(is(parse({{"quant_method", "fp8"}}), LayoutId::fp8_tensor));
  json config = block;
  config["modules_to_not_convert"] = {"lm_head"};
  EXPECT_TRUE(parse(config).lists_exceptions);
  config["modules_to_not_convert"] = "lm_head";
  expect_refused(config, ErrorCode::io, {"modules_to_not_convert", "expected a list"});
  for (const json& sizes : {json(128), json({128}), json({128, 128, 1}), json({0, 128}),
                            json({128, "128"}), json({128, -1}), json({128.0, 128})}) {
    config = block;
    config["weight_block_size"] = sizes;
    expect_refused(config, ErrorCode::io, {"weight_block_size"});
  }
  config = block;
  config["fmt"] = "e4m3fnuz";
  expect_refused(config, ErrorCode::unsupported, {"fmt", "'e4m3fnuz'"});
}

TEST(QuantConfig, CompressedTensorsFormats) {
  const json channel = {{"num_bits", 8}, {"type", "float"}, {"strategy", "channel"}};
  EXPECT_TRUE(is(parse(ct("float-quantized", channel)), LayoutId::fp8_channel));
  json weights = channel;
  weights["strategy"] = "tensor";
  EXPECT_TRUE(is(parse(ct("float-quantized", weights)), LayoutId::fp8_tensor));
  weights["strategy"] = "block";
  expect_refused(ct("float-quantized", weights), ErrorCode::io, {"block_structure", "missing"});
  for (const json& sizes : {json({64, 32}), json("64x32")}) {
    weights["block_structure"] = sizes;
    const QuantScheme scheme = parse(ct("float-quantized", weights));
    EXPECT_TRUE(is(scheme, LayoutId::ct_fp8_block));
    EXPECT_EQ(scheme.numbers.block_n, 64);
    EXPECT_EQ(scheme.numbers.block_k, 32);
  }
  for (const json& sizes : {json({64}), json("64"), json("64x"), json("x32"), json("64x32x1"),
                            json("0x32"), json(64), json("99999999999999999999x1")}) {
    weights["block_structure"] = sizes;
    expect_refused(ct("float-quantized", weights), ErrorCode::io, {"block_structure"});
  }
  const json int4 = {{"num_bits", 4}, {"type", "int"}, {"strategy", "group"}, {"group_size", 64}};
  const QuantScheme scheme = parse(ct("pack-quantized", int4));
  EXPECT_TRUE(is(scheme, LayoutId::ct_int4_packed));
  EXPECT_EQ(scheme.numbers.group_size, 64);
  EXPECT_FALSE(scheme.numbers.asymmetric);
  weights = int4;
  weights["symmetric"] = false;
  EXPECT_TRUE(parse(ct("pack-quantized", weights)).numbers.asymmetric);
  weights["num_bits"] = 8;
  expect_refused(ct("pack-quantized", weights), ErrorCode::unsupported, {"symmetric", "int8"});
  weights = int4;
  weights["group_size"] = 0;
  expect_refused(ct("pack-quantized", weights), ErrorCode::io, {"group_size"});
  weights["group_size"] = -1;
  EXPECT_EQ(parse(ct("pack-quantized", weights)).numbers.group_size, 0);
  weights = int4;
  weights["dynamic"] = true;
  expect_refused(ct("pack-quantized", weights), ErrorCode::unsupported, {"dynamic"});
  for (const auto& [key, value] :
       {std::pair<const char*, json>{"num_bits", 3}, {"type", "float"}, {"strategy", "token"}}) {
    weights = int4;
    weights[key] = value;
    expect_refused(ct("pack-quantized", weights), ErrorCode::unsupported, {"pack-quantized"});
    weights.erase(key);
    if (std::string(key) != "strategy") {
      expect_refused(ct("pack-quantized", weights), ErrorCode::io, {key, "missing"});
    }
  }
  expect_refused(ct("marlin-24", int4), ErrorCode::unsupported, {"'marlin-24'"});
  json nvfp4 = {
      {"num_bits", 4}, {"type", "float"}, {"strategy", "tensor_group"}, {"group_size", 16}};
  EXPECT_TRUE(is(parse(ct("nvfp4-pack-quantized", nvfp4)), LayoutId::ct_nvfp4));
  nvfp4["group_size"] = 32;
  expect_refused(ct("nvfp4-pack-quantized", nvfp4), ErrorCode::unsupported, {"32", "16"});
}

TEST(QuantConfig, CompressedTensorsGroups) {
  const json int4 = {{"num_bits", 4}, {"type", "int"}, {"strategy", "group"}, {"group_size", 64}};
  json config = ct("pack-quantized", int4);
  config["config_groups"]["group_1"] = {{"weights", nullptr}};  // activations only
  config["config_groups"]["group_2"] = {{"weights", int4}};
  EXPECT_EQ(parse(config).numbers.group_size, 64);
  config["config_groups"]["group_2"]["weights"]["group_size"] = 32;
  expect_refused(config, ErrorCode::unsupported, {"group_2", "group_0"});
  // A group's own format goes before the common one.
  config = ct("mixed-precision", int4);
  config["config_groups"]["group_0"]["format"] = "pack-quantized";
  EXPECT_TRUE(is(parse(config), LayoutId::ct_int4_packed));
  config = ct("pack-quantized", int4);
  config.erase("format");
  expect_refused(config, ErrorCode::io, {"format", "missing"});
  config = ct("pack-quantized", int4);
  config["config_groups"] = json::object();
  expect_refused(config, ErrorCode::io, {"config_groups", "no group"});
  config.erase("config_groups");
  expect_refused(config, ErrorCode::io, {"config_groups"});
  config = ct("pack-quantized", int4);
  config["sparsity_config"] = {{"format", "sparse-24-bitmask"}};
  expect_refused(config, ErrorCode::unsupported, {"sparsity_config", "sparse-24-bitmask"});
  config["sparsity_config"] = json::object();
  EXPECT_TRUE(is(parse(config), LayoutId::ct_int4_packed));
}

TEST(QuantConfig, Gptq) {
  const json base = {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 128}};
  EXPECT_TRUE(is(parse(base), LayoutId::gptq));
  EXPECT_EQ(parse(base).numbers.zero_offset, 1);
  EXPECT_EQ(parse(base).numbers.group_size, 128);
  json config = base;
  config["checkpoint_format"] = "gptq_v2";
  EXPECT_EQ(parse(config).numbers.zero_offset, 0);
  for (const auto& [key, value] : {std::pair<const char*, json>{"bits", 8},
                                   {"bits", 3},
                                   {"checkpoint_format", "marlin"},
                                   {"is_marlin_format", true},
                                   {"pack_dtype", "int16"},
                                   {"dynamic", {{"+:.*mlp", {{"bits", 8}}}}}}) {
    config = base;
    config[key] = value;
    expect_refused(config, ErrorCode::unsupported, {key});
  }
  config = base;
  config["dynamic"] = {{"-:.*gate", json::object()}};
  EXPECT_TRUE(parse(config).lists_exceptions);
  config["dynamic"] = false;
  EXPECT_FALSE(parse(config).lists_exceptions);
  for (const json& group : {json(0), json(-2), json("128"), json(nullptr)}) {
    config = base;
    config["group_size"] = group;
    expect_refused(config, ErrorCode::io, {"group_size"});
  }
}

TEST(QuantConfig, Awq) {
  const json base = {{"quant_method", "awq"}, {"bits", 4}, {"group_size", 64}};
  EXPECT_TRUE(is(parse(base), LayoutId::awq));
  json config = base;
  config["version"] = "GEMM";
  EXPECT_TRUE(is(parse(config), LayoutId::awq));
  for (const auto& [key, value] : {std::pair<const char*, json>{"version", "gemv"},
                                   {"version", "marlin"},
                                   {"zero_point", false},
                                   {"bits", 8}}) {
    config = base;
    config[key] = value;
    expect_refused(config, ErrorCode::unsupported, {key});
  }
}

TEST(QuantConfig, ModelOpt) {
  EXPECT_TRUE(
      is(parse({{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}}), LayoutId::modelopt_nvfp4));
  EXPECT_TRUE(
      is(parse({{"quant_method", "modelopt"}, {"quant_algo", "FP8"}}), LayoutId::fp8_tensor));
  EXPECT_TRUE(is(parse({{"quant_method", "modelopt"},
                        {"quantization", {{"quant_algo", "NVFP4"}, {"group_size", 16}}}}),
                 LayoutId::modelopt_nvfp4));
  expect_refused({{"quant_method", "modelopt"}, {"quant_algo", "W4A8_AWQ"}}, ErrorCode::unsupported,
                 {"quant_algo", "'W4A8_AWQ'"});
  expect_refused({{"quant_method", "modelopt"}}, ErrorCode::io, {"quant_algo", "missing"});
  json config = {
      {"quant_method", "modelopt"},
      {"quant_algo", "NVFP4"},
      {"config_groups", {{"group_0", {{"weights", {{"num_bits", 4}, {"group_size", 32}}}}}}}};
  expect_refused(config, ErrorCode::unsupported, {"group_size", "32"});
}

// hf_quant_config.json beside a config that says nothing, the same, or something else.
TEST(QuantConfig, ModelOptFile) {
  const Sizes sizes;
  const std::vector<NewTensor> tensors =
      qwen_tensors(sizes, [](const std::string& s, std::int64_t n, std::int64_t k) {
        return std::vector<NewTensor>{{s + ".weight", {n, k / 2}, "U8"},
                                      {s + ".weight_scale", {n, k / 16}, "F8_E4M3"},
                                      {s + ".weight_scale_2", {}, "F32"}};
      });
  const auto open = [&](const std::string& quantization, const std::string& file) {
    const QuantisedFiles files(qwen_config(sizes, quantization), tensors);
    files.folder().write("hf_quant_config.json", file);
    EXPECT_EQ(files.open().layers().front().formats,
              std::vector<WeightFormat>{WeightFormat::nvfp4});
  };
  const std::string nvfp4 = R"({"quantization":{"quant_algo":"NVFP4","group_size":16}})";
  open("", nvfp4);
  open(R"({"quant_method":"modelopt","quant_algo":"NVFP4"})", nvfp4);
  expect_error(ErrorCode::io, {"hf_quant_config.json", "fp8 per tensor", "config.json"},
               [&] { open(R"({"quant_method":"modelopt","quant_algo":"FP8"})", nvfp4); });
  expect_error(ErrorCode::unsupported, {"hf_quant_config.json", "'INT4_AWQ'"},
               [&] { open("", R"({"quantization":{"quant_algo":"INT4_AWQ"}})"); });
  expect_error(ErrorCode::io, {"hf_quant_config.json", "JSON"}, [&] { open("", "{"); });
  expect_error(ErrorCode::io, {"hf_quant_config.json", "quantization"}, [&] { open("", "{}"); });
}

}  // namespace
}  // namespace fusedmoe::checkpoint
