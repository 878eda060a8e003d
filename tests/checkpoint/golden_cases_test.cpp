// Every golden case: read, and every matrix of every expert found as the manifest's checksums say,
// through the views of ExpertWeights and the definitions of the formats. Every malformed file:
// refused with what its manifest names.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint.h"
#include "checkpoint/gguf.h"
#include "checkpoint/golden.h"
#include "checkpoint/safetensors.h"
#include "formats/format.h"
#include "test_files.h"

namespace fusedmoe::checkpoint {
namespace {

using nlohmann::json;

struct Sums {
  double sum = 0;
  double absolute = 0;
};

// Over rows first, first + step, ... : `count` of them.
Sums sums(const WeightTensor& tensor, std::int64_t e, std::int64_t first, std::int64_t step,
          std::int64_t count) {
  Sums result;
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::int64_t k = 0; k < tensor.inputs; ++k) {
      const double value = format_info(tensor.format).decode(tensor, e, first + i * step, k);
      result.sum += value;
      result.absolute += std::abs(value);
    }
  }
  return result;
}

// gate, up, down; or up, down.
std::vector<Sums> expert_sums(const MoeLayer& layer, std::int64_t e) {
  const bool one_by_one = static_cast<bool>(layer.weights.source);
  const ExpertWeights weights = one_by_one ? layer.weights.source(e) : layer.weights;
  const std::int64_t index = one_by_one ? 0 : e;
  const std::int64_t i = layer.config.intermediate_size;
  const std::int64_t h = layer.config.hidden_size;
  const Sums down = sums(weights.w2, index, 0, 1, h);
  if (layer.config.activation.kind == Activation::relu2) {
    return {sums(weights.w13, index, 0, 1, i), down};
  }
  if (!weights.w13_up.empty()) {
    return {sums(weights.w13, index, 0, 1, i), sums(weights.w13_up, index, 0, 1, i), down};
  }
  const bool halves = layer.config.gate_up_layout == GateUpLayout::halves;
  return {sums(weights.w13, index, 0, halves ? 1 : 2, i),
          sums(weights.w13, index, halves ? i : 1, halves ? 1 : 2, i), down};
}

// The formats that weights of a case come out in.
std::vector<WeightFormat> formats_of(const std::string& name) {
  using enum WeightFormat;
  static const std::map<std::string, std::vector<WeightFormat>> kFormats = {
      {"olmoe_f32", {f32}},
      {"deepseek_v3_fp8_block", {fp8_e4m3}},
      {"gpt_oss_mxfp4", {mxfp4}},
      {"ct_fp8_channel", {fp8_e4m3}},
      {"ct_fp8_tensor", {fp8_e4m3}},
      {"ct_int4_group32", {int4}},
      {"ct_int4_group128_asym", {int4}},
      {"ct_int8_channel", {int8}},
      {"ct_int8_packed", {int8}},
      {"gptq_int4", {int4}},
      {"awq_int4", {int4}},
      {"modelopt_nvfp4", {nvfp4}},
      {"ct_nvfp4", {nvfp4}},
      {"gguf_q8_0", {int8}},
      {"gguf_q4_0_fused", {int4}},
      {"gguf_bf16_f16", {bf16, f16}},
      {"gguf_mxfp4", {mxfp4}},
      {"gguf_q4_k_q6_k", {q4_k, q6_k}},
  };
  const auto found = kFormats.find(name);
  return found == kFormats.end() ? std::vector<WeightFormat>{bf16} : found->second;
}

// Name and bytes of every tensor of a case.
std::vector<std::pair<std::string, std::int64_t>> tensors_of(const std::filesystem::path& folder) {
  std::vector<std::pair<std::string, std::int64_t>> result;
  const auto add = [&](const std::vector<Tensor>& tensors) {
    for (const Tensor& tensor : tensors) result.emplace_back(tensor.name, tensor.bytes);
  };
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string extension = entry.path().extension().string();
    if (extension == ".gguf") add(GgufFile(entry.path()).tensors());
    if (extension == ".safetensors" && !is_golden_file(entry.path())) {
      add(SafetensorsFile(entry.path()).tensors());
    }
  }
  return result;
}

class GoldenCase : public testing::TestWithParam<json> {
 protected:
  const json entry_ = GetParam();
  const std::filesystem::path folder_ = kGolden / entry_["name"].get<std::string>();
};

using ReadCase = GoldenCase;
using GgufCase = GoldenCase;

