// What one apply must move and compute, and the least time for it on this machine: the floor.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "format_spec.h"
#include "model_shapes.h"

namespace fusedmoe::tool {

// Of one call, or the mean of several.
struct Work {
  double active_experts = 0;  // local experts that a token chose
  double rows = 0;            // pairs of a token and a local expert
  double bytes = 0;           // weights of the active experts, hidden in, output out
  double operations = 0;      // a multiply-add counts as two
};

// w13, w2 and their biases (kept in fp32) of one expert, without padding: codes, scales and zero
// points as a checkpoint stores them.
std::int64_t expert_bytes(const ModelShape& shape, const FormatSpec& format);
// Weights of all local experts.
std::int64_t layer_bytes(const ModelShape& shape, const FormatSpec& format);

// topk_ids: [num_tokens, top_k] global ids; expert_map: [num_experts] local id or -1.
Work count_work(const ModelShape& shape, const FormatSpec& format,
                std::span<const std::int32_t> topk_ids, std::span<const std::int32_t> expert_map);
// Uniform random routing, in expectation.
double expected_active_experts(const ModelShape& shape, std::int64_t num_tokens);
Work mean_of(std::span<const Work> works);

struct Ceilings {
  double bandwidth_gbs = 0;  // measured reading of memory, 1e9 bytes/s
  double peak_gflops = 0;    // measured, 1e9 operations/s
};

// max(bytes / bandwidth, operations / peak)
double floor_us(const Work& work, const Ceilings& ceilings);

struct Spread {
  double median = 0;
  double min = 0;
  double max = 0;
};
// values: at least one.
Spread spread_of(std::vector<double> values);

}  // namespace fusedmoe::tool
