// `fusedmoe bench`: time of a layer against the machine's floor, and what each way of owning
// scratch costs. The steps are in bench_step.cpp, the rows in bench_report.cpp.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>

#include "bench_load.h"
#include "bench_report.h"
#include "bench_step.h"
#include "cpu_facts.h"
#include "device_option.h"
#include "formats/format.h"
#include "fusedmoe/error.h"
#include "progress.h"
#include "report.h"
#include "verbs.h"

namespace fusedmoe::tool {
namespace {

struct BenchOptions {
  std::string model;
  std::string shape;
  std::vector<std::int64_t> tokens = {1, 8, 64};
  std::optional<int> layers;
  std::string format = "bf16";
  std::string dtype = "bf16";
  bool workspace_modes = false;
  bool load = false;
  DeviceOptions device;
  ReportOptions report;
};

constexpr const char* kDefaultModel = "qwen3-30b-a3b";
constexpr std::int64_t kMostTokens = 1 << 20;

WeightFormat parse_format(const std::string& name) {
  std::string known;
  for (const FormatInfo& info : all_formats()) {
    if (name == info.name) return info.format;
    known += (known.empty() ? "" : ", ") + std::string(info.name);
  }
  throw Error(ErrorCode::invalid_argument,
              "--format: expected one of " + known + ", got '" + name + "'; name one of these");
}

DType parse_dtype(const std::string& name) {
  if (name == "bf16") return DType::bf16;
  if (name == "f16") return DType::f16;
  if (name == "f32") return DType::f32;
  throw Error(ErrorCode::invalid_argument,
              "--dtype: expected one of bf16, f16, f32, got '" + name + "'; name one of these");
}

BenchSetup make_setup(const BenchOptions& options) {
  BenchSetup setup;
  setup.shape = !options.shape.empty()
                    ? parse_shape(options.shape)
                    : find_model(options.model.empty() ? kDefaultModel : options.model);
  setup.shape.config.dtype = parse_dtype(options.dtype);
  setup.format = parse_format(options.format);
  setup.options = plan_options(options.device);
  setup.options.expert_map = setup.shape.expert_map();
  setup.threads = options.device.threads > 0 ? options.device.threads : std::max(cpu_threads(), 1);
  const FormatInfo& info = format_info(setup.format);
  if (!info.built) {
    throw Error(ErrorCode::unsupported, std::string("--format: expected one that this build has, "
                                                    "got ") +
                                            info.name + "; take bf16, f16 or f32");
  }
  RandomExperts experts(setup, 1);
  const Support support =
      FusedMoe::supports(setup.shape.config, experts.as_source(0), setup.options);
  if (!support.ok) throw Error(ErrorCode::unsupported, support.reason);
  return setup;
}

int run_bench(const BenchOptions& options) {
  const BenchSetup setup = make_setup(options);
  Report report(options.report);
  if (options.load) {
    bench_load(setup, report);
    return kExitFine;
  }
  std::vector<ScratchMode> modes = {ScratchMode::shared};
  if (options.workspace_modes) {
    modes = {ScratchMode::allocate, ScratchMode::per_layer, ScratchMode::shared};
  }
  const auto [fewest, most] = std::minmax_element(options.tokens.begin(), options.tokens.end());
  const BandwidthProbe bandwidth(setup.threads);
  const BenchLayers layers = build_layers(
      setup, {options.layers, *fewest, options.workspace_modes ? *most : std::int64_t{0}});
  if (report.table()) print_header(setup, layers);
  std::vector<StepResult> results;
  for (const std::int64_t tokens : options.tokens) {
    Progress progress(fmt::format("{} token{}, percent:", tokens, tokens == 1 ? "" : "s"), 100);
    int percent = 0;
    const auto on_step = [&](double share) {
      const int now = static_cast<int>(100 * share);
      progress.step(now - percent);
      percent = now;
    };
    results.push_back(run_steps(setup, layers.plans, tokens, modes, bandwidth, on_step));
    progress.erase();
    for (const ModeResult& mode : results.back().modes) {
      report.row(
          bench_row(setup, static_cast<std::int64_t>(layers.plans.size()), results.back(), mode));
    }
    if (report.table()) print_rows(results.back());
  }
  if (report.table()) print_legend(setup, results);
  for (const std::string& warning : warnings(results)) {
    fmt::print(report.table() ? stdout : stderr, "\n{}\n", warning);
  }
  // Every way of owning scratch must give the same bits: anything else is a defect.
  for (const StepResult& result : results) {
    for (const ModeResult& mode : result.modes) {
      if (!mode.bit_equal) return kExitMismatch;
    }
  }
  return kExitFine;
}

}  // namespace

void add_bench(CLI::App& app, Verb& verb) {
  CLI::App* bench = app.add_subcommand(
      "bench",
      "Time per layer against the machine's floor, and what each way of owning scratch "
      "costs");
  std::string models;
  for (const ModelShape& shape : model_shapes()) {
    models += (models.empty() ? "" : ", ") + shape.name;
  }
  const auto options = std::make_shared<BenchOptions>();
  CLI::Option* model = bench->add_option(
      "--model", options->model,
      "One of " + models + "; " + kDefaultModel + " when neither this nor --shape is given");
  model->type_name("NAME");
  bench
      ->add_option("--shape", options->shape,
                   "hidden_size,intermediate_size,num_experts,top_k of another layer")
      ->type_name("H,I,E,K")
      ->excludes(model);
  bench->add_option("--tokens", options->tokens, "Tokens per step; a list gives a row for each")
      ->type_name("N,...")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{1}, kMostTokens))
      ->capture_default_str();
  bench
      ->add_option("--layers", options->layers,
                   "Layers of a step, each with weights of its own; by default as many as it takes "
                   "to read 10 x the last-level cache, within 60 % of the available memory")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 20));
  bench->add_option("--format", options->format, "Format of the weights")
      ->type_name("NAME")
      ->capture_default_str();
  bench->add_option("--dtype", options->dtype, "Of hidden and output: bf16, f16 or f32")
      ->type_name("NAME")
      ->capture_default_str();
  bench->add_flag("--workspace-modes", options->workspace_modes,
                  "Rows for each way of owning scratch: allocated by every call, one per layer, "
                  "one shared by all layers; by default the last alone");
  bench->add_flag("--load", options->load,
                  "How fast weights are packed and how much memory that takes, instead of steps");
  add_device_options(*bench, options->device);
  add_report_options(*bench, options->report);
  bench->footer(
      "time_us, floor_us and bytes_moved are per apply, that is per layer. floor_us = max(bytes /\n"
      "bandwidth_gbs, operations / peak_gflops), both measured around the row; peak_gflops is "
      "that\n"
      "of peak_instruction, which the plan's kernels use, best_peak_gflops that of the machine's\n"
      "best instruction for the format. launches_per_call counts, on a CPU, the regions in which\n"
      "threads fork and join.\n"
      "Example: fusedmoe bench --model qwen3.6-35b-a3b --layers 4 --tokens 1,8,64 "
      "--workspace-modes");
  bench->callback([options, &verb] { verb.run = [options] { return run_bench(*options); }; });
}

}  // namespace fusedmoe::tool
