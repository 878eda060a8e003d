#include "backends/cpu/cpu_isa.h"

#include <sched.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
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

constexpr std::array kAll = {CpuIsa::scalar,      CpuIsa::avx2_fma,    CpuIsa::avx512,
                             CpuIsa::avx512_vnni, CpuIsa::avx512_bf16, CpuIsa::amx_bf16,
                             CpuIsa::amx_int8};

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

#if !defined(FUSEDMOE_AMX_MODEL)
bool has_amx_int8() noexcept {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  constexpr unsigned kInt8 = 1U << 25;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kInt8) != 0;
}

// CPUID says that the processor has tiles; the kernel wants to be asked for their registers, and
// may refuse. Its permission holds for threads that start later, too.
bool may_use_amx_bf16() noexcept {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  constexpr unsigned kBf16 = 1U << 22;
  constexpr unsigned kTile = 1U << 24;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & kBf16) == 0 || (edx & kTile) == 0) return false;
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif
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
    case CpuIsa::avx512:
      return "avx512";
    case CpuIsa::avx512_vnni:
      return "avx512_vnni";
    case CpuIsa::avx512_bf16:
      return "avx512_bf16";
    case CpuIsa::amx_bf16:
      return "amx_bf16";
    case CpuIsa::amx_int8:
      return "amx_int8";
  }
  return "unknown";
}

std::span<const CpuIsa> all_isas() noexcept { return kAll; }

bool is_available(CpuIsa isa) noexcept {
  if (isa == CpuIsa::scalar) return true;
#if defined(__x86_64__)
  // The compiler's own probe also asks whether the kernel saves the registers.
  switch (isa) {
    case CpuIsa::scalar:
      return true;
    case CpuIsa::avx2_fma:
      return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
             has_f16c();
    case CpuIsa::avx512:
      return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
             __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
             is_available(CpuIsa::avx2_fma);
    case CpuIsa::avx512_vnni:
      return __builtin_cpu_supports("avx512vnni") != 0 &&
             __builtin_cpu_supports("avx512vbmi") != 0 && is_available(CpuIsa::avx512);
    case CpuIsa::avx512_bf16:
      return __builtin_cpu_supports("avx512bf16") != 0 && is_available(CpuIsa::avx512_vnni);
    case CpuIsa::amx_bf16:
#if defined(FUSEDMOE_AMX_MODEL)
      return is_available(CpuIsa::avx512_bf16);  // whose kernels do what tiles do not
#else
      static const bool allowed = is_available(CpuIsa::avx512_bf16) && may_use_amx_bf16();
      return allowed;
#endif
    case CpuIsa::amx_int8:
#if defined(FUSEDMOE_AMX_MODEL)
      return is_available(CpuIsa::amx_bf16);
#else
      return is_available(CpuIsa::amx_bf16) && has_amx_int8();
#endif
  }
#endif
  return false;
}

CpuFacts cpu_facts() {
  CpuFacts facts;
#if defined(__x86_64__)
  unsigned eax = 0;
  unsigned name[3] = {};
  if (__get_cpuid(0, &eax, &name[0], &name[2], &name[1]) != 0) {
    facts.vendor.assign(reinterpret_cast<const char*>(name), sizeof(name));
  }
#endif
  return facts;
}

bool is_fast(CpuIsa isa, const CpuFacts& facts) noexcept {
  switch (isa) {
    case CpuIsa::scalar:
    case CpuIsa::avx2_fma:
    case CpuIsa::avx512:
    case CpuIsa::avx512_vnni:
      return true;
    case CpuIsa::avx512_bf16:
      // vdpbf16ps against fp32 FMA, 2 threads: 1070 and 537 GFLOP/s on Zen 5, 468 and 234 on Zen 4,
      // but 203 and 414 on Intel's Xeons.
      return facts.vendor != "GenuineIntel";
    case CpuIsa::amx_bf16:
    case CpuIsa::amx_int8:
#if defined(FUSEDMOE_AMX_MODEL)
      return false;
#else
      return true;
#endif
  }
  return false;
}

namespace {

struct Limit {
  CpuIsa top = kAll.back();
  bool named = false;  // by the option or the environment
  std::string reason;
};

Limit limit_of(const std::string& option) {
  Limit limit;
  const auto lower = [&](const char* argument, const std::string& name) {
    const CpuIsa isa = parse_isa(argument, name);
    if (limit.named && isa >= limit.top) return;
    limit = {isa, true, std::string(argument) + " = " + name};
  };
  if (!option.empty()) lower("options.isa", option);
  const char* environment = std::getenv("FUSEDMOE_ISA");
  if (environment != nullptr && environment[0] != '\0') lower("FUSEDMOE_ISA", environment);
  return limit;
}

}  // namespace

CpuIsa choose_isa(const std::string& option) {
  const Limit limit = limit_of(option);
  const CpuFacts facts = cpu_facts();
  CpuIsa best = CpuIsa::scalar;
  for (const CpuIsa isa : kAll) {
    if (isa > limit.top || !is_available(isa)) continue;
    if (is_fast(isa, facts) || (limit.named && isa == limit.top)) best = isa;
  }
  return best;
}

std::string isa_reason(const std::string& option) {
  const CpuIsa chosen = choose_isa(option);
  const Limit limit = limit_of(option);
  std::string reason;
  for (const CpuIsa isa : kAll) {
    if (isa <= chosen) continue;
    reason += (reason.empty() ? "not " : ", not ") + std::string(to_string(isa)) + ": ";
    if (isa > limit.top) {
      reason += limit.reason;
    } else if (!is_available(isa)) {
      reason += "absent or refused here";
    } else {
      reason += "slower than the sets below it on " + cpu_facts().vendor;
    }
  }
  return reason;
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
