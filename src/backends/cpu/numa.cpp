#include "backends/cpu/numa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "fusedmoe/error.h"

namespace fusedmoe::cpu {
namespace {

// "0-3,8,10-11": what of it the process may use.
cpu_set_t parse_cpus(const std::string& list, const cpu_set_t& allowed) {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::istringstream ranges(list);
  for (std::string range; std::getline(ranges, range, ',');) {
    std::istringstream in(range);
    int first = 0;
    int last = 0;
    char dash = '\0';
    if (!(in >> first)) continue;
    if (!(in >> dash >> last)) last = first;
    for (int cpu = std::max(first, 0); cpu <= last && cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &set);
    }
  }
  return set;
}

constexpr int kMostNodes = 64;

// By FUSEDMOE_NUMA_NODES; 0 = as the machine has them.
int wanted_nodes() {
  const char* text = std::getenv("FUSEDMOE_NUMA_NODES");
  if (text == nullptr || text[0] == '\0') return 0;
  int count = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, count);
  if (error == std::errc() && stop == end && count >= 1 && count <= kMostNodes) return count;
  throw Error(ErrorCode::invalid_argument, "FUSEDMOE_NUMA_NODES: expected a number from 1 to " +
                                               std::to_string(kMostNodes) + ", got '" + text +
                                               "'; set 1 to turn placement off, or unset it");
}

}  // namespace

std::vector<NumaNode> read_numa_nodes(const std::string& root) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  // Fails where a machine has more CPUs than the set: one node then.
  const bool known = sched_getaffinity(0, sizeof(allowed), &allowed) == 0;
  std::vector<NumaNode> nodes;
  for (int id = 0; known && id < kMostNodes; ++id) {
    std::ifstream file(root + "/sys/devices/system/node/node" + std::to_string(id) + "/cpulist");
    std::string list;
    if (!std::getline(file, list)) continue;
    const cpu_set_t cpus = parse_cpus(list, allowed);
    if (CPU_COUNT(&cpus) > 0) nodes.push_back({id, cpus});  // memory without CPUs has no threads
  }
  const int count = wanted_nodes();
  if (count > 0 && static_cast<std::size_t>(count) != nodes.size()) {
    nodes.assign(static_cast<std::size_t>(count), {-1, allowed});
  }
  if (nodes.empty()) nodes.push_back({-1, allowed});
  return nodes;
}

const std::vector<NumaNode>& numa_nodes() {
  static const std::vector<NumaNode> nodes = read_numa_nodes("");
  return nodes;
}

void bind_thread(int thread) noexcept {
  const auto& nodes = numa_nodes();
  const NumaNode& node = nodes[static_cast<std::size_t>(thread) % nodes.size()];
  if (nodes.size() > 1 && node.id >= 0) sched_setaffinity(0, sizeof(node.cpus), &node.cpus);
}

void bind_memory(std::byte* data, std::size_t bytes, int node) noexcept {
  const int id = numa_nodes()[static_cast<std::size_t>(node)].id;
  if (numa_nodes().size() == 1 || id < 0) return;
  constexpr int kPreferred = 1;  // MPOL_PREFERRED: another node when this one is full
  const std::uint64_t mask = std::uint64_t{1} << id;
  constexpr unsigned long kMaskBits = 65;  // one more than there are: the kernel counts so
  syscall(SYS_mbind, data, bytes, kPreferred, &mask, kMaskBits, 0);
}

}  // namespace fusedmoe::cpu
