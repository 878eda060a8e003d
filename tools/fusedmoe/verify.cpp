// `fusedmoe verify`: the layers of checkpoints against the oracle and the goldens, or random layers
// (verify_random.h). What is compared and how is in verify_layer.h.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>

#include "checkpoint/checkpoint.h"
#include "checkpoint/golden.h"
#include "device_option.h"
#include "fusedmoe/error.h"
#include "progress.h"
#include "report.h"
#include "text.h"
#include "verify_layer.h"
#include "verify_random.h"

namespace fusedmoe::tool {
namespace {

namespace fs = std::filesystem;
using checkpoint::Checkpoint;
using checkpoint::Golden;
using checkpoint::MoeLayer;

constexpr char kExamples[] =
    "Examples:\n"
    "  fusedmoe verify path/to/checkpoint\n"
    "  fusedmoe verify a b c --layer 0,3 --tokens 1,17,300 --isa scalar\n"
    "  fusedmoe verify model.safetensors --config elsewhere/config.json --json\n"
    "  fusedmoe verify model.gguf\n"
    "  fusedmoe verify --random 1000 --seed 7\n"
    "\n"
    "Files golden*.safetensors beside PATH are compared with too. Exit code 1 on a mismatch,\n"
    "2 when a PATH is broken or not supported, 3 when the device is not available.";

struct VerifyOptions {
  ReportOptions report;
  DeviceOptions device;
  std::vector<std::string> paths;
  std::string config;
  std::vector<std::int64_t> layers;  // empty = all
  std::vector<std::int64_t> tokens = {17};
  std::uint64_t seed = 1;
  std::int64_t random = 0;
};

class Verifier {
 public:
  Verifier(const VerifyOptions& options, Report& report)
      : options_(options),
        report_(report),
        plan_options_(plan_options(options.device)),
        isa_(chosen_isa(plan_options_)) {}

  int run() {
    for (const std::string& path : options_.paths) {
      try {
        verify_path(path);
        ++checkpoints_;
      } catch (const Error& error) {
        if (error.code() == ErrorCode::device) throw;
        // One bad path does not hide the others.
        bad_paths_.push_back(path);
        std::fflush(stdout);
        fmt::print(stderr, "fusedmoe: {}\n", error.what());
      }
    }
    summarise();
    if (!bad_paths_.empty()) return kExitInput;
    return failures_.empty() ? kExitFine : kExitMismatch;
  }

 private:
  bool wanted(std::int64_t layer) const {
    return options_.layers.empty() ||
           std::ranges::find(options_.layers, layer) != options_.layers.end();
  }

  void check_wanted(const std::string& path, const Checkpoint& model) const {
    std::string known;
    for (const MoeLayer& layer : model.layers()) {
      known += (known.empty() ? "" : ", ") + std::to_string(layer.index);
    }
    if (known.empty()) {
      throw Error(ErrorCode::io, path + ": expected at least one layer with experts, got none");
    }
    for (const std::int64_t layer : options_.layers) {
      if (model.find_layer(layer) != nullptr) continue;
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("--layer: expected a layer of {} that has experts ({}), got {}", path,
                              known, layer));
    }
  }

  void verify_path(const std::string& path) {
    std::optional<fs::path> config;
    if (!options_.config.empty()) config = options_.config;
    const Checkpoint model = Checkpoint::open(path, config);
    check_wanted(path, model);
    const std::vector<Golden> goldens = checkpoint::read_goldens(path);
    for (const Golden& golden : goldens) {
      if (model.find_layer(golden.layer) != nullptr) continue;
      throw Error(ErrorCode::io,
                  fmt::format("{}: header: expected __metadata__ 'layer' to name a layer with "
                              "experts, got {}",
                              golden.file.string(), golden.layer));
    }
    Progress progress("verify " + path + ": layer",
                      static_cast<std::int64_t>(model.layers().size()));
    for (const MoeLayer& layer : model.layers()) {
      if (wanted(layer.index)) verify_layer(path, model, layer, goldens, progress);
      progress.step();
    }
  }

  void verify_layer(const std::string& path, const Checkpoint& model, const MoeLayer& layer,
                    const std::vector<Golden>& goldens, Progress& progress) {
    const LayerVerifier verifier(layer, plan_options_);
    const auto add = [&](const Comparison& comparison) {
      progress.erase();
      add_row(path, model.family(), layer, verifier.plan(), comparison);
    };
    for (const std::int64_t tokens : options_.tokens) {
      add(verifier.against_oracle(tokens, options_.seed));
    }
    for (const Golden& golden : goldens) {
      if (golden.layer == layer.index) add(verifier.against_golden(golden));
    }
    ++layers_;
  }

