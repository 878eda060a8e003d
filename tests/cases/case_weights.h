// Matrices and weights filled by a formula, with every element where config says that it lies.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "formats/float_bits.h"
#include "formats/format.h"
#include "fusedmoe/fusedmoe.h"
#include "reference/reference_moe.h"

namespace fusedmoe::cases {

inline constexpr DType kDtypes[] = {DType::f32, DType::f16, DType::bf16};
inline constexpr WeightFormat kFormats[] = {WeightFormat::f32, WeightFormat::f16,
                                            WeightFormat::bf16};

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
    memory.resize(format_info(format).bytes(experts * outputs * inputs));
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

}  // namespace fusedmoe::cases
