#include "bench_run.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "bench_html.h"
#include "bench_load.h"
#include "bench_peers.h"
#include "bench_report.h"
#include "bench_step.h"
#include "bench_warnings.h"
#include "cpu_facts.h"
#include "format_spec.h"
#include "fusedmoe/error.h"
#include "progress.h"
#include "report.h"

namespace fusedmoe::tool {
namespace {

DType parse_dtype(const std::string& name) {
  if (name == "bf16") return DType::bf16;
  if (name == "f16") return DType::f16;
  if (name == "f32") return DType::f32;
  throw Error(ErrorCode::invalid_argument,
              "--dtype: expected one of bf16, f16, f32, got '" + name + "'; name one of these");
}

ComputeMode parse_mode(const std::string& name) {
  if (name == "a16") return ComputeMode::a16;
  if (name == "a8") return ComputeMode::a8;
  throw Error(ErrorCode::invalid_argument,
              "--mode: expected a16 or a8, got '" + name + "'; name one of these");
}

BenchSetup make_setup(const BenchOptions& options, const ModelShape& shape) {
  BenchSetup setup;
  setup.shape = shape;
  setup.shape.config.dtype = parse_dtype(options.dtype);
  setup.format = parse_format(options.format);
  setup.seconds = options.seconds;
  setup.options = plan_options(options.device);
  setup.options.mode = parse_mode(options.mode);
  setup.options.expert_map = setup.shape.expert_map();
  setup.threads = options.device.threads > 0 ? options.device.threads : std::max(cpu_threads(), 1);
  RandomExperts experts(setup, 1);
  const Support support =
      FusedMoe::supports(setup.shape.config, experts.as_source(0), setup.options);
  if (!support.ok) throw Error(ErrorCode::unsupported, support.reason);
  return setup;
}

// All of them before the first is run: a wrong name at the end would cost the minutes before it.
std::vector<BenchSetup> make_setups(const BenchOptions& options) {
  if (!options.shape.empty()) return {make_setup(options, parse_shape(options.shape))};
  std::vector<std::string> models = options.models;
  if (models.empty()) models.emplace_back(kDefaultModel);
  std::vector<BenchSetup> setups;
  setups.reserve(models.size());
  for (const std::string& model : models) setups.push_back(make_setup(options, find_model(model)));
  return setups;
}

// Everything that the rows of all models go into.
struct Output {
  Report report;
  std::vector<nlohmann::ordered_json> rows;
  std::vector<WarningFacts> doubts;
  bool all_equal = true;  // every way of owning scratch gave the same bits
};

void run_model(const BenchOptions& options, const BenchSetup& setup,
               const BandwidthProbe& bandwidth, Peers* peers, Output& output) {
  std::vector<ScratchMode> modes = {ScratchMode::shared};
  if (options.workspace_modes) {
    modes = {ScratchMode::allocate, ScratchMode::per_layer, ScratchMode::shared};
  }
  const auto [fewest, most] = std::minmax_element(options.tokens.begin(), options.tokens.end());
  const BenchLayers layers =
      build_layers(setup, {.layers = options.layers,
                           .fewest_tokens = *fewest,
                           .copies = 1 + (peers == nullptr ? 0 : peers->count()),
                           .tokens_of_scratch = options.workspace_modes ? *most : std::int64_t{0}});
  const auto num_layers = static_cast<std::int64_t>(layers.plans.size());
  if (peers != nullptr) peers->load(setup, num_layers);
  if (output.report.table()) print_header(setup, layers);
  std::vector<StepResult> results;
  for (const std::int64_t tokens : options.tokens) {
    Progress progress(fmt::format("{} token{}, percent:", tokens, tokens == 1 ? "" : "s"), 100);
    int percent = 0;
    const auto on_step = [&](double share) {
      const int now = static_cast<int>(100 * share);
      progress.step(now - percent);
      percent = now;
    };
    results.push_back(run_steps(setup, layers.plans, tokens, modes, bandwidth, peers, on_step));
    progress.erase();
    const StepResult& result = results.back();
    for (const ModeResult& mode : result.modes) {
      output.rows.push_back(bench_row(setup, num_layers, result, mode));
      output.report.row(output.rows.back());
      output.all_equal &= mode.bit_equal;
    }
    if (output.report.table()) print_rows(setup, result);
    output.doubts.push_back(warning_facts(setup, result));
  }
  if (output.report.table()) print_floors(results);
}

}  // namespace

int run_bench(const BenchOptions& options) {
  const std::vector<BenchSetup> setups = make_setups(options);
  Output output{.report = Report(options.report), .rows = {}, .doubts = {}};
  if (options.load) {
    for (const BenchSetup& setup : setups) bench_load(setup, output.report);
    return kExitFine;
  }
  std::optional<BenchPage> page;
  if (!options.html.empty()) page.emplace(options.html);
  std::optional<Peers> peers;
  if (options.compare) {
    peers.emplace(options.peers, setups[0].threads);
    print_peers(peers->all(), output.report.table() ? stdout : stderr);
  }
  // As they are now: a layer that one refuses says nothing of the next model.
  nlohmann::ordered_json described = nlohmann::ordered_json::array();
  if (peers) described = describe(peers->all());
  const BandwidthProbe bandwidth(setups[0].threads);
  for (const BenchSetup& setup : setups) {
    run_model(options, setup, bandwidth, peers ? &*peers : nullptr, output);
  }

  if (output.report.table()) print_legend(peers.has_value());
  const std::vector<std::string> texts = warnings(output.doubts);
  for (const std::string& text : texts) {
    fmt::print(output.report.table() ? stdout : stderr, "\nwarning: {}\n", text);
  }
  if (page) page->write(output.rows, described, texts);
  if (!output.all_equal) return kExitMismatch;  // anything but the same bits is a defect
  return peers && peers->lost_a_named_one() ? kExitNoDevice : kExitFine;
}

}  // namespace fusedmoe::tool
