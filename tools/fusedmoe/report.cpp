#include "report.h"

#include <CLI/CLI.hpp>
#include <cstdio>

#include "fusedmoe/error.h"

namespace fusedmoe::tool {

void add_report_options(CLI::App& app, ReportOptions& options) {
  app.add_flag("--json", options.json, "One JSON object per line on stdout instead of a table");
  app.add_option("--json-file", options.json_file, "The same objects into FILE")->type_name("FILE");
}

Report::Report(const ReportOptions& options) : options_(options) {
  if (options_.json_file.empty()) return;
  file_.open(options_.json_file, std::ios::out | std::ios::trunc);
  if (!file_) {
    throw Error(ErrorCode::io, "--json-file: expected a file that can be written, got " +
                                   options_.json_file + "; name one in a folder that exists");
  }
}

void Report::row(const nlohmann::ordered_json& object) {
  if (!options_.json && !file_.is_open()) return;
  using Handler = nlohmann::ordered_json::error_handler_t;
  const std::string line = object.dump(-1, ' ', false, Handler::replace) + "\n";
  if (options_.json) {
    std::fwrite(line.data(), 1, line.size(), stdout);
    std::fflush(stdout);  // a reader sees each row when it is there; main() checks for errors
  }
  if (file_.is_open() && !(file_ << line << std::flush)) {
    throw Error(ErrorCode::io, "--json-file: " + options_.json_file +
                                   " cannot be written to its end; is the disk full?");
  }
}

}  // namespace fusedmoe::tool
