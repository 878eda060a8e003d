// A whole checkpoint: where its files are, and every way in which tensors and config disagree.
#include "checkpoint/checkpoint.h"

#include <gtest/gtest.h>

#include "checkpoint/golden.h"
#include "test_files.h"

namespace fusedmoe::checkpoint {
namespace {

constexpr char kConfig[] =
    R"({"model_type":"mixtral","hidden_size":6,"intermediate_size":4,"num_local_experts":2,
        "num_experts_per_tok":1,"num_hidden_layers":1,"hidden_act":"silu","dtype":"bfloat16"})";
const std::string kBlock = "model.layers.0.block_sparse_moe.";

std::vector<NewTensor> mixtral() {
  std::vector<NewTensor> tensors = {{kBlock + "gate.weight", {2, 6}}};
  for (const char* const expert : {"experts.0.", "experts.1."}) {
    tensors.push_back({kBlock + expert + "w1.weight", {4, 6}});
    tensors.push_back({kBlock + expert + "w2.weight", {6, 4}});
    tensors.push_back({kBlock + expert + "w3.weight", {4, 6}});
  }
  return tensors;
}

NewTensor& named(std::vector<NewTensor>& tensors, const std::string& rest) {
  for (NewTensor& tensor : tensors) {
    if (tensor.name == kBlock + rest) return tensor;
  }
  ADD_FAILURE() << "no tensor " << rest;
  return tensors.front();
}

void expect_refused(const std::vector<NewTensor>& tensors, ErrorCode code,
                    std::vector<std::string> parts) {
  const TempFolder folder;
  folder.write("config.json", kConfig);
  parts.push_back(folder.write("model.safetensors", make_safetensors(tensors)).string());
  expect_error(code, parts, [&] { Checkpoint::open(folder.path()); });
  const Listing listing = inspect_checkpoint(folder.path());
  EXPECT_FALSE(listing.problems.empty());
  EXPECT_EQ(listing.family, "mixtral");
  EXPECT_EQ(listing.num_tensors, static_cast<std::int64_t>(tensors.size()));
  ASSERT_FALSE(listing.layers.empty());
}

TEST(Checkpoint, MissingTensors) {
  std::vector<NewTensor> tensors = mixtral();
  tensors.pop_back();
  expect_refused(tensors, ErrorCode::io, {kBlock + "experts.1.w3.weight", "is missing"});
  tensors = mixtral();
  tensors.erase(tensors.begin() + 1, tensors.begin() + 3);
  expect_refused(tensors, ErrorCode::io, {kBlock + "experts.0.w1.weight", "and 1 more"});
  tensors.erase(tensors.begin() + 1, tensors.end());
  expect_refused(tensors, ErrorCode::io, {kBlock + "experts.0.w1.weight", "and 5 more", "layer 0"});
  tensors = mixtral();
  tensors.erase(tensors.begin());
  expect_refused(tensors, ErrorCode::io, {kBlock + "gate.weight", "is missing"});
}

TEST(Checkpoint, ExpertsBeyondTheCount) {
  std::vector<NewTensor> tensors = mixtral();
  tensors.push_back({kBlock + "experts.2.w1.weight", {4, 6}});
  expect_refused(tensors, ErrorCode::io, {kBlock + "experts.2.w1.weight", "config.json", "are 2"});
  // As many tensors as are due, but of other experts.
  tensors = mixtral();
  named(tensors, "experts.1.w3.weight").name = kBlock + "experts.99999999999999999999.w3.weight";
  expect_refused(tensors, ErrorCode::io, {kBlock + "experts.99999999999999999999.w3.weight"});
}

TEST(Checkpoint, ShapesThatDoNotFit) {
  for (const std::vector<std::int64_t>& shape :
       {std::vector<std::int64_t>{6, 4}, {4, 5}, {24}, {1, 4, 6}, {0, 6}, {}}) {
    std::vector<NewTensor> tensors = mixtral();
    named(tensors, "experts.1.w3.weight").shape = shape;
    expect_refused(tensors, ErrorCode::io,
                   {kBlock + "experts.1.w3.weight", "shape " + shape_text(shape), "[4, 6]"});
  }
  std::vector<NewTensor> tensors = mixtral();
  named(tensors, "gate.weight").shape = {3, 6};
  expect_refused(tensors, ErrorCode::io, {kBlock + "gate.weight", "[3, 6]", "[2, 6]"});
}

TEST(Checkpoint, DtypesThatDoNotFit) {
  std::vector<NewTensor> tensors = mixtral();
  named(tensors, "experts.1.w2.weight").type = "F16";
  expect_refused(tensors, ErrorCode::io,
                 {kBlock + "experts.1.w2.weight", "F16", "BF16", "one dtype over all experts"});
  named(tensors, "experts.0.w2.weight").type = "F64";
  named(tensors, "experts.1.w2.weight").type = "F64";
  expect_refused(tensors, ErrorCode::unsupported, {kBlock + "experts.0.w2.weight", "F64"});
  named(tensors, "experts.0.w2.weight").type = "F8_E4M3";
  named(tensors, "experts.1.w2.weight").type = "F8_E4M3";
  expect_refused(tensors, ErrorCode::unsupported, {kBlock + "experts.0.w2.weight", "F8_E4M3"});
}

