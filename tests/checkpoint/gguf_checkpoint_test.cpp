// Whole GGUF checkpoints: what metadata says of the model, what tensors become, and every way in
// which the two disagree.
#include <gtest/gtest.h>

#include "checkpoint/checkpoint.h"
#include "formats/float_bits.h"
#include "formats/format.h"
#include "formats/small_floats.h"
#include "gguf_files.h"

namespace fusedmoe::checkpoint {
namespace {

struct Model {
  std::string architecture = "qwen3moe";
  std::int64_t hidden = 64;
  std::int64_t intermediate = 32;
  std::int64_t experts = 2;
};

std::int64_t bytes_of_type(std::uint32_t type, std::int64_t elements) {
  const TypeBlock block = block_of(*ggml_tensor_type(type));
  return elements / block.elements * block.bytes;
}

GgufTensor stack(const std::string& name, std::int64_t e, std::int64_t n, std::int64_t k,
                 std::uint32_t type, std::uint32_t seed) {
  return {name, {e, n, k}, type, random_bytes(bytes_of_type(type, e * n * k), seed)};
}

GgufText model(const Model& m, std::uint32_t type = kGgmlQ8_0) {
  const std::string a = m.architecture + ".";
  const auto u32 = [](std::int64_t value) { return static_cast<std::uint32_t>(value); };
  return {
      .pairs = {pair_text("general.architecture", m.architecture), pair_u32(a + "block_count", 1),
                pair_u32(a + "embedding_length", u32(m.hidden)),
                pair_u32(a + "expert_count", u32(m.experts)), pair_u32(a + "expert_used_count", 1),
                pair_u32(a + "expert_feed_forward_length", u32(m.intermediate))},
      .tensors = {
          {"blk.0.ffn_gate_inp.weight",
           {m.experts, m.hidden},
           kGgmlF32,
           random_bytes(4 * m.experts * m.hidden, 1)},
          stack("blk.0.ffn_gate_exps.weight", m.experts, m.intermediate, m.hidden, type, 2),
          stack("blk.0.ffn_up_exps.weight", m.experts, m.intermediate, m.hidden, type, 3),
          stack("blk.0.ffn_down_exps.weight", m.experts, m.hidden, m.intermediate, type, 4)}};
}

GgufTensor& named(GgufText& file, const std::string& name) {
  for (GgufTensor& tensor : file.tensors) {
    if (tensor.name == name) return tensor;
  }
  ADD_FAILURE() << name;
  return file.tensors.front();
}

class Written {
 public:
  explicit Written(const GgufText& file) : path_(folder_.write("model.gguf", file.text())) {}
  Checkpoint open() const { return Checkpoint::open(path_); }
  const std::filesystem::path& path() const { return path_; }
  const TempFolder& folder() const { return folder_; }

