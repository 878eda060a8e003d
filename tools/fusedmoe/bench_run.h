// What `bench` does with its options: models one after the other, a row for each number of tokens
// and way of owning scratch. The options and their help are in bench.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench_layers.h"
#include "device_option.h"
#include "verbs.h"

namespace fusedmoe::tool {

inline constexpr const char* kDefaultModel = "qwen3-30b-a3b";

struct BenchOptions {
  std::vector<std::string> models;  // none = kDefaultModel, unless there is a shape
  std::string shape;
  std::vector<std::int64_t> tokens = {1, 8, 64};
  std::optional<int> layers;
  std::string format = "bf16";
  std::string dtype = "bf16";
  std::string mode = "a16";
  double seconds = kDefaultSeconds;
  bool workspace_modes = false;
  bool load = false;
  std::string html;
  bool compare = false;
  std::vector<std::string> peers;  // to compare with; none = all that are installed
  DeviceOptions device;
  ReportOptions report;
};

// Returns the exit code. Throws fusedmoe::Error for what cannot be run.
int run_bench(const BenchOptions& options);

}  // namespace fusedmoe::tool
