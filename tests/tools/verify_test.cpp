// `fusedmoe verify` on checkpoints, and `verify --random`.
#include <cstdint>
#include <fstream>
#include <set>

#include "run_command.h"

namespace fusedmoe::tool {
namespace {

constexpr const char* kKeys[] = {"path",   "layer",     "family",     "format",
                                 "device", "isa",       "num_tokens", "source",
                                 "rel_l2", "max_error", "tolerance",  "pass"};

std::string paths(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += " " + golden(name);
  return text;
}

TEST(Verify, EveryGoldenPasses) {
  const CommandResult result = run_command("verify --json" + paths(goldens()));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.errors, "");
  std::set<std::string> golden_paths;
  for (const nlohmann::json& row : result.rows()) {
    for (const char* key : kKeys) EXPECT_TRUE(row.contains(key)) << key;
    EXPECT_TRUE(row.at("pass").get<bool>()) << row;
    EXPECT_LE(row.at("rel_l2").get<double>(), row.at("tolerance").get<double>());
    if (row.at("source") != "golden") continue;
    EXPECT_EQ(row.at("routing"), "match") << row;
    golden_paths.insert(row.at("path"));
  }
  EXPECT_EQ(golden_paths.size(), goldens().size());
}

TEST(Verify, TheTableEndsWithASummary) {
  const CommandResult result =
      run_command("verify" + paths({"qwen3_moe_bf16_shards", "olmoe_f32"}));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.output.find("3 layers in 2 checkpoints verified, 6 comparisons, all within "
                               "tolerance\n"),
            std::string::npos)
      << result.output;
}

TEST(Verify, PicksLayersTokensThreadsAndInstructionSet) {
  const CommandResult result =
      run_command("verify --json --layer 1 --tokens 0,3,70 --threads 3 --isa scalar --seed 9" +
                  paths({"qwen3_moe_bf16_shards"}));
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  std::multiset<std::int64_t> tokens;
  for (const nlohmann::json& row : result.rows()) {
    EXPECT_EQ(row.at("layer"), 1);
    EXPECT_EQ(row.at("threads"), 3);
    EXPECT_EQ(row.at("isa"), "scalar");
    tokens.insert(row.at("num_tokens").get<std::int64_t>());
  }
  EXPECT_EQ(tokens, (std::multiset<std::int64_t>{0, 3, 19, 70}));
  EXPECT_EQ(run_command("verify --layer 7" + paths({"olmoe_f32"})).exit_code, 2);
}

TEST(Verify, BrokenInputIsRefused) {
  for (const std::string name :
       {"bad/missing_expert", "bad/missing_scale", "bad/wrong_scale_shape",
        "bad/truncated.safetensors", "bad/truncated_gguf.gguf", "nonexistent"}) {
    const CommandResult result = run_command("verify --json " + golden(name));
    EXPECT_EQ(result.exit_code, 2) << name;
    EXPECT_EQ(result.output, "") << name;
    EXPECT_EQ(result.errors.rfind("fusedmoe: ", 0), 0U) << name;
  }
}

TEST(Verify, OneBadPathDoesNotHideTheOthers) {
  const CommandResult result = run_command(
      "verify --json" + paths({"bad/missing_expert", "mixtral_bf16", "bad/missing_scale"}));
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.rows().size(), 2U);
  EXPECT_NE(result.errors.find("missing_expert"), std::string::npos);
  EXPECT_NE(result.errors.find("missing_scale"), std::string::npos);
}