TEST(Checkpoint, MatricesMayDifferInDtype) {
  std::vector<NewTensor> tensors = mixtral();
  named(tensors, "experts.0.w2.weight").type = "F32";
  named(tensors, "experts.1.w2.weight").type = "F32";
  const TempFolder folder;
  folder.write("config.json", kConfig);
  folder.write("model.safetensors", make_safetensors(tensors));
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  const MoeLayer& layer = checkpoint.layers().front();
  EXPECT_EQ(layer.weights.w13.format, WeightFormat::bf16);
  EXPECT_EQ(layer.weights.w2.format, WeightFormat::f32);
  EXPECT_EQ(layer.formats, (std::vector<WeightFormat>{WeightFormat::bf16, WeightFormat::f32}));
}

TEST(Checkpoint, TensorsThatLookLikeExperts) {
  std::vector<NewTensor> tensors = mixtral();
  tensors.push_back({kBlock + "experts.0.w4.weight", {1}});
  expect_refused(tensors, ErrorCode::io, {kBlock + "experts.0.w4.weight", "layer 0", "mixtral"});
  tensors.back().name = kBlock + "experts.0.w1.weight_scale";
  expect_refused(tensors, ErrorCode::unsupported, {tensors.back().name, "quantised"});
  tensors.back().name = "model.layers.1.block_sparse_moe.experts.0.w1.weight";
  expect_refused(tensors, ErrorCode::io, {tensors.back().name, "layer 1", "there are 1 layers"});
  // Many faults: a bounded list.
  for (int i = 0; i < 500; ++i) {
    tensors.push_back({kBlock + "experts." + std::to_string(i) + ".x", {1}});
  }
  expect_refused(tensors, ErrorCode::io, {"and 500 more problems"});
}

TEST(Checkpoint, TwoWaysOfStoringALayer) {
  const TempFolder folder;
  const std::string block = "model.language_model.layers.0.mlp.";
  folder.write("config.json",
               R"({"model_type":"qwen3_5_moe","text_config":{"hidden_size":6,"num_experts":1,
                   "moe_intermediate_size":4,"num_experts_per_tok":1,"num_hidden_layers":1,
                   "hidden_act":"silu","dtype":"bfloat16"}})");
  folder.write("model.safetensors", make_safetensors({{block + "experts.gate_up_proj", {1, 8, 6}},
                                                      {block + "experts.down_proj", {1, 6, 4}},
                                                      {block + "experts.0.up_proj.weight", {4, 6}},
                                                      {block + "gate.weight", {1, 6}}}));
  expect_error(ErrorCode::io, {"experts.0.up_proj.weight", "experts.down_proj"},
               [&] { Checkpoint::open(folder.path()); });
}

// Layer 0 is dense; layer 2 predicts a further token and may be there or not.
TEST(Checkpoint, DenseLayersAndExtraLayers) {
  const std::string config =
      R"({"model_type":"glm4_moe","hidden_size":6,"moe_intermediate_size":4,"n_routed_experts":1,
          "num_experts_per_tok":1,"num_hidden_layers":2,"first_k_dense_replace":1,"n_group":1,
          "topk_group":1,"routed_scaling_factor":1.0,"hidden_act":"silu","dtype":"bfloat16",
          "num_nextn_predict_layers":1})";
  const auto layer = [](int index) {
    const std::string block = "model.layers." + std::to_string(index) + ".mlp.";
    return std::vector<NewTensor>{{block + "experts.0.gate_proj.weight", {4, 6}},
                                  {block + "experts.0.up_proj.weight", {4, 6}},
                                  {block + "experts.0.down_proj.weight", {6, 4}},
                                  {block + "gate.weight", {1, 6}},
                                  {block + "gate.e_score_correction_bias", {1}, "F32"}};
  };
  const auto indices = [&](std::vector<int> layers) {
    const TempFolder folder;
    std::vector<NewTensor> tensors = {{"model.layers.0.mlp.gate_proj.weight", {4, 6}}};
    for (const int index : layers) {
      for (const NewTensor& tensor : layer(index)) tensors.push_back(tensor);
    }
    folder.write("config.json", config);
    folder.write("model.safetensors", make_safetensors(tensors));
    std::vector<std::int64_t> result;
    const Checkpoint checkpoint = Checkpoint::open(folder.path());
    EXPECT_EQ(inspect_checkpoint(folder.path()).layers.size(), layers.size());
    for (const MoeLayer& found : checkpoint.layers()) result.push_back(found.index);
    return result;
  };
  EXPECT_EQ(indices({1}), (std::vector<std::int64_t>{1}));
  EXPECT_EQ(indices({1, 2}), (std::vector<std::int64_t>{1, 2}));
  expect_error(ErrorCode::io, {"model.layers.0.mlp.experts", "layer has no experts"}, [&] {
    indices({0, 1});
  });
  expect_error(ErrorCode::io, {"model.layers.3.mlp.experts", "layer 3"}, [&] { indices({1, 3}); });
}

