// Where a verb's results go: one JSON object per line on stdout (--json) and into a file
// (--json-file). Tables for people are the verb's own to print, when table() says so.
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>

#include "verbs.h"

namespace fusedmoe::tool {

class Report {
 public:
  // Opens the file of --json-file. Throws fusedmoe::Error (io) when that fails.
  explicit Report(const ReportOptions& options);

  // True when stdout is for people.
  bool table() const { return !options_.json; }

  // One result. Bytes that are not UTF-8 (names in a broken file) are replaced; a number that is
  // not finite becomes null. Throws fusedmoe::Error (io) when the file cannot be written.
  void row(const nlohmann::ordered_json& object);

 private:
  ReportOptions options_;
  std::ofstream file_;
};

}  // namespace fusedmoe::tool
