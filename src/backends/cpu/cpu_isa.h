// The instruction sets that kernels are written for, and which of them this machine runs.
#pragma once

#include <span>
#include <string>

namespace fusedmoe::cpu {

// Each includes those before it.
enum class CpuIsa : unsigned char {
  scalar = 0,
  avx2_fma,
  avx512,       // F, BW, DQ, VL
  avx512_vnni,  // and VNNI, VBMI
  avx512_bf16,
  amx_bf16,
  amx_int8
};

const char* to_string(CpuIsa isa) noexcept;
// All that kernels exist for.
std::span<const CpuIsa> all_isas() noexcept;
// True when this machine and its kernel run it. Asks the kernel for permission where that is needed
// (AMX's tiles): it holds for the whole process.
bool is_available(CpuIsa isa) noexcept;
// What is known of the processor: vendor as CPUID spells it.
struct CpuFacts {
  std::string vendor;
};
// False for what a machine has but runs slower than the sets below it.
bool is_fast(CpuIsa isa, const CpuFacts& facts) noexcept;
CpuFacts cpu_facts();
// The best one that is available and fast, not above `limit` (a name; empty = none) nor the
// environment's FUSEDMOE_ISA; one that is the limit itself need not be fast. Throws
// invalid_argument for a name that is unknown.
CpuIsa choose_isa(const std::string& limit);
// For people: why choose_isa(limit) is no better; empty when it is the best there is.
std::string isa_reason(const std::string& limit);

// Threads that this process may use: affinity mask and cgroup limit, now.
int available_threads();
// CPUs that the tightest of this process's cgroups allows, rounded up; 0 = no limit. `root` stands
// before /proc and /sys: empty but in tests.
int quota_threads(const std::string& root);
// For people: what limits available_threads().
std::string thread_limit_reason();

}  // namespace fusedmoe::cpu
