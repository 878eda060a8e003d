// Runs the command as a process and keeps what it says.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace fusedmoe::tool {

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// A folder for one test; gone with it.
class TestFolder {
 public:
  TestFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "fusedmoe_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = name;
  }
  ~TestFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

struct CommandResult {
  int exit_code = -1;  // -1: ended by a signal
  std::string output;
  std::string errors;

  // Each line of stdout must be a JSON object.
  std::vector<nlohmann::json> rows() const {
    std::vector<nlohmann::json> result;
    std::istringstream lines(output);
    for (std::string line; std::getline(lines, line);)
      result.push_back(nlohmann::json::parse(line));
    return result;
  }
};

// A line for the shell.
inline CommandResult run_shell(const std::string& line) {
  const TestFolder folder;
  const std::string all = "{ " + line + "; } >'" + (folder / "out").string() + "' 2>'" +
                          (folder / "err").string() + "' </dev/null";
  const int status = std::system(all.c_str());
  CommandResult result;
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  result.output = read_file(folder / "out");
  result.errors = read_file(folder / "err");
  return result;
}

// `arguments` as in a shell; `environment` as in "NAME=value".
inline CommandResult run_command(const std::string& arguments,
                                 const std::string& environment = "") {
  return run_shell(environment + " '" FUSEDMOE_COMMAND "' " + arguments);
}

inline std::string golden(const std::string& name) { return FUSEDMOE_GOLDEN_DIR "/" + name; }

// Names of the cases in the manifest.
inline std::vector<std::string> goldens() {
  std::vector<std::string> names;
  const auto manifest = nlohmann::json::parse(read_file(golden("manifest.json")));
  for (const auto& entry : manifest.at("cases")) names.push_back(entry.at("name"));
  return names;
}

}  // namespace fusedmoe::tool
