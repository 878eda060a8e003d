// The instruction sets that kernels are written for, and which of them this machine runs.
#pragma once

#include <span>
#include <string>

namespace fusedmoe::cpu {

// In order of preference, worst first.
enum class CpuIsa : unsigned char { scalar = 0, avx2_fma };

const char* to_string(CpuIsa isa) noexcept;
// All that kernels exist for.
std::span<const CpuIsa> all_isas() noexcept;
// True when this machine and its kernel run it.
bool is_available(CpuIsa isa) noexcept;
// The best one that is available, not above `limit` (a name; empty = none) nor the environment's
// FUSEDMOE_ISA. Throws invalid_argument for a name that is unknown.
CpuIsa choose_isa(const std::string& limit);

// Threads that this process may use: affinity mask and cgroup limit, now.
int available_threads();
// CPUs that the tightest of this process's cgroups allows, rounded up; 0 = no limit. `root` stands
// before /proc and /sys: empty but in tests.
int quota_threads(const std::string& root);
// For people: what limits available_threads().
std::string thread_limit_reason();

}  // namespace fusedmoe::cpu
