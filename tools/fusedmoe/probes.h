// What this machine can do at most, measured: reading memory, and multiplying. The floors of bench
// rest on these. The loops with instructions of their own are in probes_peak.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cpu_facts.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::tool {

// The largest cache of a CPU; 32 MiB when the kernel does not say.
std::int64_t last_level_cache_bytes();
// What this process may still use: MemAvailable, or less under a cgroup's limit.
std::int64_t available_memory_bytes();

// Reads a buffer of its own that no cache holds.
class BandwidthProbe {
 public:
  // Throws out_of_memory.
  explicit BandwidthProbe(int threads);
  ~BandwidthProbe();
  BandwidthProbe(const BandwidthProbe&) = delete;
  BandwidthProbe& operator=(const BandwidthProbe&) = delete;

  // 1e9 bytes per second by all threads: the best of several passes, about 0.2 s.
  double measure_gbs() const;

 private:
  int threads_;
  std::size_t bytes_;
  std::byte* data_ = nullptr;
};

// One instruction in a loop that nothing but its throughput limits.
struct PeakLoop {
  const char* instruction;
  const char* isa;  // of the kernels that it is the limit of, as `fusedmoe info` prints it
  DType operands;   // what it multiplies; f32 also serves the narrower ones, widened
  bool available;   // on this machine
  // Runs for about 1e4 * `repeats` cycles and returns the operations done (a multiply-add is two).
  double (*run)(int repeats);
};

std::span<const PeakLoop> peak_loops();

// Sums up the memory, in any way that the compiler cannot drop. In probes_peak.cpp.
std::uint64_t read_bytes(const std::byte* data, std::size_t bytes);

struct PeakReading {
  std::string instruction;
  double gflops = 0;
};

struct Peaks {
  double gflops = 0;  // of the kernel's instruction
  std::string instruction;
  double best_gflops = 0;  // of the machine's best instruction for the operands, used or not
  std::string best_instruction;
  std::vector<PeakReading> all;  // of every instruction that was measured, in order of peak_loops()
};

// By `threads` threads; about 0.1 s for each instruction. narrowest: the operands that the weights
// and the mode allow, whether the kernel takes them or wider ones.
Peaks measure_peaks(const CpuKernel& kernel, DType narrowest, int threads);

}  // namespace fusedmoe::tool
