#include "bench_layers.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "bench_floor.h"
#include "bench_threads.h"
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

DType dtype_of(WeightFormat format) {
  return format == WeightFormat::f32   ? DType::f32
         : format == WeightFormat::f16 ? DType::f16
                                       : DType::bf16;
}

std::uint64_t mix(std::uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9U;
  x = (x ^ x >> 27) * 0x94d049bb133111ebU;
  return x ^ x >> 31;
}

// Eight generators side by side (xorshift64), so that the compiler runs them in vectors. Sign,
// lowest bit of the exponent and mantissa are random, the rest of the exponent is fixed.
void fill_words(std::uint64_t* words, std::int64_t count, DType dtype, std::uint64_t seed) {
  const std::uint64_t random_bits = dtype == DType::f32   ? 0x80ffffff80ffffffU
                                    : dtype == DType::f16 ? 0x87ff87ff87ff87ffU
                                                          : 0x80ff80ff80ff80ffU;
  const std::uint64_t fixed_bits = dtype == DType::f32   ? 0x3c0000003c000000U
                                   : dtype == DType::f16 ? 0x2000200020002000U
                                                         : 0x3c003c003c003c00U;
  constexpr int kLanes = 8;
  std::uint64_t state[kLanes];
  for (int i = 0; i < kLanes; ++i)
    state[i] = mix(seed * kLanes + static_cast<std::uint64_t>(i)) | 1;
  for (std::int64_t begin = 0; begin < count; begin += kLanes) {
    std::uint64_t values[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      state[i] ^= state[i] << 13;
      state[i] ^= state[i] >> 7;
      state[i] ^= state[i] << 17;
      values[i] = (state[i] & random_bits) | fixed_bits;
    }
    std::copy_n(values, std::min<std::int64_t>(kLanes, count - begin), words + begin);
  }
}

}  // namespace

void fill_random(void* data, std::int64_t count, DType dtype, std::uint64_t seed, int threads) {
  const std::int64_t words = count * bytes_per_element(dtype) / 8;
  // A thread's start is worth it from about 1 MiB on.
  threads = static_cast<int>(std::clamp<std::int64_t>(words >> 17, 1, threads));
  run_together(threads, [&](int thread) {
    const std::int64_t begin = words * thread / threads;
    fill_words(static_cast<std::uint64_t*>(data) + begin, words * (thread + 1) / threads - begin,
               dtype, mix(seed) + static_cast<std::uint64_t>(thread));
  });
}

RandomExperts::RandomExperts(const BenchSetup& setup, std::int64_t experts)
    : setup_(setup), experts_(experts) {
  const MoeConfig& config = setup.shape.config;
  const std::int64_t projections = is_gated(config.activation.kind) ? 2 : 1;
  const auto words = [&](std::int64_t elements, std::int64_t bytes) {
    return static_cast<std::size_t>((experts * elements * bytes + 7) / 8);
  };
  const std::int64_t element = bytes_per_element(dtype_of(setup.format));
  w13_.resize(words(projections * config.intermediate_size * config.hidden_size, element));
  w2_.resize(words(config.hidden_size * config.intermediate_size, element));
  if (!setup.shape.bias) return;
  w13_bias_.resize(words(projections * config.intermediate_size, sizeof(float)));
  w2_bias_.resize(words(config.hidden_size, sizeof(float)));
}

ExpertWeights RandomExperts::view(std::int64_t experts, bool with_data) {
  const MoeConfig& config = setup_.shape.config;
  const std::int64_t projections = is_gated(config.activation.kind) ? 2 : 1;
  const auto tensor = [&](std::vector<std::uint64_t>& words, std::int64_t outputs,
                          std::int64_t inputs) {
    WeightTensor result;
    result.data = with_data ? words.data() : nullptr;
    result.format = setup_.format;
    result.experts = experts;
    result.outputs = outputs;
    result.inputs = inputs;
    return result;
  };
  ExpertWeights weights;
  weights.w13 = tensor(w13_, projections * config.intermediate_size, config.hidden_size);
  weights.w2 = tensor(w2_, config.hidden_size, config.intermediate_size);
  if (setup_.shape.bias) {
    weights.w13_bias = {with_data ? w13_bias_.data() : nullptr, DType::f32, experts,
                        projections * config.intermediate_size};
    weights.w2_bias = {with_data ? w2_bias_.data() : nullptr, DType::f32, experts,
                       config.hidden_size};
  }
  return weights;
}

void RandomExperts::fill(std::uint64_t seed) {
  const auto start = std::chrono::steady_clock::now();
  const DType dtype = dtype_of(setup_.format);
  std::uint64_t part = 4 * seed;
  const auto one = [&](std::vector<std::uint64_t>& words, DType type) {
    const auto count = static_cast<std::int64_t>(words.size()) * 8 / bytes_per_element(type);
    fill_random(words.data(), count, type, part++, setup_.threads);
  };
  one(w13_, dtype);
  one(w2_, dtype);
  one(w13_bias_, DType::f32);
  one(w2_bias_, DType::f32);
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
