// config.json: what each family's keys mean, and that nothing wrong or contradictory passes.
#include "checkpoint/model_config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "test_files.h"

namespace fusedmoe::checkpoint {
namespace {

using nlohmann::json;

json golden_config(const std::string& name) {
  return json::parse(std::ifstream(kGolden / name / "config.json"));
}

ModelConfig parse(const json& config) { return parse_model_config(config.dump(), "config.json"); }

void expect_refused(const json& config, ErrorCode code, std::vector<std::string> parts) {
  SCOPED_TRACE(config.dump().substr(0, 400));
  parts.emplace_back("config.json");
  expect_error(code, parts, [&] { parse(config); });
}

std::vector<std::int64_t> layers_of(const ModelConfig& model) {
  std::vector<std::int64_t> result;
  for (const LayerConfig& layer : model.layers) result.push_back(layer.layer);
  return result;
}

using Layers = std::vector<std::int64_t>;

TEST(ModelConfig, SizesOfTheWrongKind) {
  const json mixtral = golden_config("mixtral_bf16");
  EXPECT_EQ(parse(mixtral).layers.front().moe.num_experts, 4);
  for (const char* const key : {"hidden_size", "intermediate_size", "num_local_experts",
                                "num_experts_per_tok", "num_hidden_layers"}) {
    json config = mixtral;
    config.erase(key);
    expect_refused(config, ErrorCode::io,
                   {key == std::string("num_local_experts") ? "num_experts" : key, "missing"});
    for (const json& value :
         {json(-3), json(0), json(2.5), json(2.0), json("4"), json(true), json::array({4}),
          json::object(), json(1'000'001), json(18446744073709551615U), json(1e30)}) {
      config[key] = value;
      expect_refused(config, ErrorCode::io, {"expected an integer"});
    }
    config[key] = nullptr;  // as if it were not there
    expect_refused(config, ErrorCode::io, {"missing"});
  }
  json config = mixtral;
  config["num_experts_per_tok"] = 5;
  expect_refused(config, ErrorCode::io, {"num_experts_per_tok", "5", "4 experts"});
}

TEST(ModelConfig, TwoDifferentThings) {
  json config = golden_config("mixtral_bf16");
  config["num_experts"] = 4;
  EXPECT_EQ(parse(config).layers.front().moe.num_experts, 4);
  config["num_experts"] = 8;
  expect_refused(config, ErrorCode::io, {"num_experts is 8", "num_local_experts is 4"});
  config = golden_config("gpt_oss_bf16");
  config["experts_per_token"] = 3;
  expect_refused(config, ErrorCode::io, {"num_experts_per_tok is 2", "experts_per_token is 3"});
  config = golden_config("mixtral_bf16");
  config["dtype"] = "float16";
  expect_refused(config, ErrorCode::io, {"dtype is 'float16'", "torch_dtype is 'bfloat16'"});
  config = golden_config("qwen3_5_moe_bf16");
  config["num_experts"] = 9;
  expect_refused(config, ErrorCode::io, {"num_experts is 9", "text_config.num_experts is 7"});
  config = golden_config("dbrx_bf16");
  config["ffn_config"]["hidden_size"] = 6144;
  expect_refused(config, ErrorCode::io, {"d_model is 96", "ffn_config.hidden_size is 6144"});
  config = golden_config("llama4_bf16");
  config["text_config"]["num_hidden_layers"] = 4;
  config["text_config"]["interleave_moe_layer_step"] = 2;
  expect_refused(config, ErrorCode::io, {"moe_layers", "interleave_moe_layer_step"});
  config = golden_config("nemotron_h_relu2_bf16");
  config["num_hidden_layers"] = 3;
  expect_refused(config, ErrorCode::io, {"num_hidden_layers is 3", "2 layers"});
  config["num_hidden_layers"] = 2;
  config["hybrid_override_pattern"] = "E*";
  expect_refused(config, ErrorCode::io, {"layers_block_type", "hybrid_override_pattern"});
  expect_error(ErrorCode::io, {"'model_type'", "twice"}, [] {
    parse_model_config(R"({"model_type":"mixtral","model_type":"olmoe"})", "config.json");
  });
}

TEST(ModelConfig, NotAConfig) {
  const auto refused = [](const std::string& text, const std::string& part) {
    expect_error(ErrorCode::io, {"config.json", part},
                 [&] { parse_model_config(text, "config.json"); });
  };
  refused("", "JSON");
  refused("{", "JSON");
  refused("[]", "expected an object");
  refused("{}", "model_type");
  refused(std::string("{}\0", 3), "JSON");
  refused(R"({"model_type":3})", "model_type");
  refused(R"({"model_type":"llama4"})", "text_config");
  refused(R"({"model_type":"llama4","text_config":3})", "text_config");
  refused(std::string(100000, '['), "deeper");
  refused(std::string("{\"model_type\":\"a\0b\"}", 20), "JSON");
}

TEST(ModelConfig, SoundButNotRead) {
  json config = golden_config("mixtral_bf16");
  config["model_type"] = "mystery";
  expect_refused(config, ErrorCode::unsupported, {"'mystery'", "mixtral", "nemotron_h"});
  config = golden_config("mixtral_bf16");
  config["hidden_act"] = "quick_gelu";
  expect_refused(config, ErrorCode::unsupported, {"hidden_act", "'quick_gelu'", "gelu_new"});
  config["hidden_act"] = "relu2";
  expect_refused(config, ErrorCode::unsupported, {"'relu2'", "have a gate"});
  config["hidden_act"] = "silu";
  config["torch_dtype"] = "float8_e4m3fn";
  expect_refused(config, ErrorCode::unsupported, {"'float8_e4m3fn'"});
  config = golden_config("mixtral_bf16");
  config["swiglu_limit"] = 7.0;
  expect_refused(config, ErrorCode::unsupported, {"swiglu_limit"});
  config = golden_config("mixtral_bf16");
  config["quantization_config"] = {{"quant_method", "bitsandbytes"}};
  expect_refused(config, ErrorCode::unsupported,
                 {"quantised", "quantization_config", "'bitsandbytes'", "gptq"});
  config["quantization_config"] = json::object();
  expect_refused(config, ErrorCode::io, {"quantization_config", "quant_method", "missing"});
  config = golden_config("nemotron_h_relu2_bf16");
  config["mlp_hidden_act"] = "silu";
  expect_refused(config, ErrorCode::unsupported, {"mlp_hidden_act", "no gate"});
  config["mlp_hidden_act"] = "relu2";
  config["moe_latent_size"] = 32;
  expect_refused(config, ErrorCode::unsupported, {"moe_latent_size"});
  config = golden_config("gpt_oss_bf16");
  config["hidden_act"] = "gelu";
  expect_refused(config, ErrorCode::unsupported, {"'gelu'", "swigluoai"});
  config = golden_config("deepseek_v3_bf16");
  config["scoring_func"] = "softmax";
  expect_refused(config, ErrorCode::unsupported, {"scoring_func", "'softmax'", "'sigmoid'"});
}

TEST(ModelConfig, ActivationNames) {
  const std::pair<const char*, Activation> names[] = {{"silu", Activation::silu},
                                                      {"swish", Activation::silu},
                                                      {"gelu", Activation::gelu},
                                                      {"gelu_pytorch_tanh", Activation::gelu_tanh},
                                                      {"gelu_new", Activation::gelu_tanh}};
  json config = golden_config("mixtral_bf16");
  for (const auto& [name, kind] : names) {
    config["hidden_act"] = name;
    EXPECT_EQ(parse(config).layers.front().moe.activation.kind, kind) << name;
  }
  config.erase("hidden_act");
  expect_refused(config, ErrorCode::io, {"hidden_act", "missing"});
  // gpt-oss says silu and means swigluoai.
  config = golden_config("gpt_oss_bf16");
  config["swiglu_limit"] = 5;
  const ActivationConfig activation = parse(config).layers.front().moe.activation;
  EXPECT_EQ(activation.kind, Activation::swigluoai);
  EXPECT_FLOAT_EQ(activation.alpha, 1.702F);
  EXPECT_FLOAT_EQ(activation.limit, 5.0F);
  for (const json& limit : {json(0), json(-1), json("7"), json(1e300)}) {
    config["swiglu_limit"] = limit;
    expect_refused(config, ErrorCode::io, {"swiglu_limit"});
  }
  // Published DBRX configs leave the activation out.
  config = golden_config("dbrx_bf16");
  config["ffn_config"].erase("ffn_act_fn");
  EXPECT_EQ(parse(config).layers.front().moe.activation.kind, Activation::silu);
  config["ffn_config"]["ffn_act_fn"] = "gelu";
  expect_refused(config, ErrorCode::io, {"ffn_act_fn"});
}

TEST(ModelConfig, WordsThatPythonWrites) {
  std::string text = golden_config("nemotron_h_relu2_bf16").dump();
  const std::string head = R"({"a":[0.0, Infinity, -Infinity, NaN], "b":"Infinity \" NaN",)";
  EXPECT_EQ(parse_model_config(head + text.substr(1), "config.json").layers.size(), 1U);
  json config = golden_config("deepseek_v3_bf16");
  config["routed_scaling_factor"] = "MARK";
  text = config.dump();
  text.replace(text.find("\"MARK\""), 6, "Infinity");
  expect_error(ErrorCode::io, {"routed_scaling_factor", "finite"},
               [&] { parse_model_config(text, "config.json"); });
}

TEST(ModelConfig, WhichLayersHaveExperts) {
  json config = golden_config("qwen3_moe_bf16_shards");
  config["num_hidden_layers"] = 6;
  config["decoder_sparse_step"] = 2;
  config["mlp_only_layers"] = {3, 99};
  EXPECT_EQ(layers_of(parse(config)), (Layers{1, 5}));
  config = golden_config("deepseek_v3_bf16");
  config["num_hidden_layers"] = 7;
  config["moe_layer_freq"] = 2;
  EXPECT_EQ(layers_of(parse(config)), (Layers{2, 4, 6}));
  config = golden_config("llama4_bf16");
  config["text_config"].erase("moe_layers");
  config["text_config"]["num_hidden_layers"] = 5;
  config["text_config"]["interleave_moe_layer_step"] = 2;
  EXPECT_EQ(layers_of(parse(config)), (Layers{1, 3}));
  config = golden_config("nemotron_h_relu2_bf16");
  config.erase("layers_block_type");
  config["hybrid_override_pattern"] = "ME*E-";
  EXPECT_EQ(layers_of(parse(config)), (Layers{1, 3}));
  config["hybrid_override_pattern"] = "MX";
  expect_refused(config, ErrorCode::io, {"hybrid_override_pattern"});
  config.erase("hybrid_override_pattern");
  expect_refused(config, ErrorCode::io, {"layers_block_type"});
  config = golden_config("deepseek_v3_bf16");
  config["first_k_dense_replace"] = 2;
  expect_refused(config, ErrorCode::io, {"no layer has experts"});
}

TEST(ModelConfig, Groups) {
  const json base = golden_config("deepseek_v3_bf16");
  const RouterSpec router = parse(base).router;
  EXPECT_EQ(router.n_group, 4);
  EXPECT_EQ(router.topk_group, 2);
  EXPECT_DOUBLE_EQ(router.scaling, 2.5);
  json config = base;
  config["n_group"] = 5;
  expect_refused(config, ErrorCode::io, {"n_group", "12 experts"});
  config = base;
  config["topk_group"] = 5;
  expect_refused(config, ErrorCode::io, {"topk_group is 5"});
  config = base;
  config["topk_group"] = 1;
  expect_refused(config, ErrorCode::io, {"topk_group", "3 experts"});
  config = base;
  config.erase("routed_scaling_factor");
  expect_refused(config, ErrorCode::io, {"routed_scaling_factor", "missing"});
}

}  // namespace
}  // namespace fusedmoe::checkpoint
