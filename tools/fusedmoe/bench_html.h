// bench --html: one page that needs nothing else, with plots of the rows. What it looks like is in
// html/, which the build puts into the command as one string.
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace fusedmoe::tool {

class BenchPage {
 public:
  // Opens the file, before anything is measured. Throws fusedmoe::Error: io when it cannot be
  // written, unsupported in a build without d3.
  explicit BenchPage(const std::string& path);

  // rows: as bench_row() makes them, of any number of models, at least one. peers: objects with
  // name and either version or reason. warnings: for people.
  void write(const std::vector<nlohmann::ordered_json>& rows, const nlohmann::ordered_json& peers,
             const std::vector<std::string>& warnings);

 private:
  std::string path_;
  std::ofstream file_;
};

}  // namespace fusedmoe::tool
