// The command's manners: verbs, exit codes, what goes to stdout and what to stderr.
#include "fusedmoe/version.h"
#include "run_command.h"

namespace fusedmoe::tool {
namespace {

TEST(Command, SaysItsVersion) {
  const CommandResult result = run_command("--version");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.output, std::string("fusedmoe ") + FUSEDMOE_VERSION + "\n");
  EXPECT_EQ(result.errors, "");
}

TEST(Command, HelpHasExamplesAndExitCodes) {
  const CommandResult result = run_command("--help");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.output.find("Examples:"), std::string::npos);
  EXPECT_NE(result.output.find("Exit codes:"), std::string::npos);
  for (const char* verb : {"info", "inspect", "verify", "bench"}) {
    const CommandResult help = run_command(std::string(verb) + " --help");
    EXPECT_EQ(help.exit_code, 0) << verb;
    EXPECT_NE(help.output.find("--json-file"), std::string::npos) << verb;
    EXPECT_EQ(help.errors, "") << verb;
  }
}

TEST(Command, WrongUsageIsTwoAndSaysSoOnStderrOnly) {
  for (const char* arguments :
       {"", "frobnicate", "--frobnicate", "info --frobnicate", "info extra", "inspect", "verify",
        "verify --random", "verify --random x", "verify --random 0", "verify --random -3",
        "verify --random 3 --layer 1", "verify --threads -1 x", "verify x --tokens -1",
        "verify --random 1 --seed x", "inspect a b"}) {
    const CommandResult result = run_command(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments;
    EXPECT_EQ(result.output, "") << arguments;
    EXPECT_EQ(result.errors.rfind("fusedmoe: ", 0), 0U) << arguments << ": " << result.errors;
  }
}

TEST(Command, AMissingDeviceIsThreeAndAnUnknownOneIsTwo) {
  const std::string path = golden("mixtral_bf16");
  bool some_missing = false;
  const auto info = run_command("info --json").rows();
  ASSERT_EQ(info.size(), 1U);
  for (const auto& device : info[0].at("devices")) {
    if (device.at("available").get<bool>()) continue;
    some_missing = true;
    const std::string name = device.at("name");
    for (const std::string& what : {path, std::string("--random 1")}) {
      const CommandResult result = run_command("verify " + what + " --device " + name);
      EXPECT_EQ(result.exit_code, 3) << name;
      EXPECT_EQ(result.output, "");
      EXPECT_NE(result.errors.find(device.at("reason").get<std::string>()), std::string::npos);
    }
  }
  if (!some_missing) GTEST_LOG_(INFO) << "every device is available here";
  EXPECT_EQ(run_command("verify " + path + " --device toaster").exit_code, 2);
}

TEST(Command, AFullDiskIsNoticedAndAClosedPipeIsQuiet) {
  const CommandResult full = run_command("info >/dev/full");
  EXPECT_EQ(full.exit_code, 2);
  EXPECT_NE(full.errors.find("fusedmoe: stdout: "), std::string::npos);
  const CommandResult pipe = run_command("verify --random 20 --json | head -n 1");
  EXPECT_EQ(pipe.errors, "");
  EXPECT_EQ(pipe.rows().size(), 1U);
  EXPECT_EQ(run_command("info >&-").errors, "");
}

TEST(Command, JsonFileThatCannotBeWrittenIsInput) {
  const CommandResult result = run_command("info --json-file /nonexistent/rows.json");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.errors.find("--json-file"), std::string::npos);
}

TEST(Info, HasTheKeysAndOneObject) {
  const CommandResult result = run_command("info --json");
  ASSERT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.errors, "");
  ASSERT_EQ(result.rows().size(), 1U);
  const nlohmann::json row = result.rows()[0];
  EXPECT_EQ(row.at("version"), FUSEDMOE_VERSION);
  EXPECT_TRUE(row.at("isa").is_string());
  EXPECT_GE(row.at("threads").get<int>(), 1);
  ASSERT_FALSE(row.at("devices").empty());
  for (const auto& device : row.at("devices")) {
    EXPECT_TRUE(device.at("name").is_string());
    EXPECT_TRUE(device.at("available").is_boolean());
    EXPECT_FALSE(device.at("reason").get<std::string>().empty());
  }
}

TEST(Info, SaysWhatLimitsTheInstructionSet) {
  const CommandResult result = run_command("info --json", "FUSEDMOE_ISA=scalar");
  ASSERT_EQ(result.rows().size(), 1U);
  EXPECT_EQ(result.rows()[0].at("isa"), "scalar");
  const CommandResult unknown = run_command("info", "FUSEDMOE_ISA=mmx");
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_NE(unknown.errors.find("FUSEDMOE_ISA"), std::string::npos);
}

TEST(Info, JsonFileHoldsTheRowAndStdoutTheTable) {
  const TestFolder folder;
  const std::string file = (folder / "rows.json").string();
  const CommandResult result = run_command("info --json-file " + file);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.output.rfind("version ", 0), 0U);
  const std::string text = read_file(file);
  EXPECT_EQ(nlohmann::json::parse(text).at("version"), FUSEDMOE_VERSION);
  EXPECT_EQ(text.back(), '\n');
  // Both at once: the same row twice, and nothing else.
  const CommandResult both = run_command("info --json --json-file " + file);
  EXPECT_EQ(both.output, read_file(file));
}

}  // namespace
}  // namespace fusedmoe::tool
