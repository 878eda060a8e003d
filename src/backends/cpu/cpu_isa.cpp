#include "backends/cpu/cpu_isa.h"

#include <sched.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#include "fusedmoe/error.h"

namespace fusedmoe::cpu {
namespace {

constexpr std::array kAll = {CpuIsa::scalar, CpuIsa::avx2_fma};

CpuIsa parse_isa(const char* argument, const std::string& name) {
  std::string known;
  for (const CpuIsa isa : kAll) {
    if (name == to_string(isa)) return isa;
    known += (known.empty() ? "" : ", ") + std::string(to_string(isa));
  }
  throw Error(ErrorCode::invalid_argument, std::string(argument) + ": expected one of " + known +
                                               ", got '" + name + "'; name one of these");
}

#if defined(__x86_64__)
bool has_f16c() noexcept {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

int affinity_threads() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  // More CPUs than cpu_set_t holds, or no permission: what the runtime says.
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// CPUs by the quota of one group; 0 = no limit. `folder` holds cpu.max (cgroup v2), or
// cpu.cfs_quota_us and cpu.cfs_period_us (v1).
double quota_of(const std::string& folder) {
  std::string quota;
  double period = 0;
  const bool found = (std::ifstream(folder + "/cpu.max") >> quota >> period) ||
                     (std::ifstream(folder + "/cpu.cfs_quota_us") >> quota &&
                      std::ifstream(folder + "/cpu.cfs_period_us") >> period);
  if (!found || quota == "max" || period <= 0) return 0;
  return std::max(0.0, std::atof(quota.c_str()) / period);
}

}  // namespace

const char* to_string(CpuIsa isa) noexcept {
  switch (isa) {
    case CpuIsa::scalar:
      return "scalar";
    case CpuIsa::avx2_fma:
      return "avx2";
  }
  return "unknown";
}

std::span<const CpuIsa> all_isas() noexcept { return kAll; }

bool is_available(CpuIsa isa) noexcept {
  switch (isa) {
    case CpuIsa::scalar:
      return true;
    case CpuIsa::avx2_fma:
#if defined(__x86_64__)
      // The compiler's own probe also asks whether the kernel saves the registers.
      return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
             has_f16c();
#else
      return false;
#endif
  }
  return false;
}

CpuIsa choose_isa(const std::string& limit) {
  CpuIsa top = kAll.back();
  if (!limit.empty()) top = std::min(top, parse_isa("options.isa", limit));
  const char* environment = std::getenv("FUSEDMOE_ISA");
  if (environment != nullptr && environment[0] != '\0') {
    top = std::min(top, parse_isa("FUSEDMOE_ISA", environment));
  }
  CpuIsa best = CpuIsa::scalar;
  for (const CpuIsa isa : kAll) {
    if (isa <= top && is_available(isa)) best = isa;
  }
  return best;
}

int quota_threads(const std::string& root) {
  double limit = 0;
  const auto tighten = [&](const std::string& folder) {
    const double cpus = quota_of(root + folder);
    if (cpus > 0 && (limit == 0 || cpus < limit)) limit = cpus;
  };
  // Lines "0::/path" (v2) and "number:controllers:/path" (v1). A container may see its own group
  // as the mount's root, whatever the path says.
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    if (controllers != ",," && controllers.find(",cpu,") == std::string::npos) continue;
    const std::string mount = controllers == ",," ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
    for (std::string path = line.substr(second + 1); path.size() > 1 && path.front() == '/';
         path.resize(path.find_last_of('/'))) {
      tighten(mount + path);
    }
  }
  tighten("/sys/fs/cgroup");
  tighten("/sys/fs/cgroup/cpu");
  return static_cast<int>(std::ceil(std::min(limit, 1e6)));
}

int available_threads() {
  const int affinity = affinity_threads();
  const int quota = quota_threads("");
  return quota > 0 ? std::min(affinity, quota) : affinity;
}

std::string thread_limit_reason() {
  const int affinity = affinity_threads();
  const int quota = quota_threads("");
  if (quota > 0 && quota < affinity) {
    return "cgroup limit of " + std::to_string(quota) + " of " + std::to_string(affinity) + " CPUs";
  }
  return "affinity mask of " + std::to_string(affinity) + " CPUs";
}

}  // namespace fusedmoe::cpu
