// The rows of bench: as JSON, and as a table for people with a legend and warnings.
#pragma once

#include <nlohmann/json.hpp>

#include "bench_step.h"

namespace fusedmoe::tool {

// What all rows of a run say of the layer and the plan.
nlohmann::ordered_json describe_setup(const BenchSetup& setup);

nlohmann::ordered_json bench_row(const BenchSetup& setup, std::int64_t layers,
                                 const StepResult& result, const ModeResult& mode);

// On stdout. `why`: of the number of layers.
void print_header(const BenchSetup& setup, const BenchLayers& layers);
void print_rows(const StepResult& result);
void print_legend(const BenchSetup& setup, const std::vector<StepResult>& results);

// What makes the figures doubtful, with the cure: a noisy machine, or weights that stayed in the
// cache. Empty when nothing does.
std::vector<std::string> warnings(const std::vector<StepResult>& results);

}  // namespace fusedmoe::tool
