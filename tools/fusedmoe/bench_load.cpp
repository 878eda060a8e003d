#include "bench_load.h"

#include <fmt/core.h>
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include "bench_floor.h"
#include "bench_report.h"
#include "bench_threads.h"
#include "fusedmoe/error.h"
#include "probes.h"
#include "text.h"

namespace fusedmoe::tool {
namespace {

// VmRSS or VmHWM, in bytes; 0 where the kernel does not say.
std::int64_t memory_status(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(name + ":", 0) == 0) return std::atoll(line.c_str() + name.size() + 1) * 1024;
  }
  return 0;
}

// Starts a new high-water mark.
void reset_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

struct Load {
  std::int64_t packed_bytes;
  double seconds;  // without the making of random numbers
  std::int64_t peak_bytes;
};

Load load(const BenchSetup& setup, bool from_source) {
  malloc_trim(0);  // what the run before left would be used again and not be seen
  const std::int64_t before = memory_status("VmRSS");
  reset_peak();
  RandomExperts experts(setup, from_source ? 1 : setup.shape.num_local_experts());
  const ExpertWeights weights = from_source ? experts.as_source(1) : experts.stacks(1);
  const double made_before = experts.fill_seconds();
  const auto start = std::chrono::steady_clock::now();
  const FusedMoe plan = FusedMoe::create(setup.shape.config, weights, setup.options);
  const double seconds = seconds_since(start) - (experts.fill_seconds() - made_before);
  return {plan.weight_bytes(), seconds, memory_status("VmHWM") - before};
}

}  // namespace

void bench_load(const BenchSetup& setup, Report& report) {
  const std::int64_t layer = layer_bytes(setup.shape, setup.format);
  const std::int64_t expert = expert_bytes(setup.shape, setup.format);
  if (report.table()) {
    fmt::print("{}: packing one layer of {} experts, {} each, {} thread{}\n\n", setup.shape.name,
               setup.shape.num_local_experts(), bytes_text(expert), setup.threads,
               setup.threads == 1 ? "" : "s");
    fmt::print("{:<8} {:>12} {:>10} {:>10} {:>12} {:>14}\n", "weights", "packed", "seconds", "GB/s",
               "peak memory", "peak / packed");
  }
  for (const bool from_source : {true, false}) {
    const std::int64_t need = (from_source ? 1 : 2) * layer + expert;
    if (need > available_memory_bytes()) {
      throw Error(ErrorCode::out_of_memory,
                  fmt::format("--load: expected {} of memory, got {}; take a smaller model",
                              bytes_text(need), bytes_text(available_memory_bytes())));
    }
    const Load result = load(setup, from_source);
    const double gbs = static_cast<double>(result.packed_bytes) / result.seconds / 1e9;
    const double over =
        static_cast<double>(result.peak_bytes) / static_cast<double>(result.packed_bytes);
    nlohmann::ordered_json row = describe_setup(setup);
    row["load"] = from_source ? "source" : "stacks";
    row["expert_bytes"] = expert;
    row["packed_bytes"] = result.packed_bytes;
    row["seconds"] = result.seconds;
    row["pack_gbs"] = gbs;
    row["peak_bytes"] = result.peak_bytes;
    report.row(row);
    if (!report.table()) continue;
    fmt::print("{:<8} {:>12} {:>10.2f} {:>10.2f} {:>12} {:>14.2f}\n",
               from_source ? "source" : "stacks", bytes_text(result.packed_bytes), result.seconds,
               gbs, bytes_text(result.peak_bytes), over);
  }
  if (!report.table()) return;
  fmt::print(
      "\n"
      "source   weights come one expert at a time: the peak is the packed weights and one expert\n"
      "stacks   all of them are in memory when packing starts: the peak holds them, too\n"
      "GB/s     packed bytes over the time of create, without the making of the weights\n");
}

}  // namespace fusedmoe::tool
