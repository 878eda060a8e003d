// What the cases have in common: matrices and weights filled by a formula, and calls whose buffers
// hold 0xFF bytes before and whose workspace has exactly the size asked for, with bytes behind it
// that nobody may touch. Right values come from the oracle or are a case's own numbers.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "backends/cpu/cpu_isa.h"
#include "formats/float_bits.h"
#include "formats/format.h"
#include "fusedmoe/fusedmoe.h"
#include "reference/reference_moe.h"
#include "reference/tolerance.h"

namespace fusedmoe::cases {

inline constexpr DType kDtypes[] = {DType::f32, DType::f16, DType::bf16};
inline constexpr WeightFormat kFormats[] = {WeightFormat::f32, WeightFormat::f16,
                                            WeightFormat::bf16};

// Names of the instruction sets of this machine, for PlanOptions::isa.
inline std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const cpu::CpuIsa isa : cpu::all_isas()) {
    if (cpu::is_available(isa)) names.emplace_back(to_string(isa));
  }
  return names;
}

// A fixed value in [-1, 1) for every triple of indices.
inline double noise(std::int64_t a, std::int64_t b, std::int64_t c) {
  auto x = static_cast<std::uint64_t>(a) * 0x9e3779b97f4a7c15U +
           static_cast<std::uint64_t>(b) * 0xbf58476d1ce4e5b9U +
           static_cast<std::uint64_t>(c) * 0x94d049bb133111ebU + 1;
  x = (x ^ x >> 31) * 0xd6e8feb86659fd93U;
  x ^= x >> 32;
  return static_cast<double>(x >> 11) * 0x1p-52 - 1;
}

inline void store(void* data, DType dtype, std::int64_t index, double value) {
  auto* to = static_cast<char*>(data) + index * bytes_per_element(dtype);
  const auto put = [to](auto element) { std::memcpy(to, &element, sizeof element); };
  switch (dtype) {
    case DType::f32:
      return put(static_cast<float>(value));
    case DType::f16:
      return put(f32_to_f16(static_cast<float>(value)));
    case DType::bf16:
      return put(f32_to_bf16(static_cast<float>(value)));
    case DType::i32:
      return put(static_cast<std::int32_t>(value));
    default:
      return put(static_cast<std::int64_t>(value));
  }
}

// A matrix that owns its elements: 0xFF bytes, also between the rows, until they are set.
class Matrix {
 public:
  Matrix() = default;
  Matrix(DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t stride = 0)
      : dtype_(dtype),
        rows_(rows),
        columns_(columns),
        stride_(stride == 0 ? columns : stride),
        bytes_(rows * stride_ * bytes_per_element(dtype), std::byte{0xff}) {}

  template <class F>
  Matrix& fill(const F& value) {
    for (std::int64_t r = 0; r < rows_; ++r) {
      for (std::int64_t c = 0; c < columns_; ++c) set(r, c, value(r, c));
    }
    return *this;
  }
  void set(std::int64_t row, std::int64_t column, double value) {
    store(bytes_.data(), dtype_, row * stride_ + column, value);
  }
  double get(std::int64_t row, std::int64_t column) const { return element(view(), row, column); }
  void dirty() { std::fill(bytes_.begin(), bytes_.end(), std::byte{0xff}); }
  bool is_untouched() const {
    return std::all_of(bytes_.begin(), bytes_.end(),
                       [](std::byte b) { return b == std::byte{0xff}; });
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  std::byte* data() { return bytes_.data(); }
  std::int64_t rows() const { return rows_; }
  ConstMatrixView view() const { return {bytes_.data(), dtype_, rows_, columns_, stride_}; }
  MatrixView view() { return {bytes_.data(), dtype_, rows_, columns_, stride_}; }

 private:
  DType dtype_ = DType::f32;
  std::int64_t rows_ = 0, columns_ = 0, stride_ = 0;
  std::vector<std::byte> bytes_;
};

struct WeightsOptions {
  WeightFormat format = WeightFormat::bf16;
  WeightLayout w13_layout = WeightLayout::nk;
  WeightLayout w2_layout = WeightLayout::nk;
};

// Weights by formula: w13(expert, part, channel, k), part 0 = gate, 1 = up (or the only one), at
// the rows where config says that they lie; w2(expert, h, channel).
class Weights {
 public:
  template <class W13, class W2>
  Weights(const MoeConfig& config, std::int64_t experts, const W13& w13, const W2& w2,
          const WeightsOptions& options = {})
      : config_(config), gated_(is_gated(config.activation.kind)) {
    const std::int64_t inter = config.intermediate_size;
    view_.w13 = tensor(options.format, options.w13_layout, experts, (gated_ ? 2 : 1) * inter,
                       config.hidden_size, w13_);
    view_.w2 = tensor(options.format, options.w2_layout, experts, config.hidden_size, inter, w2_);
    const auto encode = format_info(options.format).encode;
    for (std::int64_t e = 0; e < experts; ++e) {
      for (int part = gated_ ? 0 : 1; part < 2; ++part) {
        for (std::int64_t i = 0; i < inter; ++i) {
          for (std::int64_t k = 0; k < config.hidden_size; ++k) {
            encode(w13_.data(), view_.w13, e, row(part, i), k, w13(e, part, i, k));
          }
        }
      }
      for (std::int64_t h = 0; h < config.hidden_size; ++h) {
        for (std::int64_t i = 0; i < inter; ++i) encode(w2_.data(), view_.w2, e, h, i, w2(e, h, i));
      }
    }
  }

