// What tests of whole plans share: a layer of odd sizes, calls into dirty buffers, errors by code
// and text, and the comparison with the oracle. Runners and guarded memory are beside this file.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backends/cpu/cpu_isa.h"
#include "fusedmoe/fusedmoe.h"
#include "reference/random_layer.h"
#include "reference/reference_moe.h"
#include "reference/tolerance.h"

namespace fusedmoe::test {

using Bytes = std::vector<std::byte>;

inline constexpr std::byte kDirt{0xff};

inline WeightFormat format_of(DType dtype) {
  return dtype == DType::f32   ? WeightFormat::f32
         : dtype == DType::f16 ? WeightFormat::f16
                               : WeightFormat::bf16;
}

// Names of the instruction sets of this machine, for PlanOptions::isa.
inline std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const cpu::CpuIsa isa : cpu::all_isas()) {
    if (cpu::is_available(isa)) names.emplace_back(cpu::to_string(isa));
  }
  return names;
}

// No size is a multiple of a vector, a panel or a block of rows; 40 tokens keep several threads
// busy (see useful_threads), so that tests of threads do use them.
inline MoeConfig odd_config(DType dtype = DType::bf16) {
  MoeConfig config;
  config.hidden_size = 131;
  config.intermediate_size = 77;
  config.num_experts = 7;
  config.top_k = 3;
  config.dtype = dtype;
  return config;
}

// A config, its random weights (both matrices in the format of config.dtype) and plans of them.
struct Layer {
  MoeConfig config;
  RandomWeights weights;

  explicit Layer(const MoeConfig& layer_config = odd_config(), std::uint64_t seed = 1,
                 std::int64_t num_local = -1, bool biases = true)
      : config(layer_config),
        weights(config, num_local < 0 ? config.num_experts : num_local,
                {.w13_format = format_of(config.dtype),
                 .w2_format = format_of(config.dtype),
                 .w13_bias = biases,
                 .w2_bias = biases},
                seed) {}

  FusedMoe plan(const PlanOptions& options = {}) const {
    return FusedMoe::create(config, weights.view(), options);
  }
  // Skewed: half of the first choices go to the last expert, one slot in ten is skipped.
  RandomInput input(std::int64_t num_tokens, std::uint64_t seed = 2) const {
    return RandomInput(config,
                       {.num_tokens = num_tokens,
                        .hidden_padding = 3,
                        .output_padding = 5,
                        .topk_padding = 1,
                        .skip_share = 0.1,
                        .hot_share = 0.5},
                       seed);
  }
};

// Options with a map. Assigned, not initialised in braces: there g++ 12 warns of members that it
// believes to be destroyed before they exist.
inline PlanOptions with_map(ExpertMap map, int max_threads = 0) {
  PlanOptions options;
  options.expert_map = std::move(map);
  options.max_threads = max_threads;
  return options;
}

// Scratch of exactly `bytes` bytes at `beyond` bytes behind a multiple of 64, all set to `fill`.
class Scratch {
 public:
  explicit Scratch(std::int64_t bytes, std::byte fill = kDirt, std::int64_t beyond = 0)
      : memory_(static_cast<std::size_t>(bytes + beyond + 64), fill), bytes_(bytes) {
    const auto base = reinterpret_cast<std::uintptr_t>(memory_.data());
    offset_ = (64 - base % 64) % 64 + static_cast<std::uintptr_t>(beyond);
  }
  std::span<std::byte> span() {
    return std::span(memory_).subspan(offset_, static_cast<std::size_t>(bytes_));
  }
  void fill(std::byte value) { std::fill(memory_.begin(), memory_.end(), value); }
  void randomise(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (std::byte& byte : memory_) byte = static_cast<std::byte>(random() & 0xff);
  }
  operator Workspace() { return Workspace(span()); }  // NOLINT(google-explicit-constructor)

 private:
  Bytes memory_;
  std::int64_t bytes_;
  std::uintptr_t offset_ = 0;
};

// One call into an output of 0xFF bytes; the bytes of the result, row behind row.
inline Bytes run(const FusedMoe& plan, RandomInput& input, Workspace workspace = {},
                 const ApplyContext& context = {}) {
  input.dirty_output();
  plan.apply(input.output(), input.hidden(), input.topk_weights(), input.topk_ids(), workspace,
             context);
  EXPECT_TRUE(input.output_padding_untouched());
  return input.output_bytes();
}

// As run(), in a workspace of the exact size that held 0xFF bytes.
inline Bytes run_exact(const FusedMoe& plan, RandomInput& input, const ApplyContext& context = {}) {
  Scratch scratch(plan.workspace_size(input.hidden().rows).bytes);
  return run(plan, input, scratch, context);
}

inline bool untouched(const RandomInput& input) {
  const MatrixView output = input.output();
  const std::int64_t size = bytes_per_element(output.dtype);
  for (std::int64_t row = 0; row < output.rows; ++row) {  // without a copy: it may be large
    const auto* begin = static_cast<const std::byte*>(output.data) + row * output.row_stride * size;
    if (!std::all_of(begin, begin + output.columns * size,
                     [](std::byte b) { return b == kDirt; })) {
      return false;
    }
  }
  return input.output_padding_untouched();
}

// What the call leaves in input.output() against the oracle.
inline void expect_oracle(const MoeConfig& config, const ExpertWeights& weights,
                          const RandomInput& input, std::span<const std::int32_t> map = {}) {
  const std::vector<double> expected =
      reference_moe(config, weights, input.hidden(), input.topk_weights(), input.topk_ids(), map);
  std::vector<double> scale;
  if (config.hidden_size * config.intermediate_size < 1000) {  // a result may almost cancel
    scale = reference_scale(config, weights, input.hidden(), input.topk_weights(), input.topk_ids(),
                            map);
  }
  const Errors errors = compare(input.output(), expected, scale);
  const Errors limit = tolerance(weights.w13.format, config.dtype,
                                 config.output_dtype.value_or(config.dtype), ComputeMode::a16);
  EXPECT_TRUE(within(errors, limit))
      << "rel_l2 " << errors.rel_l2 << " of " << limit.rel_l2 << ", max_error " << errors.max_error
      << " of " << limit.max_error;
}

// The text of the Error that f throws, which must have `code`.
template <class F>
std::string error_of(ErrorCode code, const F& f) {
  try {
    f();
  } catch (const Error& error) {
    EXPECT_STREQ(to_string(error.code()), to_string(code)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "expected " << to_string(code) << ", nothing was thrown";
  return {};
}

inline void expect_contains(const std::string& text, std::initializer_list<std::string> parts) {
  if (text.empty()) return;  // nothing was thrown: said already
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is missing in: " << text;
  }
}

// A sum over all bytes of weights, to see that nobody writes them.
inline std::uint64_t checksum(const void* data, std::int64_t bytes) {
  std::uint64_t sum = 1469598103934665603ULL;  // FNV-1a
  for (std::int64_t i = 0; i < bytes; ++i) {
    sum = (sum ^ static_cast<const std::uint8_t*>(data)[i]) * 1099511628211ULL;
  }
  return sum;
}

}  // namespace fusedmoe::test
