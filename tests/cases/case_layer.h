// What the cases have in common: calls whose buffers hold 0xFF bytes before and whose workspace has
// exactly the size asked for, with bytes behind it that nobody may touch. Right values come from
// the oracle or are a case's own numbers.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "backends/cpu/cpu_isa.h"
#include "case_weights.h"
#include "reference/tolerance.h"

namespace fusedmoe::cases {

// Names of the instruction sets of this machine, for PlanOptions::isa.
inline std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const cpu::CpuIsa isa : cpu::all_isas()) {
    if (cpu::is_available(isa)) names.emplace_back(to_string(isa));
  }
  return names;
}

// Exactly `size` bytes of 0xFF at the alignment asked for and no higher one, and a page behind.
class Scratch {
 public:
  explicit Scratch(WorkspaceSize size, std::byte fill = std::byte{0xff})
      : size_(size), memory_(size.bytes + 2 * size.alignment + kBehind, fill) {
    const auto base = reinterpret_cast<std::uintptr_t>(memory_.data());
    const auto alignment = static_cast<std::uintptr_t>(size.alignment);
    std::uintptr_t at = (base + alignment - 1) / alignment * alignment;
    if (at % (2 * alignment) == 0) at += alignment;
    begin_ = memory_.data() + (at - base);
    std::fill(begin_ + size.bytes, memory_.data() + memory_.size(), kCanary);
  }
  std::span<std::byte> span() { return {begin_, static_cast<std::size_t>(size_.bytes)}; }
  bool behind_is_untouched() const {
    return std::all_of(static_cast<const std::byte*>(begin_) + size_.bytes,
                       memory_.data() + memory_.size(), [](std::byte b) { return b == kCanary; });
  }

 private:
  static constexpr std::int64_t kBehind = 4096;
  static constexpr std::byte kCanary{0xa5};
  WorkspaceSize size_;
  std::vector<std::byte> memory_;
  std::byte* begin_;
};

// The four tensors of a call. By default: hidden is noise, half of the tokens choose the last
// expert first, a row's ids are distinct, weights lie between 0.1 and 1.1.
struct Call {
  Matrix hidden, topk_weights, topk_ids, output;

  Call(const MoeConfig& config, std::int64_t num_tokens)
      : hidden(config.dtype, num_tokens, config.hidden_size),
        topk_weights(DType::f32, num_tokens, config.top_k),
        topk_ids(DType::i32, num_tokens, config.top_k),
        output(config.output_dtype.value_or(config.dtype), num_tokens, config.hidden_size) {
    hidden.fill([](std::int64_t t, std::int64_t h) { return 1.7 * noise(7, t, h); });
    topk_weights.fill([](std::int64_t t, std::int64_t k) { return 0.6 + 0.5 * noise(8, t, k); });
    const auto experts = static_cast<double>(config.num_experts);
    topk_ids.fill([&](std::int64_t t, std::int64_t k) {
      const double first =
          t % 2 == 1 ? experts - 1 : std::floor(experts * (noise(9, t, 0) + 1) / 2);
      return std::fmod(first + static_cast<double>(k), experts);
    });
  }

  void set_ids(const std::vector<std::vector<std::int64_t>>& ids) {
    topk_ids.fill([&](std::int64_t t, std::int64_t k) { return static_cast<double>(ids[t][k]); });
  }
  // Into a dirty output, with a dirty workspace of exactly the size asked for.
  void apply(const FusedMoe& plan, const ApplyContext& context = {}) {
    Scratch scratch(plan.workspace_size(hidden.rows()));
    apply(plan, scratch, context);
    EXPECT_TRUE(scratch.behind_is_untouched());
  }
  void apply(const FusedMoe& plan, Scratch& scratch, const ApplyContext& context = {}) {
    output.dirty();
    plan.apply(output.view(), hidden.view(), topk_weights.view(), topk_ids.view(), scratch.span(),
               context);
  }
};

// Whether the call's output is the oracle's, within the table of tolerances.
inline testing::AssertionResult is_right(const MoeConfig& config, const ExpertWeights& weights,
                                         const Call& call,
                                         std::span<const std::int32_t> expert_map = {}) {
  const Errors errors =
      compare(call.output.view(),
              reference_moe(config, weights, call.hidden.view(), call.topk_weights.view(),
                            call.topk_ids.view(), expert_map));
  const Errors limit = tolerance(weights.w2.format, config.dtype,
                                 config.output_dtype.value_or(config.dtype), ComputeMode::a16);
  if (within(errors, limit)) return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << "rel_l2 " << errors.rel_l2 << " (limit " << limit.rel_l2 << "), max_error "
         << errors.max_error << " (limit " << limit.max_error << ")";
}

// Calls f, which must throw Error{code}; gives its message, or nothing.
template <class F>
std::string refusal(ErrorCode code, const F& f) {
  try {
    f();
  } catch (const Error& error) {
    EXPECT_STREQ(to_string(error.code()), to_string(code)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "accepted; expected " << to_string(code);
  return "";
}

inline testing::AssertionResult says(const std::string& message,
                                     const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    if (message.find(part) == std::string::npos) {
      return testing::AssertionFailure() << "'" << part << "' is not in: " << message;
    }
  }
  return testing::AssertionSuccess();
}

inline PlanOptions with_isa(const std::string& isa, int threads = 2) {
  PlanOptions options;
  options.isa = isa;
  options.max_threads = threads;
  return options;
}

}  // namespace fusedmoe::cases
