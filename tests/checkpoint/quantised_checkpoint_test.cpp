// Quantised checkpoints in safetensors: what each layout becomes, and every way in which tensors
// and config disagree.
#include <gtest/gtest.h>

#include "formats/float_bits.h"
#include "quantised_files.h"

namespace fusedmoe::checkpoint {
namespace {

const Sizes kSizes{.hidden = 64, .intermediate = 32, .experts = 2};

std::string ct(const std::string& format, const std::string& weights) {
  return R"({"quant_method":"compressed-tensors","format":")" + format +
         R"(","ignore":["lm_head"],"config_groups":{"group_0":{"targets":["Linear"],"weights":{)" +
         weights + "}}}}";
}

// One layout: its config and the tensors of a matrix.
struct Layout {
  std::string name;
  std::string config;
  MatrixWriter write;
  WeightFormat format;
  ScaleLayout scales;
  std::vector<std::string> parts;  // suffixes, data first
};

using T = std::vector<NewTensor>;

std::vector<Layout> layouts() {
  return {
      {"fp8_block",
       R"({"quant_method":"fp8","weight_block_size":[16,32],"fmt":"e4m3"})",
       [](const std::string& s, std::int64_t n, std::int64_t k) {
         return T{{s + ".weight", {n, k}, "F8_E4M3"},
                  {s + ".weight_scale_inv", {n / 16, k / 32}, "F32"}};
       },
       WeightFormat::fp8_e4m3,
       ScaleLayout::block,
       {".weight", ".weight_scale_inv"}},
      {"fp8_tensor",
       R"({"quant_method":"fp8","activation_scheme":"static"})",
       [](const std::string& s, std::int64_t n, std::int64_t k) {
         return T{{s + ".weight", {n, k}, "F8_E5M2"},
                  {s + ".weight_scale", {}, "F32"},
                  {s + ".input_scale", {}, "F32"}};
       },
       WeightFormat::fp8_e5m2,
       ScaleLayout::tensor,
       {".weight", ".weight_scale", ".input_scale"}},
      {"ct_fp8_channel",
       ct("float-quantized", R"("num_bits":8,"type":"float","strategy":"channel")"),
       [](const std::string& s, std::int64_t n, std::int64_t k) {
         return T{{s + ".weight", {n, k}, "F8_E4M3"}, {s + ".weight_scale", {n, 1}, "F16"}};
       },
       WeightFormat::fp8_e4m3,
       ScaleLayout::channel,
       {".weight", ".weight_scale"}},
      {"ct_fp8_block",
       ct("float-quantized",
          R"("num_bits":8,"type":"float","strategy":"block","block_structure":[16,16])"),
       [](const std::string& s, std::int64_t n, std::int64_t k) {
         return T{{s + ".weight", {n, k}, "F8_E4M3"}, {s + ".weight_scale", {n / 16, k / 16}}};
       },
       WeightFormat::fp8_e4m3,
       ScaleLayout::block,
       {".weight", ".weight_scale"}},
      {"ct_int8_group",
       ct("int-quantized", R"("num_bits":8,"type":"int","strategy":"group","group_size":16)"),
       [](const std::string& s, std::int64_t n, std::int64_t k) {
         return T{{s + ".weight", {n, k}, "I8"}, {s + ".weight_scale", {n, k / 16}}};
       },
       WeightFormat::int8,
       ScaleLayout::group,
       {".weight", ".weight_scale"}},
      {"ct_int8_packed",
       ct("pack-quantized", R"("num_bits":8,"type":"int","strategy":"group","group_size":16)"),
       [](const std::string& s, std::int64_t n, std::int64_t k) {
         return T{{s + ".weight_packed", {n, k / 4}, "I32"},
                  {s + ".weight_scale", {n, k / 16}, "F32"},
                  {s + ".weight_shape", {2}, "I64", bytes_of<std::int64_t>({n, k})}};
       },
       WeightFormat::int8,
       ScaleLayout::group,
       {".weight_packed", ".weight_scale", ".weight_shape"}},
      {"ct_int4_asymmetric",
       ct("pack-quantized",
          R"("num_bits":4,"type":"int","strategy":"group","group_size":16,"symmetric":false)"),
       [](const std::string& s, std::int64_t n, std::int64_t k) {
         return T{{s + ".weight_packed", {n, k / 8}, "I32"},
                  {s + ".weight_scale", {n, k / 16}, "F16"},
                  {s + ".weight_zero_point", {n / 8, k / 16}, "I32"},
                  {s + ".weight_shape", {2}, "I64", bytes_of<std::int64_t>({n, k})}};
       },
       WeightFormat::int4,
       ScaleLayout::group,
       {".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape"}},
      {"ct_nvfp4",
       ct("nvfp4-pack-quantized",
          R"("num_bits":4,"type":"float","strategy":"tensor_group","group_size":16)"),
       [](const std::string& s, std::int64_t n, std::int64_t k) {
         return T{{s + ".weight_packed", {n, k / 2}, "U8"},
                  {s + ".weight_scale", {n, k / 16}, "F8_E4M3"},
                  {s + ".weight_global_scale", {1}, "F32", bytes_of<float>({4.0F})}};
       },
       WeightFormat::nvfp4,
       ScaleLayout::group,
       {".weight_packed", ".weight_scale", ".weight_global_scale"}},
      {"ct_mxfp4",
       ct("mxfp4-pack-quantized",
          R"("num_bits":4,"type":"float","strategy":"group","group_size":32)"),
       [](const std::string& s, std::int64_t n, std::int64_t k) {
         return T{{s + ".weight_packed", {n, k / 2}, "U8"},
                  {s + ".weight_scale", {n, k / 32}, "U8"}};
       },
       WeightFormat::mxfp4,
       ScaleLayout::group,
       {".weight_packed", ".weight_scale"}},
      {"gptq",
       R"({"quant_method":"gptq","bits":4,"group_size":16,"sym":true})",
       [](const std::string& s, std::int64_t n, std::int64_t k) {
         return T{{s + ".qweight", {k / 8, n}, "I32"},
                  {s + ".qzeros", {k / 16, n / 8}, "I32"},
                  {s + ".scales", {k / 16, n}, "F16"}};
       },
       WeightFormat::int4,
       ScaleLayout::group,
       {".qweight", ".qzeros", ".scales"}},
      {"awq",
       R"({"quant_method":"awq","bits":4,"group_size":16,"version":"GEMM"})",
       [](const std::string& s, std::int64_t n, std::int64_t k) {
         return T{{s + ".qweight", {k, n / 8}, "I32"},
                  {s + ".qzeros", {k / 16, n / 8}, "I32"},
                  {s + ".scales", {k / 16, n}, "F16"}};
       },
       WeightFormat::int4,
       ScaleLayout::group,
       {".qweight", ".qzeros", ".scales"}},
      {"modelopt_nvfp4",
       R"({"quant_method":"modelopt","quant_algo":"NVFP4","ignore":[]})",
       [](const std::string& s, std::int64_t n, std::int64_t k) {
         return T{{s + ".weight", {n, k / 2}, "U8"},
                  {s + ".weight_scale", {n, k / 16}, "F8_E4M3"},
                  {s + ".weight_scale_2", {}, "F32"},
                  {s + ".input_scale", {}, "F32"}};
       },
       WeightFormat::nvfp4,
       ScaleLayout::group,
       {".weight", ".weight_scale", ".weight_scale_2", ".input_scale"}},
      {"modelopt_fp8",
       R"({"quant_method":"modelopt","quant_algo":"FP8"})",
       [](const std::string& s, std::int64_t n, std::int64_t k) {
         return T{{s + ".weight", {n, k}, "F8_E4M3"}, {s + ".weight_scale", {}, "F32"}};
       },
       WeightFormat::fp8_e4m3,
       ScaleLayout::tensor,
       {".weight", ".weight_scale"}},
  };
}

class QuantisedLayout : public testing::TestWithParam<Layout> {
 protected:
  T tensors() const { return qwen_tensors(kSizes, GetParam().write); }
  QuantisedFiles files(const T& tensors) const {
    return {qwen_config(kSizes, GetParam().config), tensors};
  }
  static std::string stem() { return kQwenBlock + "experts.1.down_proj"; }
};

TEST_P(QuantisedLayout, IsReadOneExpertAtATime) {
  const QuantisedFiles sound = files(tensors());
  const Checkpoint checkpoint = sound.open();
  const MoeLayer& layer = checkpoint.layers().front();
  EXPECT_EQ(layer.formats, std::vector<WeightFormat>{GetParam().format});
  EXPECT_EQ(layer.weights.w2.scales.layout, GetParam().scales);
  EXPECT_EQ(layer.weights.w2.data, nullptr);
  ASSERT_TRUE(layer.weights.source);
  const ExpertWeights first = layer.weights.source(0);
  const ExpertWeights second = layer.weights.source(1);  // the first stays valid: it owns its bytes
  for (const ExpertWeights* const expert : {&first, &second}) {
    for (const WeightTensor* const tensor : {&expert->w13, &expert->w13_up, &expert->w2}) {
      EXPECT_EQ(tensor->experts, 1);
      EXPECT_EQ(tensor->format, GetParam().format);
      EXPECT_EQ(tensor->scales.layout, GetParam().scales);
      // Both ends, for the sanitizer.
      value_at(*tensor, 0, 0);
      value_at(*tensor, tensor->outputs - 1, tensor->inputs - 1);
    }
  }
  std::int64_t bytes = 0;
  for (const NewTensor& tensor : tensors()) {
    if (!tensor.name.ends_with("mlp.gate.weight"))
      bytes += elements(tensor) * element_bytes(tensor.type);
  }
  EXPECT_EQ(layer.bytes, bytes);
  expect_error(ErrorCode::invalid_argument, {"expert", "0 to 1", "2"},
               [&] { layer.weights.source(2); });
}

TEST_P(QuantisedLayout, EveryPartIsDue) {
  for (const std::string& part : GetParam().parts) {
    T lacking = tensors();
    remove_tensor(lacking, stem() + part);
    files(lacking).expect_refused(ErrorCode::io,
                                  {"model.safetensors", stem() + part + "'", "is missing"});
  }
}

TEST_P(QuantisedLayout, ShapesAndDtypesThatDoNotFit) {
  for (const std::string& part : GetParam().parts) {
    T wrong = tensors();
    NewTensor& tensor = tensor_named(wrong, stem() + part);
    const NewTensor right = tensor;
    tensor.data.clear();
    tensor.shape.push_back(2);
    files(wrong).expect_refused(ErrorCode::io, {stem() + part + "'", "has shape", "expected"});
    if (!right.shape.empty()) {
      tensor.shape = right.shape;
      tensor.shape.back() += 1;
      files(wrong).expect_refused(ErrorCode::io, {stem() + part + "'", "has shape"});
    }
    // Of all experts, so that they agree with one another.
    wrong = tensors();
    for (NewTensor& each : wrong) {
      if (!each.name.ends_with("down_proj" + part)) continue;
      each.type = "F64";
      each.data.clear();
    }
    files(wrong).expect_refused(ErrorCode::io, {"down_proj" + part + "'", "has dtype F64"});
    wrong = tensors();
    tensor_named(wrong, stem() + part).type = "F64";
    tensor_named(wrong, stem() + part).data.clear();
    files(wrong).expect_refused(ErrorCode::io, {stem() + part + "'", "one dtype over all experts"});
  }
}

TEST_P(QuantisedLayout, TensorsThatBelongToNoPart) {
  T more = tensors();
  more.push_back({stem() + ".mystery", {1}});
  files(more).expect_refused(ErrorCode::io, {stem() + ".mystery", "qwen3_moe"});
  more.back().name = stem() + ".some_scale";
  files(more).expect_refused(ErrorCode::unsupported, {stem() + ".some_scale", "otherwise"});
  // The same tensors without a word in the config.
  QuantisedFiles(qwen_config(kSizes, ""), tensors())
      .expect_refused(ErrorCode::unsupported, {"experts"});
}

std::string layout_name(const testing::TestParamInfo<Layout>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(All, QuantisedLayout, testing::ValuesIn(layouts()), layout_name);

Layout layout_named(const std::string& name) {
  for (Layout& layout : layouts()) {
    if (layout.name == name) return layout;
  }
  ADD_FAILURE() << name;
  return {};
}

TEST(QuantisedCheckpoint, UnquantisedExpertsNeedAnException) {
  const MatrixWriter plain = [](const std::string& s, std::int64_t n, std::int64_t k) {
    return T{{s + ".weight", {n, k}}};
  };
  for (const char* const name : {"fp8_tensor", "gptq", "awq"}) {
    Layout layout = layout_named(name);
    QuantisedFiles(qwen_config(kSizes, layout.config), qwen_tensors(kSizes, plain))
        .expect_refused(ErrorCode::io, {"gate_proj.weight", "unquantised", "no exception"});
    layout.config.pop_back();
    layout.config += R"(,"modules_to_not_convert":["model.layers.0.mlp.experts"]})";
    const QuantisedFiles files(qwen_config(kSizes, layout.config), qwen_tensors(kSizes, plain));
    EXPECT_EQ(files.open().layers().front().formats, std::vector<WeightFormat>{WeightFormat::bf16});
    // One matrix of the layer may be, with all its experts; not one expert of a matrix.
    T mixed = qwen_tensors(kSizes, [&](const std::string& s, std::int64_t n, std::int64_t k) {
      return s.ends_with("down_proj") ? plain(s, n, k) : layout.write(s, n, k);
    });
    EXPECT_EQ(QuantisedFiles(qwen_config(kSizes, layout.config), mixed)
                  .open()
                  .layers()
                  .front()
                  .formats.size(),
              2U);
    mixed = qwen_tensors(kSizes, [&](const std::string& s, std::int64_t n, std::int64_t k) {
      return s.ends_with("0.down_proj") ? plain(s, n, k) : layout.write(s, n, k);
    });
    QuantisedFiles(qwen_config(kSizes, layout.config), mixed)
        .expect_refused(ErrorCode::io, {"down_proj"});
  }
}

// Where one tensor holds all experts, not every layout is known.
TEST(QuantisedCheckpoint, StacksOfOtherLayouts) {
  const QuantisedFiles files(
      R"({"model_type":"llama4","text_config":{"hidden_size":8,"intermediate_size":4,
          "num_local_experts":2,"num_experts_per_tok":1,"num_hidden_layers":1,"hidden_act":"silu",
          "moe_layers":[0],"dtype":"bfloat16"},"quantization_config":{"quant_method":"fp8"}})",
      {{"language_model.model.layers.0.feed_forward.router.weight", {2, 8}}});
  files.expect_refused(ErrorCode::unsupported,
                       {"config.json", "fp8 per tensor", "one tensor holds all", "llama4"});
}

TEST(QuantisedCheckpoint, ZeroPointsAgainstTheConfig) {
  Layout layout = layout_named("ct_int4_asymmetric");
  const std::size_t at = layout.config.find("\"symmetric\":false");
  layout.config.replace(at, 17, "\"symmetric\":true ");
  const T tensors = qwen_tensors(kSizes, layout.write);
  QuantisedFiles(qwen_config(kSizes, layout.config), tensors)
      .expect_refused(ErrorCode::io, {"weight_zero_point", "symmetric"});
}

TEST(QuantisedCheckpoint, StatedShapes) {
  const Layout layout = layout_named("ct_int8_packed");
  T tensors = qwen_tensors(kSizes, layout.write);
  // 31 and 32 take the same words.
  tensor_named(tensors, "experts.1.up_proj.weight_shape").data = bytes_of<std::int64_t>({32, 63});
  QuantisedFiles(qwen_config(kSizes, layout.config), tensors)
      .expect_refused(ErrorCode::io, {"up_proj.weight_shape", "[32, 63]", "[32, 64]"});
}

TEST(QuantisedCheckpoint, SizesThatALayoutCannotHave) {
  const auto refused = [](const char* name, Sizes sizes, std::vector<std::string> parts) {
    const Layout layout = layout_named(name);
    QuantisedFiles(qwen_config(sizes, layout.config), qwen_tensors(sizes, layout.write))
        .expect_refused(ErrorCode::io, parts);
  };
  refused("ct_nvfp4", {64, 40, 1}, {"K = 40", "group size 16"});
  refused("ct_mxfp4", {80, 64, 1}, {"K = 80", "group size 32"});
  refused("awq", {64, 36, 1}, {"N = 36", "8"});
  refused("gptq", {72, 64, 1}, {"K = 72", "group size 16"});
  refused("ct_int4_asymmetric", {64, 40, 1}, {"K = 40"});
}

TEST(QuantisedCheckpoint, GlobalScales) {
  const Layout layout = layout_named("ct_nvfp4");
  T tensors = qwen_tensors(kSizes, layout.write);
  const QuantisedFiles files(qwen_config(kSizes, layout.config), tensors);
  const Checkpoint checkpoint = files.open();
  // 4 divides.
  EXPECT_EQ(*checkpoint.layers().front().weights.source(0).w2.scales.global, 0.25F);
  tensor_named(tensors, "experts.1.up_proj.weight_global_scale").data = bytes_of<float>({0.0F});
  QuantisedFiles(qwen_config(kSizes, layout.config), tensors)
      .expect_refused(ErrorCode::io, {"up_proj.weight_global_scale", "is 0", "divided"});
}

TEST(QuantisedCheckpoint, InputScalesAreKeptAndSaid) {
  const Layout layout = layout_named("modelopt_nvfp4");
  T tensors = qwen_tensors(kSizes, layout.write);
  const auto set = [&](const char* name, float value) {
    tensor_named(tensors, name).data = bytes_of<float>({value});
  };
  set("experts.0.gate_proj.input_scale", 0.5F);
  set("experts.0.up_proj.input_scale", 0.75F);
  set("experts.0.down_proj.input_scale", 2.0F);
  set("experts.1.gate_proj.input_scale", 3.0F);
  set("experts.1.up_proj.input_scale", 1.0F);
  set("experts.1.down_proj.input_scale", 4.0F);
  const QuantisedFiles files(qwen_config(kSizes, layout.config), tensors);
  const Checkpoint checkpoint = files.open();
  const MoeLayer& layer = checkpoint.layers().front();
  EXPECT_TRUE(layer.has_input_scales);
  EXPECT_EQ(*layer.weights.source(0).w13_input_scales, 0.75F);  // the larger one
  EXPECT_EQ(*layer.weights.source(1).w13_input_scales, 3.0F);
  EXPECT_EQ(*layer.weights.source(0).w2_input_scales, 2.0F);
  EXPECT_EQ(*layer.weights.source(1).w2_input_scales, 4.0F);
  const Listing listing = inspect_checkpoint(files.path());
  ASSERT_EQ(listing.notes.size(), 1U);
  EXPECT_NE(listing.notes.front().find("does not use them"), std::string::npos);
}

// What an expert was converted into lives as long as its weights, whatever becomes of the rest.
TEST(QuantisedCheckpoint, ExpertsOutliveTheCheckpoint) {
  const Layout layout = layout_named("awq");
  const QuantisedFiles files(qwen_config(kSizes, layout.config),
                             qwen_tensors(kSizes, layout.write));
  ExpertWeights expert;
  double before = 0;
  {
    const Checkpoint checkpoint = files.open();
    const auto source = checkpoint.layers().front().weights.source;
    expert = source(1);
    before = value_at(expert.w2, 63, 31);
  }
  EXPECT_EQ(value_at(expert.w2, 63, 31), before);
}

}  // namespace
}  // namespace fusedmoe::checkpoint
