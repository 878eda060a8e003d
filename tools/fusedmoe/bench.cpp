// `fusedmoe bench`: time of a layer against the machine's floor, and what each way of owning
// scratch costs. Here are its options; bench_run.cpp runs them, bench_step.cpp times the steps,
// bench_report.cpp makes the rows, bench_html.cpp the page.
#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "bench_run.h"
#include "format_spec.h"
#include "model_shapes.h"
#include "verbs.h"

namespace fusedmoe::tool {
namespace {

constexpr std::int64_t kMostTokens = 1 << 20;

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
  CLI::Option* model = bench->add_option("--model", options->models,
                                         "One or more of " + models + "; " + kDefaultModel +
                                             " when neither this nor --shape is given");
  model->type_name("NAME,...")->delimiter(',');
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
  bench
      ->add_option("--format", options->format,
                   "Format of the weights and where their scales lie, as below")
      ->type_name("FORMAT[:SCALES][:TYPE][:zp]")
      ->capture_default_str();
  bench->add_option("--dtype", options->dtype, "Of hidden and output: bf16, f16 or f32")
      ->type_name("NAME")
      ->capture_default_str();
  bench
      ->add_option("--mode", options->mode,
                   "a16: activations as they come; a8: rounded to int8, for int8 and int4 weights")
      ->type_name("NAME")
      ->capture_default_str();
  bench
      ->add_option("--seconds", options->seconds,
                   "To time each row, at least five steps; shorter rows repeat less well")
      ->type_name("S")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  bench->add_flag("--workspace-modes", options->workspace_modes,
                  "Rows for each way of owning scratch: allocated by every call, one per layer, "
                  "one shared by all layers; by default the last alone");
  CLI::Option* load = bench->add_flag(
      "--load", options->load,
      "How fast weights are packed and how much memory that takes, instead of steps");
  CLI::Option* compare =
      bench
          ->add_option("--compare", options->peers,
                       "Peers beside ours on the same weights and tokens, in turns: those named, "
                       "or all that are installed. FUSEDMOE_PEERS_PYTHON names the interpreter "
                       "that has them (python3), FUSEDMOE_PEERS_DIR the folder of adapters")
          ->type_name("[NAME,...]")
          ->expected(0, 64)
          ->delimiter(',')
          ->excludes(load);
  bench
      ->add_option("--html", options->html,
                   "The rows as one page with plots into FILE; it needs nothing else")
      ->type_name("FILE")
      ->excludes(load);
  add_device_options(*bench, options->device);
  add_report_options(*bench, options->report);
  bench->footer(
      std::string(kFormatHelp) +
      "\n"
      "time_us, floor_us and bytes_moved are per apply, that is per layer. floor_us = max(bytes /\n"
      "bandwidth_gbs, operations / peak_gflops), both measured around the row; peak_gflops is "
      "that\n"
      "of peak_instruction, which the plan's kernels use, best_peak_gflops that of the machine's\n"
      "best instruction for the format. launches_per_call counts, on a CPU, the regions in which\n"
      "threads fork and join. Bytes of weights are those of a checkpoint: codes, scales, zero\n"
      "points of 4 bits, biases in f32.\n"
      "Example: fusedmoe bench --model qwen3.6-35b-a3b --layers 4 --tokens 1,8,64 "
      "--workspace-modes");
  bench->callback([options, compare, &verb] {
    options->compare = compare->count() > 0;
    std::erase(options->peers, "");  // what CLI11 makes of a --compare without a name
    verb.run = [options] { return run_bench(*options); };
  });
}

}  // namespace fusedmoe::tool
