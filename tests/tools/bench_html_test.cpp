// The page of `bench --html`: one file that needs no other, with the plots and the rows of the run.
#include "bench_html.h"

#include <gtest/gtest.h>

#include <regex>
#include <set>

#include "fusedmoe/error.h"
#include "run_command.h"

namespace fusedmoe::tool {
namespace {

// The page carries its rows as JSON.
nlohmann::json data_of(const std::string& page) {
  const std::string begin = "<script type=\"application/json\" id=\"data\">";
  const auto from = page.find(begin);
  const auto to = page.find("</script>", from);
  EXPECT_NE(from, std::string::npos);
  return nlohmann::json::parse(page.substr(from + begin.size(), to - from - begin.size()));
}

void expect_self_contained(const std::string& page) {
  // Names of XML namespaces are no addresses; nothing else may look like one.
  const std::regex address("(https?:)?//[a-z][a-z0-9.-]*\\.[a-z]{2,}/[^\"' ]*");
  for (std::sregex_iterator at(page.begin(), page.end(), address), end; at != end; ++at) {
    EXPECT_EQ(at->str().rfind("http://www.w3.org/", 0), 0U) << at->str();
  }
  for (const char* outside : {"src=", "href=", "@import", "<link", "<iframe", "<object", "<img"}) {
    EXPECT_EQ(page.find(outside), std::string::npos) << outside;
  }
  EXPECT_EQ(page.find("@FUSEDMOE"), std::string::npos);  // every part was put in
}

void expect_each_plot(const std::string& page) {
  for (const char* part : {"ratios", "roofline", "times", "machine", "rows", "warnings"}) {
    EXPECT_NE(page.find(std::string("<section id=\"") + part + "\">"), std::string::npos) << part;
  }
  for (const char* call :
       {"drawRatios(box(", "drawRoofline(box(", "drawTimes(box(", "drawRows(box("}) {
    EXPECT_NE(page.find(call), std::string::npos) << call;
  }
  EXPECT_NE(page.find("prefers-color-scheme: dark"), std::string::npos);
}

// What a browser makes of it, where there is one: a roofline and times of two models, and tables.
void expect_drawn(const std::string& file) {
  if (run_shell("command -v chromium").exit_code != 0) return;
  const CommandResult browser = run_shell(
      "timeout 60 chromium --headless --no-sandbox --disable-gpu --dump-dom 'file://" + file + "'");
  ASSERT_EQ(browser.exit_code, 0) << browser.errors;
  const auto count = [&](const std::string& text) {
    int found = 0;
    for (auto at = browser.output.find(text); at != browser.output.npos;
         at = browser.output.find(text, at + 1)) {
      ++found;
    }
    return found;
  };
  EXPECT_EQ(count("<svg "), 3);
  EXPECT_EQ(count("<table "), 2);
  EXPECT_GE(count("<td"), 4 + 12 * 16);  // models x tokens, and a line for each row
  EXPECT_EQ(count("translate(NaN"), 0);
}

TEST(BenchPage, OfATinyRun) {
  const TestFolder folder;
  const std::string file = (folder / "page.html").string();
  const std::string arguments =
      "bench --model tiny,olmoe --layers 1 --tokens 1,3 --threads 1 --seconds 0.02 "
      "--workspace-modes --html ";
  const CommandResult result = run_command(arguments + "'" + file + "' --json");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const std::string page = read_file(file);
  ASSERT_FALSE(page.empty());
  expect_self_contained(page);
  expect_each_plot(page);
  expect_drawn(file);

  const nlohmann::json data = data_of(page);
  const auto printed = result.rows();
  ASSERT_EQ(printed.size(), 12U);  // models x tokens x modes
  EXPECT_EQ(data["rows"].get<std::vector<nlohmann::json>>(), printed);
  EXPECT_EQ(printed[0]["model"], "tiny");
  EXPECT_EQ(printed[11]["model"], "olmoe");
  // What the plots read of a row.
  for (const nlohmann::json& row : printed) {
    EXPECT_GT(row["operations"], 0);
    EXPECT_GT(row["bandwidth_probes_gbs"]["before"], 0);
    EXPECT_GT(row["bandwidth_probes_gbs"]["after"], 0);
    EXPECT_GE(row["other_cpu_share"], 0);
    ASSERT_FALSE(row["peak_probes_gflops"].empty());
    std::set<std::string> instructions;
    for (const nlohmann::json& probe : row["peak_probes_gflops"]) {
      instructions.insert(probe["instruction"]);
      EXPECT_GT(probe["before"], 0);
      EXPECT_GT(probe["after"], 0);
    }
    EXPECT_EQ(instructions.count(row["peak_instruction"]), 1U);
  }
  EXPECT_EQ(printed[0]["operations"], 2 * 2 * 3 * 256 * 128);  // two experts, a multiply-add is two
  // A step of one tiny layer fits any cache, and the page says so.
  EXPECT_NE(data["warnings"].dump().find("--layers"), std::string::npos);
  EXPECT_NE(data["command"].get<std::string>().find(arguments), std::string::npos);
  EXPECT_EQ(data["date"].get<std::string>().substr(0, 2), "20");
  for (const char* fact : {"version", "cpu", "caches", "isa", "threads"}) {
    EXPECT_TRUE(data["machine"].contains(fact)) << fact;
  }
}

TEST(BenchPage, TextCannotEndTheScript) {
  const TestFolder folder;
  const std::string file = (folder / "page.html").string();
  const std::string evil = "</script><img src=x>";
  BenchPage(file).write({{{"model", evil}}}, nlohmann::ordered_json::array(), {evil});
  const std::string page = read_file(file);
  EXPECT_EQ(page.find("<img"), std::string::npos);
  EXPECT_EQ(data_of(page)["rows"][0]["model"], evil);
  EXPECT_EQ(data_of(page)["warnings"][0], evil);
}

TEST(BenchPage, SaysWhenTheFileCannotBeWritten) {
  try {
    BenchPage("/does/not/exist.html");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_NE(std::string(error.what()).find("/does/not/exist.html"), std::string::npos);
  }
  EXPECT_EQ(run_command("bench --model tiny --load --html page.html").exit_code, 2);
}

}  // namespace
}  // namespace fusedmoe::tool