TEST(Checkpoint, WhereFilesAre) {
  const TempFolder folder;
  const auto refused = [&](const std::filesystem::path& path, std::vector<std::string> parts) {
    expect_error(ErrorCode::io, parts, [&] { Checkpoint::open(path); });
  };
  refused(folder.path() / "none", {"none", "no such"});
  expect_error(ErrorCode::io, {"no such"}, [&] { inspect_checkpoint(folder.path() / "none"); });
  refused(folder.path(), {"model.safetensors", "model.safetensors.index.json"});
  folder.write("golden.safetensors", make_safetensors(mixtral()));
  refused(folder.path() / "golden.safetensors", {"golden", "never weights"});
  folder.write("x.txt", "x");
  refused(folder.path() / "x.txt", {"x.txt", "expected a folder"});
  folder.write("model-00001-of-00002.safetensors", make_safetensors(mixtral()));
  refused(folder.path(), {"1 other", "index"});
  std::filesystem::rename(folder.path() / "model-00001-of-00002.safetensors",
                          folder.path() / "model.safetensors");
  refused(folder.path(), {"config.json", "missing"});

  // A bare file is listed without a config, and read with one from elsewhere.
  const Listing listing = inspect_checkpoint(folder.path() / "model.safetensors");
  EXPECT_EQ(listing.num_tensors, 7);
  EXPECT_TRUE(listing.problems.empty());
  EXPECT_TRUE(listing.family.empty());
  const TempFolder elsewhere;
  const std::filesystem::path config = elsewhere.write("c.json", kConfig);
  EXPECT_EQ(Checkpoint::open(folder.path() / "model.safetensors", config).layers().size(), 1U);
  EXPECT_EQ(Checkpoint::open(folder.path(), config).layers().size(), 1U);
  EXPECT_EQ(inspect_checkpoint(folder.path(), config).bytes, 288);
  refused(folder.path() / "model.safetensors", {"config.json", "missing"});

  folder.write("config.json", kConfig);
  folder.write("other.safetensors", make_safetensors(mixtral()));
  folder.write("model.safetensors.index.json", R"({"weight_map":{"x":"other.safetensors"}})");
  refused(folder.path(), {"model.safetensors.index.json", "remove one"});
  folder.write("hf_quant_config.json", "{}");
  std::filesystem::remove(folder.path() / "model.safetensors.index.json");
  refused(folder.path(), {"hf_quant_config.json", "quantization", "missing"});
}

TEST(Checkpoint, OddFileNames) {
  const TempFolder folder;
  const std::filesystem::path odd = folder.path() / "a b\n\xc3\xa9 '\"%s{}\xff";
  std::filesystem::create_directory(odd);
  std::filesystem::copy(kGolden / "mixtral_bf16", odd);
  EXPECT_EQ(Checkpoint::open(odd).layers().size(), 1U);
  EXPECT_EQ(read_goldens(odd).size(), 1U);
  EXPECT_EQ(read_goldens(odd / "model.safetensors").size(), 1U);
}

// The source of a layer keeps the maps alive; so does a copy of it.
TEST(Checkpoint, SourceOutlivesTheCheckpoint) {
  auto checkpoint = std::make_unique<Checkpoint>(Checkpoint::open(kGolden / "mixtral_bf16"));
  const auto source = checkpoint->layers().front().weights.source;
  checkpoint.reset();
  const ExpertWeights expert = source(3);
  const auto* const bytes = static_cast<const unsigned char*>(expert.w2.data);
  unsigned sum = 0;
  for (int i = 0; i < 100; ++i) sum += bytes[i];
  EXPECT_GT(sum, 0U);
}

TEST(Golden, BrokenOnes) {
  const auto refused = [](const std::string& text, const std::vector<std::string>& parts) {
    const TempFolder folder;
    folder.write("golden.safetensors", text);
    expect_error(ErrorCode::io, parts, [&] { read_goldens(folder.path()); });
  };
  refused("x", {"golden.safetensors", "file size"});
  refused(make_safetensors({}), {"golden.safetensors", "'layer'"});
  refused(safetensors_text(R"({"__metadata__":{"layer":"x"}})", ""), {"'layer'", "'x'"});
  refused(safetensors_text(R"({"__metadata__":{"layer":"0"}})", ""), {"'hidden'", "missing"});
  const std::string head = R"({"__metadata__":{"layer":"0"},"hidden":{"dtype":)";
  refused(safetensors_text(head + R"("I32","shape":[1,1],"data_offsets":[0,4]}})", "abcd"),
          {"'hidden'", "I32"});
  refused(safetensors_text(head + R"("F32","shape":[1,1],"data_offsets":[0,4]},
      "topk_ids":{"dtype":"I32","shape":[2,1],"data_offsets":[4,12]},
      "topk_weights":{"dtype":"F32","shape":[2,1],"data_offsets":[12,20]},
      "expected":{"dtype":"F32","shape":[1,1],"data_offsets":[20,24]}})",
                           std::string(24, 'x')),
          {"'topk_ids'", "[2, 1]", "[1, 1]"});
}

}  // namespace
}  // namespace fusedmoe::checkpoint
