// Every golden case: read, and every matrix of every expert found where the manifest's checksums
// say, through the views of ExpertWeights; or refused with the reason.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint.h"
#include "checkpoint/golden.h"
#include "test_files.h"

namespace fusedmoe::checkpoint {
namespace {

using nlohmann::json;

double decode(const std::byte* at, WeightFormat format) {
  if (format == WeightFormat::f32) {
    float value = 0;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  std::uint16_t half = 0;
  std::memcpy(&half, at, sizeof half);
  EXPECT_EQ(format, WeightFormat::bf16);
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16U;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Element (n, k) of expert e.
double element(const WeightTensor& tensor, std::int64_t e, std::int64_t n, std::int64_t k) {
  const std::int64_t bytes = tensor.format == WeightFormat::f32 ? 4 : 2;
  const std::int64_t row = tensor.layout == WeightLayout::nk ? n : k;
  const std::int64_t column = tensor.layout == WeightLayout::nk ? k : n;
  const std::int64_t columns = tensor.layout == WeightLayout::nk ? tensor.inputs : tensor.outputs;
  const std::int64_t index = e * tensor.outputs * tensor.inputs + row * columns + column;
  return decode(static_cast<const std::byte*>(tensor.data) + index * bytes, tensor.format);
}

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
      const double value = element(tensor, e, first + i * step, k);
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

bool is_unquantized(const json& entry) {
  return entry["container"] == "safetensors" &&
         (entry["format"] == "bf16" || entry["format"] == "f32");
}

class GoldenCase : public testing::TestWithParam<json> {
 protected:
  const json entry_ = GetParam();
  const std::filesystem::path folder_ = kGolden / entry_["name"].get<std::string>();
};

using ReadCase = GoldenCase;
using RefusedCase = GoldenCase;

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
    EXPECT_EQ(layer.config.dtype == DType::f32, entry_["dtype"] == "f32");
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
    EXPECT_EQ(layer.formats,
              std::vector<WeightFormat>{entry_["format"] == "f32" ? WeightFormat::f32
                                                                  : WeightFormat::bf16});
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
    const double* due = golden.weight_checksums.data();
    for (std::int64_t e = 0; e < golden.num_experts; ++e) {
      for (const Sums& got : expert_sums(*layer, e)) {
        EXPECT_NEAR(got.sum, due[0], 1e-9 * due[1]) << "expert " << e;
        EXPECT_NEAR(got.absolute, due[1], 1e-9 * due[1]) << "expert " << e;
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
  const json& s = entry_["sizes"];
  const std::int64_t matrices = entry_["gated"] ? 3 : 2;
  std::int64_t due = s["E"].get<std::int64_t>() * s["H"].get<std::int64_t>() *
                     s["I"].get<std::int64_t>() * matrices;
  if (entry_["bias"]) {
    due +=
        s["E"].get<std::int64_t>() * (2 * s["I"].get<std::int64_t>() + s["H"].get<std::int64_t>());
  }
  due *= entry_["format"] == "f32" ? 4 : 2;
  EXPECT_EQ(listing.bytes, due * static_cast<std::int64_t>(listing.layers.size()));
  for (const LayerListing& layer : listing.layers) EXPECT_TRUE(layer.complete);
}

TEST_P(RefusedCase, TheReasonIsNamed) {
  const std::string what = entry_["container"] == "gguf" ? "model.gguf" : "quant_method";
  expect_error(ErrorCode::unsupported, {entry_["name"], what}, [&] { Checkpoint::open(folder_); });
  const Listing listing = inspect_checkpoint(folder_);
  ASSERT_FALSE(listing.problems.empty());
  EXPECT_NE(listing.problems.front().find(what), std::string::npos);
}

std::vector<json> cases(bool unquantized) {
  std::vector<json> result;
  const json manifest = json::parse(std::ifstream(kGolden / "manifest.json"));
  for (const json& entry : manifest["cases"]) {
    if (is_unquantized(entry) == unquantized) result.push_back(entry);
  }
  return result;
}

std::string case_name(const testing::TestParamInfo<json>& info) { return info.param["name"]; }

INSTANTIATE_TEST_SUITE_P(Golden, ReadCase, testing::ValuesIn(cases(true)), case_name);
INSTANTIATE_TEST_SUITE_P(Golden, RefusedCase, testing::ValuesIn(cases(false)), case_name);

// Malformed checkpoints and GGUF files of bad/manifest.json. Quantised ones (missing_scale,
// wrong_scale_shape) and GGUF files are refused as unsupported before their fault is looked for.
TEST(GoldenBad, RefusedWithWhatTheManifestNames) {
  const json manifest = json::parse(std::ifstream(kGolden / "bad" / "manifest.json"));
  int seen = 0;
  for (const json& entry : manifest["files"]) {
    if (entry["kind"] == "safetensors") continue;
    ++seen;
    const std::string name = entry["path"];
    const std::filesystem::path path = kGolden / "bad" / name;
    const bool quantized = name == "missing_scale" || name == "wrong_scale_shape";
    if (entry["kind"] == "gguf" || quantized) {
      expect_error(ErrorCode::unsupported, {name}, [&] { Checkpoint::open(path); });
      EXPECT_FALSE(inspect_checkpoint(path).problems.empty());
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