TEST_P(ReadCase, ConfigIsTheManifests) {
  const Checkpoint checkpoint = Checkpoint::open(folder_);
  EXPECT_EQ(checkpoint.family(), entry_["family"]);
  EXPECT_EQ(checkpoint.model().num_layers, entry_["num_layers"]);
  std::vector<std::int64_t> indices;
  for (const MoeLayer& layer : checkpoint.layers()) {
    indices.push_back(layer.index);
    const json& sizes = entry_["sizes"];
    EXPECT_EQ(layer.config.hidden_size, sizes["H"]);
    EXPECT_EQ(layer.config.intermediate_size, sizes["I"]);
    EXPECT_EQ(layer.config.num_experts, sizes["E"]);
    EXPECT_EQ(layer.config.top_k, sizes["K"]);
    const std::string dtype = entry_["dtype"];
    EXPECT_EQ(layer.config.dtype, dtype == "f32"   ? DType::f32
                                  : dtype == "f16" ? DType::f16
                                                   : DType::bf16);
    EXPECT_EQ(layer.config.apply_router_weight_on_input, entry_["apply_router_weight_on_input"]);
    EXPECT_EQ(layer.config.gate_up_layout == GateUpLayout::interleaved,
              entry_["gate_up_layout"] == "interleaved");
    const std::string kind = entry_["activation"]["kind"];
    const Activation activation = kind == "silu"        ? Activation::silu
                                  : kind == "gelu"      ? Activation::gelu
                                  : kind == "gelu_tanh" ? Activation::gelu_tanh
                                  : kind == "swigluoai" ? Activation::swigluoai
                                                        : Activation::relu2;
    EXPECT_EQ(layer.config.activation.kind, activation) << kind;
    const std::string order = entry_["tensor_order"];
    EXPECT_EQ(layer.weights.w13.layout == WeightLayout::kn, order == "KN");
    EXPECT_EQ(layer.weights.w2.layout == WeightLayout::kn, order != "NK");
    EXPECT_EQ(!layer.weights.w13_bias.empty(), entry_["bias"]);
    EXPECT_EQ(!layer.weights.w2_bias.empty(), entry_["bias"]);
    EXPECT_EQ(!layer.weights.w13_up.empty(), entry_["gate_up_layout"] == "separate");
    EXPECT_EQ(layer.formats, formats_of(entry_["name"]));
    const bool input_scales =
        entry_.contains("quantisation") && entry_["quantisation"].contains("input_scale");
    EXPECT_EQ(layer.has_input_scales, input_scales);
    EXPECT_TRUE(layer.notes.empty());
  }
  EXPECT_EQ(indices, entry_["moe_layers"].get<std::vector<std::int64_t>>());
}

TEST_P(ReadCase, RouterIsTheManifests) {
  const Checkpoint checkpoint = Checkpoint::open(folder_);
  for (const MoeLayer& layer : checkpoint.layers()) {
    const json& router = entry_["router"];
    EXPECT_EQ(to_string(layer.router.kind), router["kind"]);
    EXPECT_EQ(layer.router.renormalize, router.value("renormalize", false));
    EXPECT_EQ(layer.router.epsilon, router.value("renormalize_epsilon", 0.0));
    EXPECT_EQ(layer.router.n_group, router.value("n_group", 1));
    EXPECT_EQ(layer.router.topk_group, router.value("topk_group", 1));
    EXPECT_EQ(layer.router.scaling, router.value("scaling", 1.0));
    std::string prefix = entry_["tensors"]["prefix"];
    prefix.replace(prefix.find("{L}"), 3, std::to_string(layer.index));
    EXPECT_EQ(layer.router.weight, prefix + entry_["tensors"]["router_weight"].get<std::string>());
    EXPECT_NE(layer.router_weight.data, nullptr);
    EXPECT_EQ(layer.router_weight.rows, layer.config.num_experts);
    EXPECT_EQ(layer.router_weight.columns, layer.config.hidden_size);
    EXPECT_EQ(layer.router_selection_bias.data != nullptr, router.contains("bias"));
    EXPECT_EQ(layer.router_logit_bias.data != nullptr, router.contains("logit_bias"));
  }
}

TEST_P(ReadCase, EveryMatrixHasItsChecksum) {
  const Checkpoint checkpoint = Checkpoint::open(folder_);
  const std::vector<Golden> goldens = read_goldens(folder_);
  ASSERT_EQ(goldens.size(), entry_["goldens"].size());
  for (const Golden& golden : goldens) {
    const MoeLayer* const layer = checkpoint.find_layer(golden.layer);
    ASSERT_NE(layer, nullptr);
    ASSERT_EQ(golden.num_experts, layer->config.num_experts);
    ASSERT_EQ(golden.num_matrices, entry_["gated"] ? 3 : 2);
    EXPECT_EQ(golden.hidden.rows, entry_["sizes"]["T"]);
    EXPECT_EQ(golden.expected.columns, layer->config.hidden_size);
    EXPECT_EQ(golden.topk_ids.columns, layer->config.top_k);
    EXPECT_EQ(golden.router_logits.columns, layer->config.num_experts);
    // The reciprocal of compressed-tensors' global scale is rounded to f32 once.
    const double tolerance = entry_["name"] == "ct_nvfp4" ? 1e-7 : 1e-9;
    const double* due = golden.weight_checksums.data();
    for (std::int64_t e = 0; e < golden.num_experts; ++e) {
      for (const Sums& got : expert_sums(*layer, e)) {
        EXPECT_NEAR(got.sum, due[0], tolerance * due[1]) << "expert " << e;
        EXPECT_NEAR(got.absolute, due[1], tolerance * due[1]) << "expert " << e;
        due += 2;
      }
    }
  }
}

