// bench --load: how fast weights are packed, and how much memory that takes at its peak.
#pragma once

#include "bench_layers.h"
#include "report.h"

namespace fusedmoe::tool {

// Two rows: weights from a source, one expert at a time, and weights as whole stacks.
void bench_load(const BenchSetup& setup, Report& report);

}  // namespace fusedmoe::tool