 private:
  TempFolder folder_;
  std::filesystem::path path_;
};

void expect_refused(const GgufText& file, ErrorCode code, std::vector<std::string> parts) {
  const Written written(file);
  parts.push_back(written.path().string());
  expect_error(code, parts, [&] { written.open(); });
  EXPECT_FALSE(inspect_checkpoint(written.path()).problems.empty());
}

double value(const WeightTensor& tensor, std::int64_t n, std::int64_t k, std::int64_t expert = 0) {
  return format_info(tensor.format).decode(tensor, expert, n, k);
}

TEST(GgufCheckpoint, FromTheFolderOrTheFile) {
  const Written written(model({}));
  EXPECT_EQ(written.open().family(), "qwen3_moe");
  EXPECT_EQ(Checkpoint::open(written.folder().path()).layers().size(), 1U);
  written.folder().write("second.gguf", "x");
  expect_error(ErrorCode::io, {"2 .gguf files"},
               [&] { Checkpoint::open(written.folder().path()); });
}

// Metadata and tensors that disagree, and a file that is cut short (case B163).
TEST(Cases_CK, B163_MetadataAgainstTensors) {
  Model m{.hidden = 64, .intermediate = 2560 / 32, .experts = 4};
  m.intermediate = 96;
  GgufText file = model(m);
  file.pairs.back() = pair_u32("qwen3moe.expert_feed_forward_length", 64);
  expect_refused(file, ErrorCode::io,
                 {"'blk.0.ffn_gate_exps.weight'", "[4, 96, 64]", "[4, 64, 64]"});
  file = model(m);
  file.pairs[3] = pair_u32("qwen3moe.expert_count", 5);
  expect_refused(file, ErrorCode::io, {"'blk.0.ffn_gate_exps.weight'", "[4, 96, 64]", "[5, "});
  file.pairs[3] = pair_u32("qwen3moe.expert_count", 3);
  expect_refused(file, ErrorCode::io, {"'blk.0.ffn_gate_exps.weight'", "[4, 96, 64]", "[3, "});
  const std::string text = model(m).text();
  const TempFolder folder;
  for (std::size_t size = 0; size < text.size(); size += 997) {
    const auto path = folder.write("cut.gguf", text.substr(0, size));
    EXPECT_THROW(Checkpoint::open(path), Error) << size;
  }
}

TEST(GgufCheckpoint, MetadataThatIsMissingOrWrong) {
  const char* const keys[] = {"block_count", "embedding_length", "expert_count",
                              "expert_used_count", "expert_feed_forward_length"};
  for (std::size_t i = 0; i < std::size(keys); ++i) {
    const std::string key = std::string("qwen3moe.") + keys[i];
    GgufText file = model({});
    file.pairs.erase(file.pairs.begin() + 1 + static_cast<std::ptrdiff_t>(i));
    expect_refused(file, ErrorCode::io, {key, "missing"});
    for (const std::string& pair :
         {pair_u32(key, 0), pair_u32(key, 4'000'000'000U), pair_text(key, "1"), pair_f32(key, 2)}) {
      file = model({});
      file.pairs[1 + i] = pair;
      expect_refused(file, ErrorCode::io, {key});
    }
  }
  GgufText file = model({});
  file.pairs[4] = pair_u32("qwen3moe.expert_used_count", 3);
  expect_refused(file, ErrorCode::io, {"expert_used_count", "3", "2 experts"});
  file = model({});
  file.pairs.erase(file.pairs.begin());
  expect_refused(file, ErrorCode::io, {"general.architecture", "missing"});
  expect_refused(model({.architecture = "bert"}), ErrorCode::unsupported,
                 {"'bert'", "qwen3moe", "deepseek2"});
  for (const char* const key : {"expert_latent_length", "router_logit_softcapping"}) {
    file = model({});
    file.pairs.push_back(pair_u32(std::string("qwen3moe.") + key, 1));
    expect_refused(file, ErrorCode::unsupported, {key});
  }
  file = model({});
  file.pairs.push_back(pair_u32("split.count", 3));
  expect_refused(file, ErrorCode::unsupported, {"split.count"});
}

TEST(GgufCheckpoint, TensorsThatAreMissingOrStrange) {
  for (const char* const name :
       {"blk.0.ffn_gate_inp.weight", "blk.0.ffn_gate_exps.weight", "blk.0.ffn_down_exps.weight"}) {
    GgufText file = model({});
    const GgufTensor& tensor = named(file, name);
    file.tensors.erase(file.tensors.begin() + (&tensor - file.tensors.data()));
    expect_refused(file, ErrorCode::io, {name, "missing"});
  }
  GgufText file = model({});
  file.tensors.push_back({"blk.0.ffn_gate_exps.mystery", {2}, kGgmlF32, random_bytes(8, 9)});
  expect_refused(file, ErrorCode::io, {"ffn_gate_exps.mystery"});
  // Gate and up apart and in one.
  file = model({});
  file.tensors.push_back(stack("blk.0.ffn_gate_up_exps.weight", 2, 64, 64, kGgmlQ8_0, 5));
  expect_refused(file, ErrorCode::io, {"ffn_gate_up_exps", "ffn_gate_exps", "one of the two"});
  // Of a layer that the metadata does not have.
  file = model({});
  file.tensors.push_back(stack("blk.3.ffn_up_exps.weight", 2, 32, 64, kGgmlQ8_0, 5));
  expect_refused(file, ErrorCode::io, {"blk.3.ffn_up_exps.weight", "layer 3"});
}

TEST(GgufCheckpoint, TypesThatAreNotReadAreNamed) {
  const std::pair<std::uint32_t, const char*> types[] = {
      {3, "Q4_1"},   {6, "Q5_0"},     {7, "Q5_1"},    {10, "Q2_K"},   {11, "Q3_K"},
      {15, "Q8_K"},  {16, "IQ2_XXS"}, {20, "IQ4_NL"}, {23, "IQ4_XS"}, {29, "IQ1_M"},
      {34, "TQ1_0"}, {28, "F64"},     {24, "I8"}};
  for (const auto& [type, name] : types) {
    expect_refused(model({.hidden = 256, .intermediate = 256}, type), ErrorCode::unsupported,
                   {"ffn_gate_exps.weight", std::string("type ") + name, "Q8_0"});
  }
  // Elsewhere they are no matter.
  GgufText file = model({});
  file.tensors.push_back({"blk.0.attn_q.weight", {1, 256}, kGgmlQ2K, random_bytes(84, 6)});
  EXPECT_NO_THROW(Written(file).open());
}

// Blocks that stay as they are: whole stacks, in place.
TEST(GgufCheckpoint, BlocksInPlace) {
  for (const auto& [type, format] :
       {std::pair<std::uint32_t, WeightFormat>{kGgmlQ4K, WeightFormat::q4_k},
        {kGgmlQ5K, WeightFormat::q5_k},
        {14, WeightFormat::q6_k},
        {kGgmlBf16, WeightFormat::bf16},
        {kGgmlF16, WeightFormat::f16},
        {kGgmlF32, WeightFormat::f32}}) {
    GgufText file = model({.hidden = 256, .intermediate = 512}, type);
    const Written written(file);
    const Checkpoint checkpoint = written.open();
    const ExpertWeights& weights = checkpoint.layers().front().weights;
    EXPECT_FALSE(weights.source);
    EXPECT_EQ(weights.w2.format, format);
    EXPECT_EQ(weights.w2.scales.layout, ScaleLayout::none);
    const std::string& data = named(file, "blk.0.ffn_down_exps.weight").data;
    EXPECT_EQ(std::memcmp(weights.w2.data, data.data(), data.size()), 0);
  }
}

TEST(GgufCheckpoint, Q4_0AndQ8_0Values) {
  for (const std::uint32_t type : {kGgmlQ4_0, kGgmlQ8_0}) {
    GgufText file = model({}, type);
    std::string& data = named(file, "blk.0.ffn_up_exps.weight").data;
    const std::int64_t block = type == kGgmlQ4_0 ? 18 : 34;
    for (std::size_t at = 0; at < data.size(); at += block)
      data.replace(at, 2, raw<std::uint16_t>(0x3800));  // 0.5
    const Written written(file);
    const Checkpoint checkpoint = written.open();
    const ExpertWeights expert = checkpoint.layers().front().weights.source(1);
    EXPECT_EQ(expert.w13_up.scales.type, ScaleType::f16);
    EXPECT_EQ(expert.w13_up.scales.group_size, 32);
    for (const std::int64_t n : {0, 31}) {
      for (std::int64_t k = 0; k < 64; ++k) {
        const std::int64_t at = ((32 + n) * 2 + k / 32) * block + 2;
        const std::int64_t i = k % 32;
        const int code =
            type == kGgmlQ8_0
                ? static_cast<signed char>(data[at + i])
                : (static_cast<unsigned char>(data[at + i % 16]) >> (i < 16 ? 0 : 4) & 15) - 8;
        ASSERT_EQ(value(expert.w13_up, n, k), code * 0.5) << n << ", " << k;
      }
    }
  }
}

// ggml's nvfp4, with and without its number for each expert.
TEST(GgufCheckpoint, Nvfp4Values) {
  for (const bool with_scale : {false, true}) {
    GgufText file = model({.hidden = 128, .intermediate = 64}, kGgmlNvfp4);
    if (with_scale) {
      file.tensors.push_back({"blk.0.ffn_down_exps.scale", {2}, kGgmlF32, f32_data({3.0F, 5.0F})});
      file.tensors.push_back(
          {"blk.0.ffn_down_exps.input_scale", {2}, kGgmlF32, f32_data({1.0F, 1.0F})});
    }
    const std::string data = named(file, "blk.0.ffn_down_exps.weight").data;
    const Written written(file);
    const Checkpoint checkpoint = written.open();
    EXPECT_EQ(checkpoint.layers().front().has_input_scales, with_scale);
    const ExpertWeights expert = checkpoint.layers().front().weights.source(1);
    for (const std::int64_t n : {0, 127}) {
      for (std::int64_t k = 0; k < 64; ++k) {
        const std::int64_t at = (128 + n) * 36;
        const auto scale = static_cast<std::uint8_t>(data[at + k / 16] & 0x7f);
        const auto byte = static_cast<std::uint8_t>(data[at + 4 + k / 16 * 8 + k % 8]);
        const auto code = static_cast<std::uint8_t>(k % 16 < 8 ? byte & 15 : byte >> 4);
        const double due = static_cast<double>(e2m1_to_f32(code)) *
                           static_cast<double>(scale == 0x7f ? 0 : e4m3_to_f32(scale)) *
                           (with_scale ? 5.0 : 1.0);
        ASSERT_EQ(value(expert.w2, n, k), due) << n << ", " << k;
      }
    }
  }
}

// A number for each expert goes where the format has room for it, or is refused.
TEST(GgufCheckpoint, ScalesOfExperts) {
  const auto with_scale = [](std::uint32_t type, const std::vector<float>& scale) {
    GgufText file = model({.hidden = 256, .intermediate = 256}, type);
    file.tensors.push_back({"blk.0.ffn_down_exps.scale",
                            {static_cast<std::int64_t>(scale.size())},
                            kGgmlF32,
                            f32_data(scale)});
    return file;
  };
  for (const std::uint32_t type : {kGgmlQ4_0, kGgmlQ8_0}) {
    const Written scaled(with_scale(type, {2.0F, 3.0F}));
    const Written plain(with_scale(type, {1.0F, 1.0F}));
    const Checkpoint a = scaled.open();
    const Checkpoint b = plain.open();
    const ExpertWeights one = a.layers().front().weights.source(1);
    const ExpertWeights other = b.layers().front().weights.source(1);
    EXPECT_EQ(one.w2.scales.type, ScaleType::f32);
    EXPECT_EQ(other.w2.scales.type, ScaleType::f16);
    int compared = 0;
    for (std::int64_t k = 0; k < 256; ++k) {
      const double due = 3 * value(other.w2, 7, k);
      if (std::isnan(due)) continue;
      ASSERT_EQ(value(one.w2, 7, k), due);
      ++compared;
    }
    EXPECT_GT(compared, 0);
  }
  for (const std::uint32_t type : {kGgmlMxfp4, kGgmlQ4K, kGgmlBf16, kGgmlF32}) {
    EXPECT_NO_THROW(Written(with_scale(type, {1.0F, 1.0F})).open());
    expect_refused(with_scale(type, {1.0F, 2.0F}), ErrorCode::unsupported,
                   {"ffn_down_exps.scale", "other than 1"});
  }
  expect_refused(with_scale(kGgmlQ8_0, {1.0F}), ErrorCode::io,
                 {"ffn_down_exps.scale", "[1]", "[2]"});
}

TEST(GgufCheckpoint, BiasesOfGateAndUpAreJoined) {
  GgufText file = model({.architecture = "gpt-oss"}, kGgmlBf16);
  std::vector<float> gate;
  std::vector<float> up;
  for (int i = 0; i < 64; ++i) {
    gate.push_back(static_cast<float>(i));
    up.push_back(static_cast<float>(1000 + i));
  }
  file.tensors.push_back({"blk.0.ffn_gate_exps.bias", {2, 32}, kGgmlF32, f32_data(gate)});
  file.tensors.push_back({"blk.0.ffn_up_exps.bias", {2, 32}, kGgmlF32, f32_data(up)});
  file.tensors.push_back({"blk.0.ffn_down_exps.bias", {2, 64}, kGgmlF32, random_bytes(512, 7)});
  file.tensors.push_back({"blk.0.ffn_gate_inp.bias", {2}, kGgmlF32, random_bytes(8, 8)});
  const Written written(file);
  const Checkpoint checkpoint = written.open();
  const MoeLayer& layer = checkpoint.layers().front();
  EXPECT_EQ(layer.config.activation.kind, Activation::swigluoai);
  EXPECT_EQ(layer.weights.w13_bias.size, 64);
  const ExpertWeights expert = layer.weights.source(1);
  const auto* const bias = static_cast<const float*>(expert.w13_bias.data);
  for (int i = 0; i < 32; ++i) {
    EXPECT_EQ(bias[i], gate[32 + i]);
    EXPECT_EQ(bias[32 + i], up[32 + i]);
  }
  named(file, "blk.0.ffn_up_exps.bias") = {
      "blk.0.ffn_up_exps.bias", {2, 32}, kGgmlF16, random_bytes(128, 7)};
  expect_refused(file, ErrorCode::io, {"ffn_up_exps.bias", "must agree"});
}

TEST(GgufCheckpoint, Routers) {
  const auto router = [](const std::string& architecture, const std::vector<std::string>& pairs,
                         bool bias) {
    GgufText file = model({.architecture = architecture, .experts = 4});
    for (const std::string& pair : pairs) file.pairs.push_back(pair);
    if (bias) {
      file.tensors.push_back({"blk.0.exp_probs_b.bias", {4}, kGgmlF32, random_bytes(16, 7)});
    }
    const Written written(file);
    const Checkpoint checkpoint = written.open();
    EXPECT_EQ(checkpoint.layers().front().router_selection_bias.data != nullptr, bias);
    return std::pair(checkpoint.family(), checkpoint.layers().front().router);
  };
  const auto [v3, sigmoid] = router(
      "deepseek2",
      {pair_u32("deepseek2.expert_gating_func", 2), pair_f32("deepseek2.expert_weights_scale", 2.5),
       pair_bool("deepseek2.expert_weights_norm", true),
       pair_u32("deepseek2.expert_group_count", 2),
       pair_u32("deepseek2.expert_group_used_count", 1),
       pair_u32("deepseek2.leading_dense_block_count", 0)},
      true);
  EXPECT_EQ(v3, "deepseek_v3");
  EXPECT_EQ(sigmoid.kind, RouterKind::sigmoid_bias_grouped);
  EXPECT_EQ(sigmoid.scaling, 2.5);
  EXPECT_TRUE(sigmoid.renormalize);
  EXPECT_EQ(sigmoid.n_group, 2);
  EXPECT_EQ(sigmoid.topk_group, 1);
  const auto [v2, softmax] = router("deepseek2", {}, false);
  EXPECT_EQ(v2, "deepseek_v2");
  EXPECT_EQ(softmax.kind, RouterKind::softmax_grouped);
  EXPECT_FALSE(softmax.renormalize);
  EXPECT_EQ(router("qwen2moe", {}, false).second.renormalize, false);
  EXPECT_EQ(router("qwen3moe", {}, false).second.renormalize, true);
  EXPECT_EQ(router("qwen3moe", {pair_bool("qwen3moe.expert_weights_norm", false)}, false)
                .second.renormalize,
            false);
  EXPECT_EQ(router("llama4", {}, false).second.kind, RouterKind::topk_sigmoid);
  EXPECT_EQ(
      router("minimax-m2", {pair_f32("minimax-m2.expert_weights_scale", 0)}, true).second.scaling,
      1.0);
  EXPECT_EQ(router("ernie4_5-moe", {}, true).second.kind, RouterKind::softmax_bias);

  GgufText file = model({});
  file.pairs.push_back(pair_u32("qwen3moe.expert_gating_func", 2));
  expect_refused(file, ErrorCode::unsupported, {"expert_gating_func", "2"});
  file = model({.architecture = "deepseek2"});
  file.pairs.push_back(pair_u32("deepseek2.expert_gating_func", 4));
  expect_refused(file, ErrorCode::unsupported, {"expert_gating_func", "4"});
  file = model({});
  file.pairs.push_back(pair_u32("qwen3moe.expert_group_count", 2));
  expect_refused(file, ErrorCode::unsupported, {"expert_group_count"});
  file = model({.architecture = "deepseek2", .experts = 4});
  file.pairs.push_back(pair_u32("deepseek2.expert_group_count", 3));
  file.pairs.push_back(pair_u32("deepseek2.expert_group_used_count", 1));
  expect_refused(file, ErrorCode::io, {"expert_group_count", "4 experts"});
}

TEST(GgufCheckpoint, WhichLayersHaveExperts) {
  GgufText file = model({.architecture = "glm4moe"});
  file.pairs[1] = pair_u32("glm4moe.block_count", 3);
  file.pairs.push_back(pair_u32("glm4moe.leading_dense_block_count", 1));
  file.pairs.push_back(pair_u32("glm4moe.nextn_predict_layers", 1));
  for (GgufTensor& tensor : file.tensors) tensor.name.replace(0, 6, "blk.1.");
  file.tensors.push_back({"blk.1.exp_probs_b.bias", {2}, kGgmlF32, random_bytes(8, 7)});
  const Written written(file);
  const Checkpoint checkpoint = written.open();
  ASSERT_EQ(checkpoint.layers().size(), 1U);
  EXPECT_EQ(checkpoint.layers().front().index, 1);
  EXPECT_EQ(checkpoint.model().num_layers, 2);
  EXPECT_EQ(checkpoint.model().num_extra_layers, 1);
  // By the tensors, where the metadata does not say.
  file = model({.architecture = "jamba"});
  file.pairs[1] = pair_u32("jamba.block_count", 4);
  for (GgufTensor& tensor : file.tensors) tensor.name.replace(0, 6, "blk.3.");
  EXPECT_EQ(Written(file).open().layers().front().index, 3);
  // Every layer, where it does.
  file = model({.architecture = "llama"});
  file.pairs[1] = pair_u32("llama.block_count", 2);
  expect_refused(file, ErrorCode::io, {"blk.1.ffn_gate_exps.weight", "missing"});
}

TEST(GgufCheckpoint, AgainstAConfigBesideIt) {
  const Written written(model({}));
  const auto with = [&](const std::string& more, const std::string& family = "qwen3_moe") {
    return written.folder().write("config.json", R"({"model_type":")" + family +
                                                     R"(","hidden_act":"silu",
            "norm_topk_prob":true,"torch_dtype":"float16","num_hidden_layers":1,)" +
                                                     more + "}");
  };
  const std::string right = R"("hidden_size":64,"moe_intermediate_size":32,"num_experts":2,
                               "num_experts_per_tok":1)";
  with(right);
  EXPECT_EQ(written.open().layers().front().config.dtype, DType::f16);
  EXPECT_EQ(Checkpoint::open(written.path(), written.folder().path() / "config.json")
                .layers()
                .front()
                .config.dtype,
            DType::f16);
  const auto refused = [&](const std::string& from, const std::string& to,
                           std::vector<std::string> parts) {
    std::string changed = right;
    changed.replace(changed.find(from), from.size(), to);
    with(changed);
    parts.insert(parts.end(), {"config.json", "model.gguf"});
    expect_error(ErrorCode::io, parts, [&] { written.open(); });
  };
  refused("\"hidden_size\":64", "\"hidden_size\":65", {"embedding_length", "64", "65"});
  refused("size\":32", "size\":33", {"expert_feed_forward_length", "32", "33"});
  refused("experts\":2", "experts\":3", {"expert_count", "2", "3"});
  refused("tok\":1", "tok\":2", {"expert_used_count", "1", "2"});
  with(right, "olmoe");
  expect_error(ErrorCode::io, {"intermediate_size"}, [&] { written.open(); });
  with(right + ",\"intermediate_size\":32", "olmoe");
  expect_error(ErrorCode::io, {"general.architecture", "olmoe"}, [&] { written.open(); });
  with(right + R"(,"quantization_config":{"quant_method":"awq","bits":4,"group_size":32})");
  expect_error(ErrorCode::io, {"config.json", "quantization_config"}, [&] { written.open(); });
}

}  // namespace
}  // namespace fusedmoe::checkpoint
