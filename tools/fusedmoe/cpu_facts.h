// What the tool tells of the host's CPU: model, caches, instruction sets, threads. The one place of
// the tool that knows whether the build has the CPU backend.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fusedmoe/config.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::tool {

// "AMD EPYC 9654 96-Core Processor"; "unknown" where the kernel does not say.
std::string cpu_model();

struct CpuCache {
  int level = 0;
  std::string type;        // "data", "instruction" or "unified"
  std::int64_t bytes = 0;  // of one
  int shared_by = 0;       // CPUs; 0 = not known
};

// Of the first CPU that the kernel tells about, by level; empty where it does not.
std::vector<CpuCache> cpu_caches();

struct IsaInfo {
  std::string name;
  bool available = false;
};

// Worst first; empty in a build without the CPU backend.
std::vector<IsaInfo> cpu_isas();
// The best one that is available, not above `limit` nor FUSEDMOE_ISA; empty in a build without the
// CPU backend. Throws invalid_argument for an unknown name.
std::string cpu_isa_name(const std::string& limit);

// What the CPU backend multiplies weights of a format with; without it, or without such a kernel,
// isa is empty.
struct CpuKernel {
  std::string isa;
  DType operands = DType::f32;
};
CpuKernel cpu_kernel(const std::string& isa_limit, WeightFormat format, DType dtype,
                     ComputeMode mode);

int cpu_threads();
std::string cpu_threads_reason();

}  // namespace fusedmoe::tool
