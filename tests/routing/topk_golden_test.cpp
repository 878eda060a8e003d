// Routing against the reference models: every golden case's logits give its ids and weights.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "fusedmoe/routing.h"
#include "routing_oracle.h"

namespace fusedmoe {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

json read_json(const fs::path& path) { return json::parse(std::ifstream(path)); }

// The least that reads a sound safetensors file: a little-endian length, a JSON header, data.
class Safetensors {
 public:
  explicit Safetensors(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    std::uint64_t length = 0;
    file.read(reinterpret_cast<char*>(&length), 8);
    std::string header(length, '\0');
    file.read(header.data(), static_cast<std::streamsize>(length));
    header_ = json::parse(header);
    data_.assign(std::istreambuf_iterator<char>(file), {});
  }

  // The tensor whose name ends so, as a matrix; a vector becomes one row.
  std::optional<ConstMatrixView> find(const std::string& suffix) const {
    static const std::map<std::string, DType> kTypes = {{"F32", DType::f32},
                                                        {"F16", DType::f16},
                                                        {"BF16", DType::bf16},
                                                        {"I32", DType::i32},
                                                        {"I64", DType::i64}};
    for (const auto& [name, entry] : header_.items()) {
      if (name.size() < suffix.size() || !name.ends_with(suffix)) continue;
      const auto shape = entry.at("shape").get<std::vector<std::int64_t>>();
      return ConstMatrixView(data_.data() + entry.at("data_offsets").at(0).get<std::size_t>(),
                             kTypes.at(entry.at("dtype")), shape.size() == 1 ? 1 : shape.at(0),
                             shape.back());
    }
    return std::nullopt;
  }

 private:
  json header_;
  std::vector<char> data_;
};

std::int64_t id_at(const ConstMatrixView& view, std::int64_t row, std::int64_t column) {
  const auto index = row * view.row_stride + column;
  if (view.dtype == DType::i64) return static_cast<const std::int64_t*>(view.data)[index];
  return static_cast<const std::int32_t*>(view.data)[index];
}

RoutingConfig config_of(const json& router, std::int64_t top_k) {
  static const std::map<std::string, ScoreFunction> kKinds = {
      {"softmax_topk", ScoreFunction::softmax},
      {"topk_softmax", ScoreFunction::softmax_of_chosen},
      {"topk_sigmoid", ScoreFunction::sigmoid},
      {"sigmoid_bias_grouped", ScoreFunction::sigmoid}};
  RoutingConfig config{.score_function = kKinds.at(router.at("kind")), .top_k = top_k};
  if (router.value("renormalize", false)) {
    config.renormalise = Renormalise::sum;
    if (router.contains("renormalize_epsilon")) {
      config.renormalise = Renormalise::sum_epsilon;
      config.epsilon = router.at("renormalize_epsilon");
    }
  }
  config.num_groups = router.value("n_group", 1);
  config.topk_group = router.value("topk_group", 1);
  config.scaling_factor = router.value("scaling", 1.0F);
  return config;
}

void check(const fs::path& folder, const json& entry, const json& golden) {
  const Safetensors file(folder / golden.at("file").get<std::string>());
  const auto logits = file.find("router_logits");
  const auto expected_ids = file.find("topk_ids");
  const auto expected_weights = file.find("topk_weights");
  ASSERT_TRUE(logits && expected_ids && expected_weights);
  const std::int64_t top_k = entry.at("sizes").at("K");
  RoutingConfig config = config_of(entry.at("router"), top_k);

  std::vector<Safetensors> shards;  // they own the bias
  if (entry.at("router").contains("bias")) {
    for (const auto& item : fs::directory_iterator(folder)) {
      if (item.path().filename().string().starts_with("model")) shards.emplace_back(item.path());
    }
    for (const auto& shard : shards) {
      const auto bias = shard.find(entry.at("router").at("bias").get<std::string>());
      if (bias) config.selection_bias = *bias;
    }
    ASSERT_NE(config.selection_bias.data, nullptr);
  }

  TestMatrix weights(DType::f32, logits->rows, top_k);
  TestMatrix ids(expected_ids->dtype, logits->rows, top_k);
  route(config, *logits, weights.view(), ids.view());
  for (std::int64_t row = 0; row < logits->rows; ++row) {
    std::map<std::int64_t, double> got;
    std::map<std::int64_t, double> expected;
    for (std::int64_t k = 0; k < top_k; ++k) {
      got[ids.id(row, k)] = weights.get(row, k);
      expected[id_at(*expected_ids, row, k)] =
          static_cast<double>(static_cast<const float*>(expected_weights->data)[row * top_k + k]);
    }
    ASSERT_EQ(got.size(), static_cast<std::size_t>(top_k));
    for (const auto& [id, weight] : expected) {
      ASSERT_TRUE(got.contains(id)) << "row " << row << ": expert " << id << " not chosen";
      EXPECT_NEAR(got[id], weight, 2e-6) << "row " << row << ", expert " << id;
    }
  }
}

TEST(RoutingGolden, EveryCase) {
  const fs::path root = FUSEDMOE_GOLDEN_DIR;
  std::size_t checked = 0;
  const json manifest = read_json(root / "manifest.json");
  for (const auto& entry : manifest.at("cases")) {
    const std::string name = entry.at("name");
    SCOPED_TRACE(name);
    for (const auto& golden : entry.at("goldens")) {
      check(root / name, entry, golden);
      ++checked;
    }
  }
  EXPECT_GE(checked, 30U);
}

}  // namespace
}  // namespace fusedmoe
