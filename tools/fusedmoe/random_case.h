// A random layer, call and plan: everything that `verify --random` varies, drawn from one seed. How
// a case is run and judged is in random_case_run.cpp.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checked_memory.h"
#include "fusedmoe/config.h"
#include "reference/random_layer.h"
#include "reference/tolerance.h"

namespace fusedmoe::tool {

// Bounds of what is drawn. The defaults let one dimension at a time pass every kernel's tile, and
// keep the oracle quick.
struct SizeLimits {
  std::int64_t max_multiply_adds = 30'000'000;
  std::int64_t max_weights = 1'500'000;
  std::int64_t max_hidden = 2400;
  std::int64_t max_intermediate = 1400;
  std::int64_t max_experts = 300;
  std::int64_t max_tokens = 300;
};

enum class MapKind : std::uint8_t { none = 0, linear, round_robin, uneven, empty };
enum class RunnerKind : std::uint8_t { none = 0, fork_join, gang };
enum class StorageKind : std::uint8_t { own = 0, source, borrowed, caller, adopt };
const char* to_string(MapKind kind) noexcept;
const char* to_string(RunnerKind kind) noexcept;
const char* to_string(StorageKind kind) noexcept;

// One way to run a case; every way must give the same bits.
struct CaseRun {
  int threads = 1;
  StorageKind storage = StorageKind::own;
  WorkspaceMode workspace = WorkspaceMode::exact;
  std::int64_t tokens_between = 1;  // tokens of a piece with WorkspaceMode::between
  RunnerKind runner = RunnerKind::none;
  int runner_threads = 1;
  bool in_place = false;
};

struct RandomCase {
  std::uint64_t seed = 0;
  Device device = {};
  std::string isa = {};  // empty = the machine's best
  MoeConfig config = {};
  RandomWeightsOptions weights = {};
  ComputeMode mode = ComputeMode::a16;
  RandomInputOptions input = {};
  std::int64_t hidden_offset = 0;  // elements by which hidden and output start off 64 bytes
  std::int64_t output_offset = 0;
  MapKind map_kind = MapKind::none;
  ExpertMap expert_map = {};
  std::vector<std::int32_t> call_map = {};  // empty = none
  std::int64_t num_local = 0;
  std::array<CaseRun, 2> runs = {};
};

// isas: the instruction sets to draw from. The same arguments give the same case.
RandomCase draw_case(std::uint64_t seed, const SizeLimits& limits,
                     std::span<const std::string> isas);

// For people, in one line.
std::string describe(const RandomCase& drawn);

// (dimension, value) of everything that the case covers, in a fixed order of dimensions.
std::vector<std::pair<std::string, std::string>> tags(const RandomCase& drawn);

struct CaseResult {
  Errors errors = {};
  Errors limit = {};
  std::string problem;  // what went wrong, in words; empty = nothing
  bool pass() const { return problem.empty(); }
};

// Never throws fusedmoe::Error: a case that does not run is a failure.
CaseResult run_case(const RandomCase& drawn);

}  // namespace fusedmoe::tool
