// The machine's memory nodes, as far as this process may run on them. With more than one, each node
// keeps a share of every expert's panels in its own memory, and its threads multiply by that share.
#pragma once

#include <sched.h>

#include <cstddef>
#include <string>
#include <vector>

namespace fusedmoe::cpu {

struct NumaNode {
  int id;          // as the kernel numbers it; -1 = made up
  cpu_set_t cpus;  // that this process may use
};

// At least one. FUSEDMOE_NUMA_NODES gives another number: 1 turns placement off, and nodes beyond
// the machine's are made up, for tests; anything else throws invalid_argument. `root` stands before
// /sys: empty but in tests.
std::vector<NumaNode> read_numa_nodes(const std::string& root);
// The same, read once in a process: first where a plan is checked, which may throw.
const std::vector<NumaNode>& numa_nodes();

// Thread t of any team belongs to node t % nodes: numbers of threads per node differ by at most
// one. Keeps the calling thread on the CPUs of its node; does nothing with one node or a made-up
// one.
void bind_thread(int thread) noexcept;
// Asks for pages of [data, data + bytes), as far as they are not in use yet, on a node.
void bind_memory(std::byte* data, std::size_t bytes, int node) noexcept;

}  // namespace fusedmoe::cpu
