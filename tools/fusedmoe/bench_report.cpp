#include "bench_report.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "device_option.h"
#include "text.h"

namespace fusedmoe::tool {
namespace {

const char* short_name(DType dtype) {
  return dtype == DType::f32 ? "f32" : dtype == DType::f16 ? "f16" : "bf16";
}

double rounded(double value, double digits = 1e3) { return std::round(value * digits) / digits; }

// Calls count in whole numbers wherever every call does the same.
nlohmann::ordered_json count_of(double value) {
  if (value == std::floor(value)) return static_cast<std::int64_t>(value);
  return rounded(value);
}

nlohmann::ordered_json pair_of(const ProbePair& pair) {
  return {{"before", rounded(pair.before)}, {"after", rounded(pair.after)}};
}

double ratio_of(const StepResult& result, const ModeResult& mode) {
  return mode.time_us.median / floor_us(result.work, result.ceilings);
}

// "48.1 to 52.3", of the probes around all rows.
template <class PairOf>
std::string range_text(const std::vector<StepResult>& results, const PairOf& pair_of) {
  double low = std::numeric_limits<double>::infinity();
  double high = 0;
  for (const StepResult& result : results) {
    const ProbePair pair = pair_of(result);
    low = std::min({low, pair.before, pair.after});
    high = std::max({high, pair.before, pair.after});
  }
  return fmt::format("{0:.{2}f} to {1:.{2}f}", low, high, high < 100 ? 1 : 0);
}

nlohmann::ordered_json time_of(const Spread& time) {
  return {{"median", rounded(time.median)}, {"min", rounded(time.min)}, {"max", rounded(time.max)}};
}

// A peer beside our row: its own ratio to the floor, and how many times our time it takes.
nlohmann::ordered_json peer_row(const StepResult& result, const ModeResult& ours,
                                const PeerResult& peer) {
  nlohmann::ordered_json row = {{"name", peer.name}, {"version", peer.version}};
  if (peer.version.empty()) row["version"] = nullptr;
  if (std::isfinite(peer.rel_l2) && peer.rel_l2 >= 0) row["rel_l2"] = rounded(peer.rel_l2, 1e7);
  if (!peer.reason.empty()) {
    row["reason"] = peer.reason;
    return row;
  }
  row["mode"] = peer.mode;
  row["time_us"] = time_of(peer.time_us);
  row["ratio"] = rounded(peer.time_us.median / floor_us(result.work, result.ceilings), 1e4);
  row["speedup"] = rounded(peer.time_us.median / ours.time_us.median, 1e4);
  return row;
}

std::string time_text(double microseconds) {
  return fmt::format("{:.{}f}", microseconds, microseconds < 100 ? 2 : 1);
}

}  // namespace

nlohmann::ordered_json describe_setup(const BenchSetup& setup) {
  const MoeConfig& config = setup.shape.config;
  nlohmann::ordered_json row;
  row["model"] = setup.shape.name;
  row["hidden_size"] = config.hidden_size;
  row["intermediate_size"] = config.intermediate_size;
  row["num_experts"] = config.num_experts;
  row["top_k"] = config.top_k;
  row["format"] = to_string(setup.format);
  row["dtype"] = short_name(config.dtype);
  row["mode"] = mode_name(setup.options.mode);
  row["device"] = fusedmoe::to_string(setup.options.device);
  row["isa"] = chosen_isa(setup.options);
  row["threads"] = setup.threads;
  return row;
}

nlohmann::ordered_json bench_row(const BenchSetup& setup, std::int64_t layers,
                                 const StepResult& result, const ModeResult& mode) {
  nlohmann::ordered_json row = describe_setup(setup);
  row["num_tokens"] = result.num_tokens;
  row["layers"] = layers;
  row["workspace_mode"] = to_string(mode.mode);
  row["active_experts"] = count_of(result.work.active_experts);
  row["bytes_moved"] = std::llround(result.work.bytes);
  row["operations"] = std::llround(result.work.operations);
  row["time_us"] = time_of(mode.time_us);
  row["floor_us"] = rounded(floor_us(result.work, result.ceilings));
  row["ratio"] = rounded(ratio_of(result, mode), 1e4);
  row["bandwidth_gbs"] = rounded(result.ceilings.bandwidth_gbs);
  row["peak_gflops"] = rounded(result.peaks.gflops);
  row["peak_instruction"] = result.peaks.instruction;
  row["best_peak_gflops"] = rounded(result.peaks.best_gflops);
  row["bandwidth_probes_gbs"] = pair_of(result.bandwidth_gbs);
  row["peak_probes_gflops"] = nlohmann::ordered_json::array();
  for (const PeakProbe& probe : result.peak_probes) {
    nlohmann::ordered_json reading = {{"instruction", probe.instruction}};
    reading.update(pair_of(probe.gflops));
    row["peak_probes_gflops"].push_back(reading);
  }
  row["other_cpu_share"] = rounded(result.others, 1e4);
  row["allocations_per_call"] = count_of(mode.allocations_per_call);
  row["launches_per_call"] = result.launches_per_call;
  row["scratch_bytes"] = result.scratch_bytes;
  row["peak_scratch_bytes"] = mode.peak_scratch_bytes;
  row["bit_equal"] = mode.bit_equal;
  if (mode.mode == ScratchMode::shared && !result.peers.empty()) {
    row["peers"] = nlohmann::ordered_json::array();
    for (const PeerResult& peer : result.peers)
      row["peers"].push_back(peer_row(result, mode, peer));
  }
  return row;
}

void print_header(const BenchSetup& setup, const BenchLayers& layers) {
  const MoeConfig& config = setup.shape.config;
  const auto count = layers.plans.size();
  std::string experts = std::to_string(config.num_experts) + " experts";
  if (setup.shape.ep_size > 1) {
    experts = fmt::format("{} of {}", setup.shape.num_local_experts(), experts);
  }
  fmt::print("{}: hidden {}, intermediate {}, {}, {} per token{}\n", setup.shape.name,
             config.hidden_size, config.intermediate_size, experts, config.top_k,
             setup.shape.bias ? ", biases" : "");
  const std::string isa = chosen_isa(setup.options);
  fmt::print("weights {}, hidden {}{}, on {}{}, {} thread{}\n", to_string(setup.format),
             short_name(config.dtype), setup.options.mode == ComputeMode::a8 ? " in mode a8" : "",
             fusedmoe::to_string(setup.options.device), isa.empty() ? "" : " with " + isa,
             setup.threads, setup.threads == 1 ? "" : "s");
  fmt::print("a step applies {} layer{} with weights of {}, {} each ({})\n\n", count,
             count == 1 ? "" : "s", count == 1 ? "its own" : "their own",
             bytes_text(layers.plans[0].weight_bytes()), layers.why);
  fmt::print("{:>6}  {:<12}  {:>12} {:>12} {:>12}  {:>8}  {:>11}  {:>11}  {:>12}  {:>8}\n",
             "tokens", "workspace", "time/layer", "fastest", "slowest", "ratio to", "allocations",
             "scratch", "peak scratch", "bits as");
  fmt::print("{:>6}  {:<12}  {:>12} {:>12} {:>12}  {:>8}  {:>11}  {:>11}  {:>12}  {:>8}\n", "", "",
             "median us", "us", "us", "floor", "per call", "per call", "all layers", "allocate");
}

void print_rows(const BenchSetup& setup, const StepResult& result) {
  for (const ModeResult& mode : result.modes) {
    fmt::print("{:>6}  {:<12}  {:>12} {:>12} {:>12}  {:>8.2f}  {:>11}  {:>11}  {:>12}  {:>8}\n",
               result.num_tokens, to_string(mode.mode), time_text(mode.time_us.median),
               time_text(mode.time_us.min), time_text(mode.time_us.max), ratio_of(result, mode),
               count_of(mode.allocations_per_call).dump(), bytes_text(result.scratch_bytes),
               bytes_text(mode.peak_scratch_bytes), mode.bit_equal ? "equal" : "DIFFER");
  }
  const ModeResult& ours = result.modes.back();
  for (const PeerResult& peer : result.peers) {
    if (!peer.reason.empty()) {
      if (!peer.version.empty()) fmt::print("{:>6}  {:<12}  {}\n", "", peer.name, peer.reason);
      continue;  // what is not installed was said at the start
    }
    fmt::print("{:>6}  {:<12}  {:>12} {:>12} {:>12}  {:>8.2f}  {:.2f} x the time of {}{}\n", "",
               peer.name, time_text(peer.time_us.median), time_text(peer.time_us.min),
               time_text(peer.time_us.max),
               peer.time_us.median / floor_us(result.work, result.ceilings),
               peer.time_us.median / ours.time_us.median, to_string(ours.mode),
               peer.mode == mode_name(setup.options.mode) ? "" : ", in mode " + peer.mode);
  }
  std::fflush(stdout);  // rows come minutes apart
}

void print_floors(const std::vector<StepResult>& results) {
  fmt::print("\n");
  for (const StepResult& result : results) {
    const double floor = floor_us(result.work, result.ceilings);
    const bool by_bytes = result.work.bytes / (result.ceilings.bandwidth_gbs * 1e3) >= floor;
    fmt::print(
        "floor for {} token{}: {} us, by {} ({:.1f} active experts, {:.1f} MB at {:.1f} "
        "GB/s; {:.2f} GFLOP at {:.0f} GFLOP/s)\n",
        result.num_tokens, result.num_tokens == 1 ? "" : "s", time_text(floor),
        by_bytes ? "bytes" : "operations", result.work.active_experts, result.work.bytes / 1e6,
        result.ceilings.bandwidth_gbs, result.work.operations / 1e9, result.ceilings.peak_gflops);
  }
  fmt::print("probes before and after each row, lowest to highest: memory {} GB/s",
             range_text(results, [](const StepResult& r) { return r.bandwidth_gbs; }));
  for (std::size_t i = 0; i < results[0].peak_probes.size(); ++i) {
    const auto pair = [&](const StepResult& r) { return r.peak_probes[i].gflops; };
    const std::string& name = results[0].peak_probes[i].instruction;
    fmt::print(", {} {} GFLOP/s{}", name, range_text(results, pair),
               name == results[0].peaks.instruction ? " (the kernels')" : "");
  }
  fmt::print("\n\n");
}

void print_peers(const std::vector<Peer>& peers, std::FILE* out) {
  for (const Peer& peer : peers) {
    fmt::print(out, "peer {:<12}  {}\n", peer.name(),
               peer.runs() ? peer.version() + ": " + peer.about() : peer.reason());
  }
  fmt::print(out, "{}\n", peers.empty() ? "no adapters found\n" : "");
  std::fflush(out);
}

void print_legend(bool with_peers) {
  fmt::print(
      "allocate   apply is lent no workspace and allocates scratch for each call\n"
      "per_layer  every layer keeps a workspace of its own\n"
      "shared     one workspace serves all layers: no allocation, and the least memory\n"
      "ratio      median time / floor; the floor is the time to read the active experts' weights\n"
      "           at the bandwidth, or to multiply at the peak of the kernels' instruction,\n"
      "           measured around the row: 1 is the machine's limit\n"
      "bits       outputs of a whole step, compared with those of mode allocate\n");
  if (!with_peers) return;
  fmt::print(
      "peers      on the same weights, tokens and routing, in turns with ours, as many threads;\n"
      "           their outputs match ours; times include the call from Python, a few us a "
      "layer\n");
}

}  // namespace fusedmoe::tool
