#include "probes.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "bench_threads.h"
#include "cpu_facts.h"
#include "fusedmoe/error.h"

namespace fusedmoe::tool {
namespace {

constexpr std::int64_t kMiB = 1024 * 1024;
// Against the share of a buffer that stays in the cache from one pass to the next.
constexpr std::int64_t kCachesPerBuffer = 4;
// The best of passes: a pass that another process disturbed says nothing of the machine.
constexpr double kBandwidthSeconds = 0.2;
constexpr int kPeakPasses = 10;
constexpr double kPeakPassSeconds = 0.005;

template <class T>
T read_file(const std::string& path, T otherwise) {
  std::ifstream in(path);
  T value;
  return in >> value ? value : otherwise;
}

double measure_peak(const PeakLoop& loop, int threads) {
  int repeats = 1;
  double seconds = 0;
  for (; repeats < 1 << 20; repeats *= 2) {  // until a pass is long against the threads' start
    const auto start = std::chrono::steady_clock::now();
    loop.run(repeats);
    seconds = seconds_since(start);
    if (seconds >= kPeakPassSeconds) break;
  }
  double best = 0;
  for (int pass = 0; pass < kPeakPasses; ++pass) {
    double operations = 0;  // the same for every thread
    seconds = run_together(threads, [&](int thread) {
      const double done = loop.run(repeats);
      if (thread == 0) operations = done;
    });
    best = std::max(best, operations * threads / seconds / 1e9);
  }
  return best;
}

}  // namespace

std::int64_t last_level_cache_bytes() {
  std::int64_t largest = 0;
  for (const CpuCache& cache : cpu_caches()) largest = std::max(largest, cache.bytes);
  return largest > 0 ? largest : 32 * kMiB;
}

std::int64_t available_memory_bytes() {
  std::int64_t available = std::numeric_limits<std::int64_t>::max();
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    if (line.rfind("MemAvailable:", 0) == 0) available = std::atoll(line.c_str() + 13) * 1024;
  }
  // The mounted group's limit; "max", or no file, is none.
  const auto limit = read_file<std::int64_t>("/sys/fs/cgroup/memory.max", 0);
  const auto used = read_file<std::int64_t>("/sys/fs/cgroup/memory.current", 0);
  if (limit > 0) available = std::min(available, std::max<std::int64_t>(limit - used, 0));
  return available;
}

BandwidthProbe::BandwidthProbe(int threads) : threads_(threads) {
  const std::int64_t wanted =
      std::clamp(kCachesPerBuffer * last_level_cache_bytes(), 256 * kMiB, 2048 * kMiB);
  bytes_ = static_cast<std::size_t>(
      std::clamp(available_memory_bytes() / 8 / kMiB * kMiB, 64 * kMiB, wanted));
  void* data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    throw Error(ErrorCode::out_of_memory, "bandwidth probe: expected " + std::to_string(bytes_) +
                                              " bytes, got none from the system; free some");
  }
  data_ = static_cast<std::byte*>(data);
#ifdef MADV_HUGEPAGE
  madvise(data, bytes_, MADV_HUGEPAGE);  // the machine's ceiling, not that of its page tables
#endif
  std::memset(data, 1, bytes_);  // untouched pages would all be one page of zeros
}

BandwidthProbe::~BandwidthProbe() { munmap(data_, bytes_); }

double BandwidthProbe::measure_gbs() const {
  double best = 0;
  const auto start = std::chrono::steady_clock::now();
  const std::size_t share = bytes_ / static_cast<std::size_t>(threads_) / 4096 * 4096;
  do {
    const double seconds = run_together(threads_, [&](int thread) {
      read_bytes(data_ + share * static_cast<std::size_t>(thread), share);
    });
    best = std::max(best, static_cast<double>(share) * threads_ / seconds / 1e9);
  } while (seconds_since(start) < kBandwidthSeconds);
  return best;
}

Peaks measure_peaks(const CpuKernel& kernel, DType narrowest, int threads) {
  Peaks peaks;
  const auto loops = peak_loops();
  const bool has_other = std::any_of(loops.begin(), loops.end(), [](const PeakLoop& loop) {
    return loop.available && std::string(loop.isa) != "scalar";
  });
  const bool own_loop = std::any_of(loops.begin(), loops.end(), [&](const PeakLoop& loop) {
    return loop.available && loop.isa == kernel.isa && loop.operands == kernel.operands;
  });
  for (const PeakLoop& loop : loops) {
    if (!loop.available) continue;
    // Never the best where there is another: measured only for those who ask for it.
    if (std::string(loop.isa) == "scalar" && kernel.isa != "scalar" && has_other) continue;
    if (loop.operands != DType::f32 && loop.operands != narrowest &&
        loop.operands != kernel.operands) {
      continue;
    }
    const double gflops = measure_peak(loop, threads);
    peaks.all.push_back({loop.instruction, gflops});
    // Scalar kernels multiply integers, too: at the rate of floats.
    if (loop.isa == kernel.isa && loop.operands == (own_loop ? kernel.operands : DType::f32)) {
      peaks.gflops = gflops;
      peaks.instruction = loop.instruction;
    }
    if (gflops > peaks.best_gflops) {
      peaks.best_gflops = gflops;
      peaks.best_instruction = loop.instruction;
    }
  }
  if (peaks.instruction.empty()) {  // a kernel that has no loop yet: the machine's best
    peaks.gflops = peaks.best_gflops;
    peaks.instruction = peaks.best_instruction;
  }
  return peaks;
}

}  // namespace fusedmoe::tool