  void add_row(const std::string& path, const std::string& family, const MoeLayer& layer,
               const FusedMoe& plan, const Comparison& result) {
    nlohmann::ordered_json row = {{"path", path},
                                  {"layer", layer.index},
                                  {"family", family},
                                  {"format", formats_text(layer.formats)},
                                  {"device", to_string(plan.device())},
                                  {"isa", isa_},
                                  {"threads", plan.num_threads()},
                                  {"num_tokens", result.num_tokens},
                                  {"source", result.source},
                                  {"rel_l2", result.errors.rel_l2},
                                  {"max_error", result.errors.max_error},
                                  {"tolerance", result.limit.rel_l2},
                                  {"max_error_tolerance", result.limit.max_error},
                                  {"output_fnv1a", fmt::format("{:016x}", result.output_fnv1a)},
                                  {"pass", result.pass()}};
    if (!result.golden.empty()) row["golden"] = result.golden;
    if (!result.routing.empty()) row["routing"] = result.routing;
    if (!result.problem.empty()) row["problem"] = result.problem;
    report_.row(row);
    if (report_.table()) print_row(path, family, layer, result);
    ++comparisons_;
    if (!result.pass()) {
      failures_.push_back(fmt::format("{} layer {} {}", path, layer.index, result.source));
    }
  }

  void print_row(const std::string& path, const std::string& family, const MoeLayer& layer,
                 const Comparison& result) {
    if (comparisons_ == 0) {
      fmt::print("{:<24} {:>5} {:<14} {:<9} {:>6} {:<6} {:>9} {:>9} {:>9}  {}\n", "path", "layer",
                 "family", "format", "tokens", "source", "rel_l2", "max_error", "tolerance",
                 "result");
    }
    // The end of a path says more than its beginning.
    const std::string name = path.size() <= 24 ? path : "..." + path.substr(path.size() - 21);
    const std::string note = !result.problem.empty()  ? ": " + result.problem
                             : result.routing.empty() ? std::string()
                                                      : ", routing: " + result.routing;
    fmt::print("{:<24} {:>5} {:<14} {:<9} {:>6} {:<6} {:>9.2e} {:>9.2e} {:>9.2e}  {}{}\n", name,
               layer.index, family, formats_text(layer.formats), result.num_tokens, result.source,
               result.errors.rel_l2, result.errors.max_error, result.limit.rel_l2,
               result.pass() ? "pass" : "FAIL", note);
    std::fflush(stdout);
  }

  void summarise() const {
    const auto count = [](std::size_t n, const char* noun) {
      return fmt::format("{} {}{}", n, noun, n == 1 ? "" : "s");
    };
    std::string text =
        fmt::format("{} in {} verified, {}", count(layers_, "layer"),
                    count(checkpoints_, "checkpoint"), count(comparisons_, "comparison"));
    if (comparisons_ > 0) {
      text += failures_.empty() ? ", all within tolerance"
                                : fmt::format(", {} not within tolerance:", failures_.size());
    }
    for (const std::string& failure : failures_) text += "\n  " + failure;
    if (!bad_paths_.empty()) {
      text += fmt::format("\n{} could not be verified:", count(bad_paths_.size(), "path"));
      for (const std::string& path : bad_paths_) text += "\n  " + path;
    }
    if (report_.table()) {
      fmt::print("{}\n", text);
    } else if (!failures_.empty()) {
      fmt::print(stderr, "fusedmoe: {}\n", text);
    }
  }

  const VerifyOptions& options_;
  Report& report_;
  PlanOptions plan_options_;
  std::string isa_;
  std::size_t layers_ = 0;
  std::size_t checkpoints_ = 0;
  std::size_t comparisons_ = 0;
  std::vector<std::string> failures_;
  std::vector<std::string> bad_paths_;
};

int verify(const VerifyOptions& options) {
  Report report(options.report);
  if (options.random > 0) {
    return verify_random({options.random, options.seed, options.device}, report);
  }
  return Verifier(options, report).run();
}

}  // namespace

void add_verify(CLI::App& app, Verb& verb) {
  CLI::App* sub = app.add_subcommand(
      "verify", "Each MoE layer of a checkpoint against the oracle and the goldens");
  sub->footer(kExamples);
  const auto options = std::make_shared<VerifyOptions>();
  CLI::Option* paths = sub->add_option("PATH", options->paths,
                                       "Checkpoint folders, bare .safetensors or .gguf files");
  CLI::Option* config = sub->add_option("--config", options->config,
                                        "The config.json, when it is not beside the weights")
                            ->type_name("FILE");
  CLI::Option* layers = sub->add_option("--layer", options->layers, "Only these layers")
                            ->type_name("N,...")
                            ->delimiter(',')
                            ->allow_extra_args(false);
  CLI::Option* tokens = sub->add_option("--tokens", options->tokens, "Tokens of the random input")
                            ->type_name("N,...")
                            ->delimiter(',')
                            ->allow_extra_args(false)
                            ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 20))
                            ->capture_default_str();
  sub->add_option("--seed", options->seed, "Of the random input, or of the random layers")
      ->type_name("S")
      ->capture_default_str();
  sub->add_option("--random", options->random, "No PATH: N random layers, calls and plans instead")
      ->type_name("N")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40))
      ->excludes(paths)
      ->excludes(config)
      ->excludes(layers)
      ->excludes(tokens);
  add_device_options(*sub, options->device);
  add_report_options(*sub, options->report);
  sub->callback([options, &verb] {
    if (options->paths.empty() && options->random == 0) {
      throw CLI::RequiredError("PATH or --random");
    }
    verb.run = [options] { return verify(*options); };
  });
}

}  // namespace fusedmoe::tool
