// The facts that `fusedmoe info` prints, for verbs that put them beside their results.
#pragma once

#include <nlohmann/json.hpp>

namespace fusedmoe::tool {

// version, cpu, isa, isa_reason, instruction_sets, threads, threads_reason, caches, devices.
nlohmann::ordered_json machine_facts();

}  // namespace fusedmoe::tool
