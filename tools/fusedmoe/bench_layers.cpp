#include "bench_layers.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "bench_floor.h"
#include "bench_threads.h"
#include "formats/format.h"
#include "fusedmoe/error.h"
#include "probes.h"
#include "progress.h"
#include "text.h"

namespace fusedmoe::tool {
namespace {

// What a step reads, against the last-level cache: below about 4 some weights are still there when
// their turn comes again.
constexpr double kCachesPerStep = 10;
// Of the memory that is available; the rest is for the probe, scratch, and other processes.
constexpr double kMemoryShare = 0.6;
// Nobody waits longer for a number of layers that nobody asked for.
constexpr double kBuildSeconds = 20;
// One alone could not tell one workspace per layer from a shared one.
constexpr std::int64_t kFewestLayers = 2;

// Values of a bias; [of each expert].
std::int64_t w13_outputs(const MoeConfig& config) {
  return config.intermediate_size * (is_gated(config.activation.kind) ? 2 : 1);
}

}  // namespace

DType narrowest_operands(const BenchSetup& setup) {
  if (setup.options.mode == ComputeMode::a8) return DType::i8;
  const bool codes = format_info(setup.format.format).scales.types != 0 ||
                     format_info(setup.format.format).block_elements > 1;
  const bool exact = codes || setup.format.format == WeightFormat::bf16;
  return exact && setup.shape.config.dtype == DType::bf16 ? DType::bf16 : DType::f32;
}

RandomExperts::RandomExperts(const BenchSetup& setup, std::int64_t experts)
    : setup_(setup),
      experts_(experts),
      w13_(setup.format, w13_of(setup.format, setup.shape.config, experts)),
      w2_(setup.format, w2_of(setup.format, setup.shape.config, experts)) {
  if (!setup.shape.bias) return;
  const auto words = [&](std::int64_t values) {
    return static_cast<std::size_t>((experts * values + 1) / 2);
  };
  w13_bias_.resize(words(w13_outputs(setup.shape.config)));
  w2_bias_.resize(words(setup.shape.config.hidden_size));
}

ExpertWeights RandomExperts::view(std::int64_t experts, bool with_data) {
  ExpertWeights weights;
  weights.w13 = with_data ? w13_.view() : w13_.view_without_data(experts);
  weights.w2 = with_data ? w2_.view() : w2_.view_without_data(experts);
  if (setup_.shape.bias) {
    const MoeConfig& config = setup_.shape.config;
    weights.w13_bias = {with_data ? w13_bias_.data() : nullptr, DType::f32, experts,
                        w13_outputs(config)};
    weights.w2_bias = {with_data ? w2_bias_.data() : nullptr, DType::f32, experts,
                       config.hidden_size};
  }
  return weights;
}

void RandomExperts::fill(std::uint64_t seed) {
  const auto start = std::chrono::steady_clock::now();
  const BitPattern bias = signed_floats(DType::f32, -7);
  w13_.fill(4 * seed, setup_.threads);
  w2_.fill(4 * seed + 1, setup_.threads);
  fill_random(w13_bias_, bias, 16 * seed + 8, setup_.threads);
  fill_random(w2_bias_, bias, 16 * seed + 12, setup_.threads);
  fill_seconds_ += seconds_since(start);
}

ExpertWeights RandomExperts::as_source(std::uint64_t seed) {
  ExpertWeights weights = view(setup_.shape.num_local_experts(), false);
  weights.source = [this, seed](std::int64_t expert) {
    fill(mix(seed) + static_cast<std::uint64_t>(expert));
    return view(1, true);
  };
  return weights;
}

ExpertWeights RandomExperts::stacks(std::uint64_t seed) {
  fill(mix(seed));
  return view(experts_, true);
}

BenchLayers build_layers(const BenchSetup& setup, const LayerNeeds& needs) {
  RandomExperts experts(setup, 1);
  std::int64_t bytes =
      FusedMoe::packed_weights_size(setup.shape.config, experts.as_source(0), setup.options).bytes;
  bytes *= needs.copies;
  const std::int64_t available = available_memory_bytes();
  const auto fitting = [&] {
    return static_cast<std::int64_t>(kMemoryShare * static_cast<double>(available)) / bytes;
  };
  // Somebody who asks for a number may use most of the memory.
  const std::int64_t asked = needs.layers.value_or(1);
  if (asked * bytes > available / 10 * 9) {
    throw Error(ErrorCode::out_of_memory,
                fmt::format("--layers: expected room for {} x {}, got {} of memory available; "
                            "take fewer layers or a smaller model",
                            asked, bytes_text(bytes), bytes_text(available)));
  }
  BenchLayers result{{}, "as asked for"};
  std::int64_t count = asked;
  const auto limit = [&](std::int64_t most, const std::string& why) {
    if (needs.layers || count <= most) return;
    count = most;
    result.why = why;
  };
  if (!needs.layers) {
    const double active = expected_active_experts(setup.shape, needs.fewest_tokens) *
                          static_cast<double>(expert_bytes(setup.shape, setup.format));
    const double wanted =
        std::ceil(kCachesPerStep * static_cast<double>(last_level_cache_bytes()) / active);
    count = std::max(kFewestLayers, static_cast<std::int64_t>(wanted));
    result.why = "so that a step reads 10 x the last-level cache";
  }
  const std::string memory_why = std::string("what 60 % of the available memory holds") +
                                 (needs.copies > 1 ? ", for ours and the peers'" : "");
  limit(std::max<std::int64_t>(fitting(), 1), memory_why);
  Progress progress("packing layer", count);
  const auto start = std::chrono::steady_clock::now();
  for (std::int64_t i = 0; i < count; ++i) {
    result.plans.push_back(FusedMoe::create(
        setup.shape.config, experts.as_source(static_cast<std::uint64_t>(i)), setup.options));
    progress.step();
    if (i == 0 && needs.tokens_of_scratch > 0) {
      bytes += result.plans[0].workspace_size(needs.tokens_of_scratch).bytes;
      limit(std::max<std::int64_t>(fitting(), 1), memory_why);
    }
    const double per_layer = seconds_since(start) / static_cast<double>(i + 1);
    const auto in_time = static_cast<std::int64_t>(kBuildSeconds / per_layer);
    limit(std::max({kFewestLayers, in_time, i + 1}),
          fmt::format("what is packed within {:.0f} s", kBuildSeconds));
  }
  return result;
}

}  // namespace fusedmoe::tool
