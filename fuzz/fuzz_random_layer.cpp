// libFuzzer: bytes -> a tiny random layer, call and plan, run two ways and compared with the
// oracle. The cases are those of `fusedmoe verify --random`; the input is a seed and bounds of the
// sizes.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cpu_facts.h"
#include "random_case.h"

namespace {

using fusedmoe::tool::CaseResult;
using fusedmoe::tool::RandomCase;
using fusedmoe::tool::SizeLimits;

const std::vector<std::string>& isas() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> available;
    for (const auto& isa : fusedmoe::tool::cpu_isas()) {
      if (isa.available) available.push_back(isa.name);
    }
    return available;
  }();
  return names;
}

}  // namespace

// Bytes: 8 of the seed, then one each for the bounds of hidden_size, intermediate_size, experts
// and tokens.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::uint8_t bytes[12] = {};
  if (size > 0) std::memcpy(bytes, data, size < sizeof(bytes) ? size : sizeof(bytes));
  std::uint64_t seed = 0;
  std::memcpy(&seed, bytes, sizeof(seed));
  SizeLimits limits;
  limits.max_multiply_adds = 200'000;
  limits.max_weights = 20'000;
  limits.max_hidden = 1 + bytes[8];
  limits.max_intermediate = 1 + bytes[9];
  limits.max_experts = 1 + bytes[10] % 64;
  limits.max_tokens = bytes[11] % 64;
  const RandomCase drawn = fusedmoe::tool::draw_case(seed, limits, isas());
  const CaseResult result = fusedmoe::tool::run_case(drawn);
  if (!result.pass()) {
    std::fprintf(stderr, "seed %llu: %s\n  %s\n", static_cast<unsigned long long>(seed),
                 result.problem.c_str(), fusedmoe::tool::describe(drawn).c_str());
    std::abort();
  }
  return 0;
}
