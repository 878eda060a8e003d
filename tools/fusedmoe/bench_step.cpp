#include "bench_step.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#include "bench_allocations.h"
#include "bench_inputs.h"
#include "bench_threads.h"
#include "cpu_facts.h"
#include "cpu_use.h"

namespace fusedmoe::tool {
namespace {

constexpr std::int64_t kFewestSteps = 5;
constexpr std::int64_t kMostSteps = 2000;

// A runner that only counts: threads that start and end with each region, all at once.
struct CountingRunner {
  std::int64_t regions = 0;

  static void run(void* self, int count, void (*body)(void*, int), void* argument) {
    ++static_cast<CountingRunner*>(self)->regions;
    run_together(count, [&](int index) { body(argument, index); });
  }
};

class Steps {
 public:
  Steps(const BenchSetup& setup, const std::vector<FusedMoe>& layers, std::int64_t num_tokens)
      : layers_(layers),
        num_tokens_(num_tokens),
        inputs_(setup, num_tokens, static_cast<std::int64_t>(layers.size())),
        dtype_(setup.shape.config.output_dtype.value_or(setup.shape.config.dtype)),
        hidden_size_(setup.shape.config.hidden_size),
        output_(output_bytes()),
        expected_(output_bytes()),
        shared_(setup.options.device),
        per_layer_(layers.size()) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      per_layer_[i] = WorkspaceBuffer(setup.options.device);
    }
  }

  // Counts and compares over step 0; leaves the mode's workspaces ready for timing. Reserving them
  // counts for the peak, but not as allocations of calls.
  ModeResult check(ScratchMode mode) {
    ModeResult result{.mode = mode, .time_us = {}};
    AllocationCounter counter;
    {
      const auto armed = counter.arm();
      for (std::size_t l = 0; l < layers_.size(); ++l) {
        if (mode == ScratchMode::shared) shared_.reserve(layers_[l].workspace_size(num_tokens_));
        if (mode == ScratchMode::per_layer) {
          per_layer_[l].reserve(layers_[l].workspace_size(num_tokens_));
        }
      }
    }
    const std::int64_t reserved = counter.allocations();
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      std::memset(output_.data(), 0xff, output_.size());
      {
        const auto armed = counter.arm();
        apply(l, 0, workspace(mode, l));
      }
      if (mode == ScratchMode::allocate) continue;
      output_.swap(expected_);
      std::memset(output_.data(), 0x7f, output_.size());
      apply(l, 0, Workspace());
      result.bit_equal &= std::memcmp(output_.data(), expected_.data(), output_.size()) == 0;
    }
    result.allocations_per_call =
        static_cast<double>(counter.allocations() - reserved) / static_cast<double>(layers_.size());
    result.peak_scratch_bytes = counter.peak_bytes();
    return result;
  }

  // The output of one layer at step 0, until the next call of anything.
  const std::byte* output_of(std::int64_t layer) {
    apply(static_cast<std::size_t>(layer), 0, Workspace());
    return output_.data();
  }

  // Wakes the threads.
  void warm(ScratchMode mode, std::int64_t step) { apply(0, step, workspace(mode, 0)); }

  const BenchInputs& inputs() const { return inputs_; }

  // Microseconds per layer.
  double time(ScratchMode mode, std::int64_t step) {
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t l = 0; l < layers_.size(); ++l) apply(l, step, workspace(mode, l));
    return seconds_since(start) * 1e6 / static_cast<double>(layers_.size());
  }

  std::int64_t count_launches() {
    CountingRunner counting;
    ThreadRunner runner{&CountingRunner::run, &counting, layers_[0].num_threads(), true};
    ApplyContext context;
    context.runner = &runner;
    apply(0, 0, Workspace(), context);
    return counting.regions;
  }

  Work work(std::int64_t step) const {
    std::vector<Work> works;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      works.push_back(inputs_.routing(step, static_cast<std::int64_t>(l)).work);
    }
    return mean_of(works);
  }

 private:
  std::size_t output_bytes() const {
    return static_cast<std::size_t>(num_tokens_ * hidden_size_ * bytes_per_element(dtype_));
  }

  Workspace workspace(ScratchMode mode, std::size_t layer) const {
    if (mode == ScratchMode::allocate) return {};
    return mode == ScratchMode::shared ? shared_ : per_layer_[layer];
  }

  void apply(std::size_t layer, std::int64_t step, const Workspace& workspace,
             const ApplyContext& context = {}) {
    const Routing& routing = inputs_.routing(step, static_cast<std::int64_t>(layer));
    layers_[layer].apply({output_.data(), dtype_, num_tokens_, hidden_size_}, inputs_.hidden(),
                         inputs_.topk_weights(routing), inputs_.topk_ids(routing), workspace,
                         context);
  }

  const std::vector<FusedMoe>& layers_;
  std::int64_t num_tokens_;
  BenchInputs inputs_;
  DType dtype_;
  std::int64_t hidden_size_;
  std::vector<std::byte> output_;
  std::vector<std::byte> expected_;
  WorkspaceBuffer shared_;
  std::vector<WorkspaceBuffer> per_layer_;
};

