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

// CPUs by quota, rounded up; 0 = no limit. The tightest of this process's groups (cgroup v2), or
// the mounted group's (v1).
int quota_threads() {
  const auto quota_of = [](const std::string& file) -> double {
    std::ifstream in(file);
    std::string quota;
    double period = 0;
    if (!(in >> quota >> period) || quota == "max" || period <= 0) return 0;
    return std::atof(quota.c_str()) / period;
  };
  double limit = 0;
  const auto tighten = [&](double cpus) {
    if (cpus > 0 && (limit == 0 || cpus < limit)) limit = cpus;
  };
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (line.rfind("0::", 0) != 0) continue;
    for (std::string path = line.substr(3); !path.empty();) {
      tighten(quota_of("/sys/fs/cgroup" + path + "/cpu.max"));
      const auto slash = path.find_last_of('/');
      path = slash == std::string::npos || path == "/" ? "" : path.substr(0, slash);
    }
  }
  tighten(quota_of("/sys/fs/cgroup/cpu.max"));
  double quota = 0;
  double period = 0;
  if (std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") >> quota &&
      std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> period && quota > 0 && period > 0) {
    tighten(quota / period);
  }
  return limit > 0 ? std::max(1, static_cast<int>(std::ceil(limit))) : 0;
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

int available_threads() {
  const int affinity = affinity_threads();
  const int quota = quota_threads();
  return quota > 0 ? std::min(affinity, quota) : affinity;
}

std::string thread_limit_reason() {
  const int affinity = affinity_threads();
  const int quota = quota_threads();
  if (quota > 0 && quota < affinity) {
    return "cgroup limit of " + std::to_string(quota) + " of " + std::to_string(affinity) + " CPUs";
  }
  return "affinity mask of " + std::to_string(affinity) + " CPUs";
}

}  // namespace fusedmoe::cpu
