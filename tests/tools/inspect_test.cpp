// `fusedmoe inspect` on the golden checkpoints and on broken ones.
#include "run_command.h"

namespace fusedmoe::tool {
namespace {

nlohmann::json inspect(const std::string& arguments, int exit_code) {
  const CommandResult result = run_command("inspect --json " + arguments);
  EXPECT_EQ(result.exit_code, exit_code) << arguments << ": " << result.errors;
  const auto rows = result.rows();
  EXPECT_EQ(rows.size(), 1U) << arguments;
  return rows.empty() ? nlohmann::json() : rows[0];
}

TEST(Inspect, TellsTheSizesOfEveryGolden) {
  const auto manifest = nlohmann::json::parse(read_file(golden("manifest.json")));
  std::size_t seen = 0;
  for (const std::string& name : goldens()) {
    SCOPED_TRACE(name);
    const nlohmann::json row = inspect(golden(name), 0);
    for (const auto& entry : manifest.at("cases")) {
      if (entry.at("name") != name) continue;
      const auto& sizes = entry.at("sizes");
      EXPECT_EQ(row.at("path"), golden(name));
      EXPECT_EQ(row.at("family"), entry.at("family"));
      // The manifest names schemes of checkpoints, which are formats where nothing is quantised.
      const std::string format = entry.at("format");
      if (format == "bf16" || format == "f32") {
        EXPECT_EQ(row.at("format"), format);
      }
      EXPECT_FALSE(row.at("format").get<std::string>().empty());
      EXPECT_EQ(row.at("layers"), entry.at("moe_layers").size());
      EXPECT_EQ(row.at("hidden_size"), sizes.at("H"));
      EXPECT_EQ(row.at("intermediate_size"), sizes.at("I"));
      EXPECT_EQ(row.at("num_experts"), sizes.at("E"));
      EXPECT_EQ(row.at("top_k"), sizes.at("K"));
      EXPECT_GT(row.at("bytes").get<std::int64_t>(), 0);
      EXPECT_TRUE(row.at("problems").empty());
      ++seen;
    }
  }
  EXPECT_GE(seen, 12U);
}

// Every file and folder in golden/bad, quantised ones and GGUF too: 2, with a message that names
// it.
TEST(Inspect, BrokenInputIsTwo) {
  const auto manifest = nlohmann::json::parse(read_file(golden("bad/manifest.json")));
  for (const auto& entry : manifest.at("files")) {
    const std::string path = golden("bad/" + entry.at("path").get<std::string>());
    SCOPED_TRACE(path);
    if (entry.at("fault").is_null()) continue;
    const CommandResult result = run_command("inspect " + path);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.errors.rfind("fusedmoe: ", 0), 0U);
    EXPECT_NE(result.errors.find("bad/"), std::string::npos);
    EXPECT_FALSE(inspect(path, 2).at("problems").empty());
  }
}

TEST(Inspect, ABareFileListsItsTensors) {
  const nlohmann::json row = inspect(golden("bad/control.safetensors"), 0);
  ASSERT_FALSE(row.at("tensor_list").empty());
  for (const auto& tensor : row.at("tensor_list")) {
    EXPECT_TRUE(tensor.at("shape").is_array());
    EXPECT_GT(tensor.at("bytes").get<std::int64_t>(), 0);
  }
  EXPECT_TRUE(row.at("family").is_null());
  const nlohmann::json beside_config = inspect(golden("mixtral_bf16/model.safetensors"), 0);
  EXPECT_EQ(beside_config.at("family"), "mixtral");
  EXPECT_EQ(beside_config.at("layers"), 1);
  // A golden is no checkpoint, but its tensors can be listed.
  EXPECT_FALSE(inspect(golden("mixtral_bf16/golden.safetensors"), 0).at("tensor_list").empty());
}

TEST(Inspect, TakesAConfigFromElsewhere) {
  const TestFolder folder;
  const std::filesystem::path weights = folder / "w.safetensors";
  std::filesystem::copy_file(golden("mixtral_bf16/model.safetensors"), weights);
  EXPECT_TRUE(inspect(weights.string(), 0).at("family").is_null());
  const nlohmann::json row =
      inspect(weights.string() + " --config " + golden("mixtral_bf16/config.json"), 0);
  EXPECT_EQ(row.at("family"), "mixtral");
  EXPECT_EQ(row.at("format"), "bf16");
}

TEST(Inspect, APathThatIsNotThereIsTwo) {
  const CommandResult result = run_command("inspect /nonexistent/model");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.output, "");
  EXPECT_NE(result.errors.find("/nonexistent/model"), std::string::npos);
}

}  // namespace
}  // namespace fusedmoe::tool
