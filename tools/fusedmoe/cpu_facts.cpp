#include "cpu_facts.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>
#include <tuple>

#ifdef FUSEDMOE_CPU
#include "backends/cpu/cpu_isa.h"
#include "backends/cpu/kernels/kernels.h"
#endif

namespace fusedmoe::tool {
namespace {

namespace fs = std::filesystem;

// The first line of a small file of the kernel; empty when it is not there.
std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "32K", "1024K", "8M".
std::int64_t parse_bytes(const std::string& text) {
  std::istringstream in(text);
  std::int64_t value = 0;
  char unit = '\0';
  if (!(in >> value)) return 0;
  in >> unit;
  const std::int64_t shift = unit == 'K' ? 10 : unit == 'M' ? 20 : unit == 'G' ? 30 : 0;
  return value << shift;
}

// "0-3,8,10-11" -> 7.
int count_cpus(const std::string& list) {
  int count = 0;
  std::istringstream ranges(list);
  for (std::string range; std::getline(ranges, range, ',');) {
    std::istringstream in(range);
    int first = 0;
    int last = 0;
    char dash = '\0';
    if (!(in >> first)) return 0;
    count += in >> dash >> last ? last - first + 1 : 1;
  }
  return count;
}

}  // namespace

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const auto colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

std::vector<CpuCache> cpu_caches() {
  std::vector<CpuCache> caches;
  for (int index = 0; index < 8; ++index) {
    const fs::path folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index);
    const std::string level = first_line(folder / "level");
    if (level.empty()) break;
    CpuCache cache;
    cache.level = std::atoi(level.c_str());
    cache.type = first_line(folder / "type");
    std::transform(cache.type.begin(), cache.type.end(), cache.type.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    cache.bytes = parse_bytes(first_line(folder / "size"));
    cache.shared_by = count_cpus(first_line(folder / "shared_cpu_list"));
    caches.push_back(cache);
  }
  std::sort(caches.begin(), caches.end(), [](const CpuCache& a, const CpuCache& b) {
    return std::tie(a.level, a.type) < std::tie(b.level, b.type);
  });
  return caches;
}

#ifdef FUSEDMOE_CPU

std::vector<IsaInfo> cpu_isas() {
  std::vector<IsaInfo> isas;
  for (const cpu::CpuIsa isa : cpu::all_isas()) {
    isas.push_back({cpu::to_string(isa), cpu::is_available(isa)});
  }
  return isas;
}

std::string cpu_isa_name(const std::string& limit) {
  return cpu::to_string(cpu::choose_isa(limit));
}

CpuKernel cpu_kernel(const std::string& isa_limit, WeightFormat format, DType dtype,
                     ComputeMode mode) {
  const cpu::GemmKernel* kernel = cpu::find_gemm(cpu::choose_isa(isa_limit), format, dtype, mode);
  if (kernel == nullptr) return {};
  return {cpu::to_string(kernel->isa), kernel->dtype};
}

int cpu_threads() { return cpu::available_threads(); }
std::string cpu_threads_reason() { return cpu::thread_limit_reason(); }

#else

std::vector<IsaInfo> cpu_isas() { return {}; }
std::string cpu_isa_name(const std::string&) { return {}; }
CpuKernel cpu_kernel(const std::string&, WeightFormat, DType, ComputeMode) { return {}; }
int cpu_threads() { return static_cast<int>(std::max(1U, std::thread::hardware_concurrency())); }
std::string cpu_threads_reason() { return "CPUs of the machine"; }

#endif

}  // namespace fusedmoe::tool
