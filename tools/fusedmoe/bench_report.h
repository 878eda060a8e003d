// The rows of bench: as JSON, and as a table for people with a legend. Warnings are in
// bench_warnings.h.
#pragma once

#include <cstdio>
#include <nlohmann/json.hpp>

#include "bench_step.h"

namespace fusedmoe::tool {

// What all rows of a run say of the layer and the plan.
nlohmann::ordered_json describe_setup(const BenchSetup& setup);

nlohmann::ordered_json bench_row(const BenchSetup& setup, std::int64_t layers,
                                 const StepResult& result, const ModeResult& mode);

// On stdout. `why`: of the number of layers.
void print_header(const BenchSetup& setup, const BenchLayers& layers);
void print_rows(const BenchSetup& setup, const StepResult& result);
void print_floors(const std::vector<StepResult>& results);
// What the columns say. Once, after all models.
void print_legend(bool with_peers);
// Which peers there are, and how to install the others.
void print_peers(const std::vector<Peer>& peers, std::FILE* out);

}  // namespace fusedmoe::tool