  // Every output has a variance near 1 for inputs of variance 1.
  static Weights random(const MoeConfig& config, std::int64_t experts,
                        const WeightsOptions& options = {}) {
    const double scale13 = std::sqrt(3.0 / static_cast<double>(config.hidden_size));
    const double scale2 = std::sqrt(3.0 / static_cast<double>(config.intermediate_size));
    return Weights(
        config, experts,
        [&](std::int64_t e, int part, std::int64_t i, std::int64_t k) {
          return scale13 * noise(2 * e + part, i, k);
        },
        [&](std::int64_t e, std::int64_t h, std::int64_t i) {
          return scale2 * noise(1000 + e, h, i);
        },
        options);
  }

  template <class F>
  void set_w13_bias(DType dtype, const F& value) {  // value(expert, part, channel)
    b13_ = Matrix(dtype, view_.w13.experts, (gated_ ? 2 : 1) * config_.intermediate_size);
    for (std::int64_t e = 0; e < b13_.rows(); ++e) {
      for (int part = gated_ ? 0 : 1; part < 2; ++part) {
        for (std::int64_t i = 0; i < config_.intermediate_size; ++i) {
          b13_.set(e, row(part, i), value(e, part, i));
        }
      }
    }
    view_.w13_bias = {b13_.data(), dtype, b13_.rows(), b13_.view().columns};
  }
  template <class F>
  void set_w2_bias(DType dtype, const F& value) {  // value(expert, h)
    b2_ = Matrix(dtype, view_.w2.experts, config_.hidden_size);
    b2_.fill(value);
    view_.w2_bias = {b2_.data(), dtype, b2_.rows(), config_.hidden_size};
  }

  const ExpertWeights& view() const { return view_; }
  std::vector<std::byte>& w13_bytes() { return w13_; }
  std::vector<std::byte>& w2_bytes() { return w2_; }

 private:
  std::int64_t row(int part, std::int64_t channel) const {
    if (!gated_) return channel;
    const bool second = (part == 1) == (config_.gate_up_order == GateUpOrder::gate_up);
    if (config_.gate_up_layout == GateUpLayout::interleaved) return 2 * channel + (second ? 1 : 0);
    return channel + (second ? config_.intermediate_size : 0);
  }
  static WeightTensor tensor(WeightFormat format, WeightLayout layout, std::int64_t experts,
                             std::int64_t outputs, std::int64_t inputs,
                             std::vector<std::byte>& memory) {
    memory.resize(experts * outputs * inputs * format_info(format).bits_per_weight / 8);
    return {.data = memory.data(),
            .format = format,
            .layout = layout,
            .experts = experts,
            .outputs = outputs,
            .inputs = inputs};
  }

  MoeConfig config_;
  bool gated_;
  std::vector<std::byte> w13_, w2_;
  Matrix b13_, b2_;
  ExpertWeights view_;
};

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
