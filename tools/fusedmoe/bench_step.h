// Times decode steps, one apply per layer, for each way of owning scratch, and counts what each
// way allocates. All that the timed part needs is prepared outside of it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench_floor.h"
#include "bench_layers.h"
#include "bench_turns.h"
#include "probes.h"

namespace fusedmoe::tool {

// Whose the scratch is.
enum class ScratchMode : std::uint8_t {
  allocate = 0,  // apply allocates for each call
  per_layer,     // one workspace for each layer
  shared,        // one workspace for all layers
};
const char* to_string(ScratchMode mode) noexcept;

struct ModeResult {
  ScratchMode mode = ScratchMode::shared;
  Spread time_us;                       // per apply: a step's time over its layers
  double allocations_per_call = 0;      // calls of operator new, all threads
  std::int64_t peak_scratch_bytes = 0;  // alive at once during a step, over all layers
  bool bit_equal = true;                // outputs of all layers are those of mode allocate
};

// What a probe read before the timed part and after it.
struct ProbePair {
  double before = 0;
  double after = 0;

  double mean() const { return (before + after) / 2; }
  double drift() const;  // how far the two are apart, 0.1 = 10 %
};

struct PeakProbe {
  std::string instruction;
  ProbePair gflops;
};

struct StepResult {
  std::int64_t num_tokens = 0;
  std::int64_t steps = 0;  // timed, of each mode
  Work work;               // of one apply, mean over the timed ones
  ProbePair bandwidth_gbs;
  std::vector<PeakProbe> peak_probes;  // every instruction that this machine has for the format
  Peaks peaks;                         // means of the probes before and after
  Ceilings ceilings;                   // means, too: of the bandwidth and the plan's instruction
  double drift = 0;                    // the largest of all probes
  double others = 0;      // CPU time that other programs took meanwhile: a share of the CPUs' time
  double step_bytes = 0;  // what one step reads, to be held against the caches
  std::int64_t launches_per_call = 0;  // regions in which threads fork and join
  std::int64_t scratch_bytes = 0;      // workspace_size(num_tokens)
  std::vector<ModeResult> modes;
  std::vector<PeerResult> peers;  // those of --compare, whether they ran or not
};

// Modes take turns step by step (A B C A B C), and with peers, which may be null, turns of a few
// steps (A A B B C C peer peer), so that whatever else the machine does meets all of them. on_step
// is called after every turn with the share that is done, 0 to 1, outside the timed part.
StepResult run_steps(const BenchSetup& setup, const std::vector<FusedMoe>& layers,
                     std::int64_t num_tokens, const std::vector<ScratchMode>& modes,
                     const BandwidthProbe& bandwidth, Peers* peers,
                     const std::function<void(double)>& on_step);

}  // namespace fusedmoe::tool