TEST_P(ReadCase, ListingHasNoProblems) {
  const Listing listing = inspect_checkpoint(folder_);
  EXPECT_EQ(listing.problems, std::vector<std::string>());
  EXPECT_EQ(listing.family, entry_["family"]);
  EXPECT_EQ(listing.layers.size(), entry_["moe_layers"].size());
  std::int64_t due = 0;
  for (const auto& [name, bytes] : tensors_of(folder_)) {
    const bool router = name.find("gate_inp") != std::string::npos;
    if ((name.find("experts.") != std::string::npos || name.find("_exps.") != std::string::npos ||
         name.find("put_linear.") != std::string::npos) &&
        name.find("shared") == std::string::npos && !router) {
      due += bytes;
    }
  }
  EXPECT_EQ(listing.bytes, due);
  for (const LayerListing& layer : listing.layers) EXPECT_TRUE(layer.complete);
}

// Without the config beside it, a GGUF file says itself what it holds.
TEST_P(GgufCase, NeedsNoConfig) {
  const TempFolder folder;
  std::filesystem::copy(folder_ / "model.gguf", folder.path());
  const Checkpoint alone = Checkpoint::open(folder.path() / "model.gguf");
  const Checkpoint beside = Checkpoint::open(folder_ / "model.gguf");
  EXPECT_EQ(alone.family(), entry_["family"]);
  ASSERT_EQ(alone.layers().size(), beside.layers().size());
  const MoeLayer& a = alone.layers().front();
  const MoeLayer& b = beside.layers().front();
  EXPECT_EQ(a.config.dtype, DType::f32);
  EXPECT_EQ(a.config.hidden_size, b.config.hidden_size);
  EXPECT_EQ(a.config.intermediate_size, b.config.intermediate_size);
  EXPECT_EQ(a.config.num_experts, b.config.num_experts);
  EXPECT_EQ(a.config.top_k, b.config.top_k);
  EXPECT_EQ(a.config.activation.kind, b.config.activation.kind);
  EXPECT_EQ(a.config.gate_up_layout, b.config.gate_up_layout);
  EXPECT_EQ(a.router.kind, b.router.kind);
  EXPECT_EQ(a.router.renormalize, b.router.renormalize);
  EXPECT_EQ(a.router.scaling, b.router.scaling);
  EXPECT_EQ(a.formats, b.formats);
  EXPECT_EQ(a.bytes, b.bytes);
}

std::vector<json> cases(bool gguf_only) {
  const json manifest = json::parse(std::ifstream(kGolden / "manifest.json"));
  std::vector<json> result;
  for (const json& entry : manifest["cases"]) {
    if (!gguf_only || entry["container"] == "gguf") result.push_back(entry);
  }
  return result;
}

std::string case_name(const testing::TestParamInfo<json>& info) { return info.param["name"]; }

INSTANTIATE_TEST_SUITE_P(Golden, ReadCase, testing::ValuesIn(cases(false)), case_name);
INSTANTIATE_TEST_SUITE_P(Golden, GgufCase, testing::ValuesIn(cases(true)), case_name);

// Bare .safetensors files of the manifest are read in safetensors_test.cpp.
TEST(GoldenBad, RefusedWithWhatTheManifestNames) {
  const json manifest = json::parse(std::ifstream(kGolden / "bad" / "manifest.json"));
  int seen = 0;
  for (const json& entry : manifest["files"]) {
    if (entry["kind"] == "safetensors") continue;
    ++seen;
    const std::string name = entry["path"];
    SCOPED_TRACE(name);
    const std::filesystem::path path = kGolden / "bad" / name;
    if (entry["fault"].is_null()) {
      EXPECT_EQ(Checkpoint::open(path).layers().size(), 1U);
      EXPECT_TRUE(inspect_checkpoint(path).problems.empty());
      continue;
    }
    std::vector<std::string> parts;
    for (const json& part : entry["message_names"]) {
      parts.push_back(part == "file" ? name : part.get<std::string>());
    }
    expect_error(ErrorCode::io, parts, [&] { Checkpoint::open(path); });
    EXPECT_FALSE(inspect_checkpoint(path).problems.empty());
  }
  EXPECT_EQ(seen, 12);
}

}  // namespace
}  // namespace fusedmoe::checkpoint