// Means over the probes before and after the timed part; both measured the same instructions.
void set_peaks(StepResult& result, const Peaks& before, const Peaks& after) {
  result.peaks = before;
  result.peaks.gflops = (before.gflops + after.gflops) / 2;
  result.peaks.best_gflops = (before.best_gflops + after.best_gflops) / 2;
  for (std::size_t i = 0; i < before.all.size(); ++i) {
    const ProbePair pair{before.all[i].gflops, after.all[i].gflops};
    result.peak_probes.push_back({before.all[i].instruction, pair});
    result.drift = std::max(result.drift, pair.drift());
  }
}

}  // namespace

double ProbePair::drift() const { return std::abs(before - after) / std::max(before, after); }

const char* to_string(ScratchMode mode) noexcept {
  constexpr const char* kNames[] = {"allocate", "per_layer", "shared"};
  return kNames[static_cast<int>(mode)];
}

StepResult run_steps(const BenchSetup& setup, const std::vector<FusedMoe>& layers,
                     std::int64_t num_tokens, const std::vector<ScratchMode>& modes,
                     const BandwidthProbe& bandwidth, Peers* peers,
                     const std::function<void(double)>& on_step) {
  StepResult result;
  result.num_tokens = num_tokens;
  result.scratch_bytes = layers[0].workspace_size(num_tokens).bytes;
  Steps steps(setup, layers, num_tokens);
  const CpuKernel kernel = cpu_kernel(setup.options.isa, setup.format.format,
                                      setup.shape.config.dtype, setup.options.mode);
  const DType narrowest = narrowest_operands(setup);
  double seconds_per_step = 0;
  for (const ScratchMode mode : modes) {
    result.modes.push_back(steps.check(mode));
    seconds_per_step = steps.time(mode, 0) * 1e-6 * static_cast<double>(layers.size());
    on_step(0);
  }
  result.launches_per_call = steps.count_launches();
  PeerTurns turns(peers, setup, steps.inputs(), static_cast<std::int64_t>(layers.size()));
  turns.check([&](std::int64_t layer) { return steps.output_of(layer); });

  turns.park_peers();
  result.bandwidth_gbs.before = bandwidth.measure_gbs();
  const Peaks peaks_before = measure_peaks(kernel, narrowest, setup.threads);
  const CpuUse use(turns.processes());
  std::vector<std::vector<double>> times(modes.size());
  std::vector<Work> works;
  const auto start = std::chrono::steady_clock::now();
  const double budget =
      setup.seconds * static_cast<double>(modes.size() + turns.processes().size());
  const std::int64_t per_turn = turns.steps_per_turn(seconds_per_step);
  while (result.steps < kMostSteps &&
         (result.steps < kFewestSteps || seconds_since(start) < budget)) {
    for (std::size_t m = 0; m < modes.size(); ++m) {
      if (!turns.empty()) {
        turns.park_peers();
        steps.warm(modes[m], result.steps);
      }
      for (std::int64_t s = 0; s < per_turn; ++s) {
        times[m].push_back(steps.time(modes[m], result.steps + s));
      }
    }
    turns.run(result.steps, per_turn);
    for (std::int64_t s = 0; s < per_turn; ++s) works.push_back(steps.work(result.steps + s));
    result.steps += per_turn;
    on_step(std::min({1.0, seconds_since(start) / budget,
                      static_cast<double>(result.steps) / static_cast<double>(kFewestSteps)}));
  }
  turns.park_peers();
  result.others = use.share_of_others();
  result.bandwidth_gbs.after = bandwidth.measure_gbs();
  const Peaks peaks_after = measure_peaks(kernel, narrowest, setup.threads);

  for (std::size_t m = 0; m < modes.size(); ++m) {
    result.modes[m].time_us = spread_of(std::move(times[m]));
  }
  result.peers = turns.results();
  result.work = mean_of(works);
  result.step_bytes = result.work.bytes * static_cast<double>(layers.size());
  result.drift = result.bandwidth_gbs.drift();
  set_peaks(result, peaks_before, peaks_after);
  result.ceilings = {result.bandwidth_gbs.mean(), result.peaks.gflops};
  return result;
}

}  // namespace fusedmoe::tool