// One float of a golden is moved.
TEST(Verify, AMismatchIsOneAndNamed) {
  const TestFolder folder;
  const std::filesystem::path model = folder / "model";
  std::filesystem::copy(golden("olmoe_f32"), model);
  const std::filesystem::path file = model / "golden.safetensors";
  std::filesystem::permissions(file, std::filesystem::perms::owner_all);
  std::string bytes = read_file(file);
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  const auto header = nlohmann::json::parse(bytes.substr(8, length));
  const std::size_t begin = header.at("expected").at("data_offsets").at(0);
  const float wrong = 17.0F;
  std::memcpy(bytes.data() + 8 + length + begin, &wrong, sizeof(wrong));
  std::ofstream(file, std::ios::binary) << bytes;
  const CommandResult json = run_command("verify --json " + model.string());
  EXPECT_EQ(json.exit_code, 1);
  for (const nlohmann::json& row : json.rows()) {
    EXPECT_EQ(row.at("pass").get<bool>(), row.at("source") == "oracle");
  }
  EXPECT_NE(json.errors.find("layer 0 golden"), std::string::npos);
  const CommandResult table = run_command("verify " + model.string());
  EXPECT_EQ(table.exit_code, 1);
  EXPECT_NE(table.output.find("1 not within tolerance:\n"), std::string::npos) << table.output;
}

// Scales of every expert (u8 exponents) are 2 too low, as a writer with another bias leaves them:
// the constant ratio is told. Of one matrix alone: that it differs.
TEST(Verify, B051_AConstantRatioOfWeightsIsTold) {
  const auto problem = [](const std::vector<std::string>& tensors) {
    const TestFolder folder;
    const std::filesystem::path model = folder / "model";
    std::filesystem::copy(golden("gpt_oss_mxfp4"), model);
    const std::filesystem::path file = model / "model.safetensors";
    std::filesystem::permissions(file, std::filesystem::perms::owner_all);
    std::string bytes = read_file(file);
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    const auto header = nlohmann::json::parse(bytes.substr(8, length));
    for (const std::string& tensor : tensors) {
      const auto& offsets = header.at("model.layers.0.mlp.experts." + tensor).at("data_offsets");
      for (std::size_t i = offsets.at(0); i < offsets.at(1); ++i) {
        char& exponent = bytes[8 + length + i];
        if (exponent != 0) exponent = static_cast<char>(exponent - 2);  // 0: blocks of zeros
      }
    }
    std::ofstream(file, std::ios::binary) << bytes;
    const CommandResult result = run_command("verify --json " + model.string());
    EXPECT_EQ(result.exit_code, 1) << result.errors;
    for (const nlohmann::json& row : result.rows()) {
      if (row.at("source") == "golden") return row.value("problem", std::string());
    }
    return std::string("no golden");
  };
  EXPECT_NE(problem({"gate_up_proj_scales", "down_proj_scales"})
                .find("all weights are 0.25 times those that the golden was made of"),
            std::string::npos);
  EXPECT_NE(problem({"down_proj_scales"}).find("5 of 15 matrices are not those"),
            std::string::npos);
}

TEST(VerifyRandom, PassesAndShowsWhatItCovered) {
  const CommandResult result = run_command("verify --random 60 --seed 3");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_NE(result.output.find("60 random layers verified, all within tolerance and bit-equal"),
            std::string::npos);
  for (const char* dimension : {"hidden_size", "activation", "workspace", "runner", "in place"}) {
    EXPECT_NE(result.output.find(dimension), std::string::npos) << dimension;
  }
}

TEST(VerifyRandom, EachCaseRepeatsByItsLine) {
  const CommandResult all = run_command("verify --random 5 --seed 21 --json --threads 2");
  ASSERT_EQ(all.exit_code, 0) << all.errors;
  ASSERT_EQ(all.rows().size(), 5U);
  EXPECT_EQ(all.rows()[0].at("seed"), 21);
  for (const nlohmann::json& row : all.rows()) {
    for (const char* key : kKeys) EXPECT_TRUE(row.contains(key)) << key;
    const std::string line = row.at("repeat");
    const std::string prefix = "fusedmoe verify --random 1 --seed ";
    ASSERT_EQ(line.rfind(prefix, 0), 0U) << line;
    const CommandResult one = run_command(line.substr(std::string("fusedmoe ").size()) + " --json");
    ASSERT_EQ(one.rows().size(), 1U);
    const nlohmann::json repeated = one.rows()[0];
    for (const char* key : {"case", "seed", "rel_l2", "max_error", "pass", "repeat", "threads"}) {
      EXPECT_EQ(repeated.at(key), row.at(key)) << key;
    }
  }
}

}  // namespace
}  // namespace fusedmoe::tool
