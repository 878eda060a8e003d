// For the tests of routing: matrices with dirty memory, and an fp64 router that shares no code
// with the library: scores for all experts, a full stable sort, groups dropped to -infinity.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "formats/float_bits.h"
#include "fusedmoe/routing.h"

namespace fusedmoe {

// [rows, columns] with rows `stride` elements apart, from byte `shift` of its memory on; 0xFF
// first.
class TestMatrix {
 public:
  TestMatrix(DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t padding = 0,
             std::int64_t shift = 0)
      : dtype_(dtype),
        rows_(rows),
        columns_(columns),
        stride_(columns + padding),
        shift_(shift),
        bytes_(static_cast<std::size_t>(rows * stride_ * bytes_per_element(dtype) + shift), 0xFF) {}

  MatrixView view() { return {bytes_.data() + shift_, dtype_, rows_, columns_, stride_}; }
  ConstMatrixView view() const { return const_cast<TestMatrix*>(this)->view(); }
  std::int64_t rows() const { return rows_; }
  std::int64_t columns() const { return columns_; }
  DType dtype() const { return dtype_; }

  void set(std::int64_t row, std::int64_t column, float value) {
    switch (dtype_) {
      case DType::f16:
        return put(row, column, f32_to_f16(value));
      case DType::bf16:
        return put(row, column, f32_to_bf16(value));
      default:
        return put(row, column, value);
    }
  }
  void set_id(std::int64_t row, std::int64_t column, std::int64_t id) {
    if (dtype_ == DType::i64) return put(row, column, id);
    put(row, column, static_cast<std::int32_t>(id));
  }
  double get(std::int64_t row, std::int64_t column) const {
    switch (dtype_) {
      case DType::f16:
        return f16_to_f32(take<std::uint16_t>(row, column));
      case DType::bf16:
        return bf16_to_f32(take<std::uint16_t>(row, column));
      default:
        return take<float>(row, column);
    }
  }
  std::int64_t id(std::int64_t row, std::int64_t column) const {
    return dtype_ == DType::i64 ? take<std::int64_t>(row, column) : take<std::int32_t>(row, column);
  }
  std::vector<double> row(std::int64_t r) const {
    std::vector<double> values;
    for (std::int64_t c = 0; c < columns_; ++c) values.push_back(get(r, c));
    return values;
  }
  std::vector<std::int64_t> id_row(std::int64_t r) const {
    std::vector<std::int64_t> ids;
    for (std::int64_t c = 0; c < columns_; ++c) ids.push_back(id(r, c));
    return ids;
  }
  // Whether nothing at all, or nothing between the rows, was written.
  bool untouched() const {
    return std::all_of(bytes_.begin(), bytes_.end(), [](unsigned char b) { return b == 0xFF; });
  }
  bool padding_untouched() const {
    for (std::int64_t r = 0; r < rows_; ++r) {
      for (std::int64_t c = columns_; c < stride_; ++c) {
        for (std::int64_t b = 0; b < bytes_per_element(dtype_); ++b) {
          if (bytes_[static_cast<std::size_t>(offset(r, c) + b)] != 0xFF) return false;
        }
      }
    }
    return true;
  }

 private:
  std::int64_t offset(std::int64_t row, std::int64_t column) const {
    return shift_ + (row * stride_ + column) * bytes_per_element(dtype_);
  }
  template <typename T>
  void put(std::int64_t row, std::int64_t column, T value) {
    std::memcpy(bytes_.data() + offset(row, column), &value, sizeof(T));
  }
  template <typename T>
  T take(std::int64_t row, std::int64_t column) const {
    T value;
    std::memcpy(&value, bytes_.data() + offset(row, column), sizeof(T));
    return value;
  }

  DType dtype_;
  std::int64_t rows_, columns_, stride_, shift_;
  std::vector<unsigned char> bytes_;
};

struct OracleRow {
  std::vector<std::int64_t> ids;
  std::vector<double> weights;
  // False where fp32 may order differently: two keys that differ by no more than its rounding.
  bool clear = true;
};

class RoutingOracle {
 public:
  RoutingOracle(const RoutingConfig& config, std::vector<double> logits, std::vector<double> bias)
      : config_(config), logits_(std::move(logits)), keys_(logits_.size()) {
    scores_ = scores_of(logits_);
    const bool of_chosen = config.score_function == ScoreFunction::softmax_of_chosen;
    for (std::size_t e = 0; e < keys_.size(); ++e) {
      keys_[e] = (of_chosen ? logits_[e] : scores_[e]) + (bias.empty() ? 0.0 : bias[e]);
    }
    floor_ = bias.empty() ? 0.0 : 1.0;
  }

  OracleRow run() {
    OracleRow result;
    if (config_.num_groups > 1) drop_groups(result);
    const auto order = sorted(keys_);
    const auto top_k = static_cast<std::size_t>(config_.top_k);
    result.ids.assign(order.begin(), order.begin() + config_.top_k);
    for (std::size_t j = 0; j < top_k && j + 1 < order.size(); ++j) {
      note_margin(result, keys_[at(order[j])], keys_[at(order[j + 1])]);
    }
    result.weights = weights_of(result.ids);
    return result;
  }

  std::vector<double> weights_of(const std::vector<std::int64_t>& ids) const {
    std::vector<double> weights;
    for (const auto id : ids) weights.push_back(logits_[at(id)]);
    if (config_.score_function == ScoreFunction::softmax_of_chosen) {
      weights = scores_of(weights);
    } else {
      for (std::size_t j = 0; j < ids.size(); ++j) weights[j] = scores_[at(ids[j])];
    }
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    const double epsilon = static_cast<double>(config_.epsilon);
    for (double& weight : weights) {
      if (config_.renormalise == Renormalise::sum) weight = sum == 0.0 ? 0.0 : weight / sum;
      if (config_.renormalise == Renormalise::sum_epsilon) weight /= sum + epsilon;
      if (config_.renormalise == Renormalise::max_sum_epsilon) weight /= std::max(sum, epsilon);
      weight *= static_cast<double>(config_.scaling_factor);
    }
    return weights;
  }

 private:
  static std::size_t at(std::int64_t id) { return static_cast<std::size_t>(id); }

  std::vector<double> scores_of(const std::vector<double>& logits) const {
    std::vector<double> scores(logits.size());
    const double max = *std::max_element(logits.begin(), logits.end());
    double sum = 0.0;
    for (const double x : logits) sum += std::exp(x - max);
    for (std::size_t e = 0; e < logits.size(); ++e) {
      switch (*config_.score_function) {
        case ScoreFunction::softmax:
        case ScoreFunction::softmax_of_chosen:
          scores[e] = std::exp(logits[e] - max) / sum;
          break;
        case ScoreFunction::sigmoid:
          scores[e] = 1.0 / (1.0 + std::exp(-logits[e]));
          break;
        case ScoreFunction::softplus_sqrt:
          scores[e] = std::sqrt(std::log1p(std::exp(logits[e])));
          break;
      }
    }
    return scores;
  }

  static std::vector<std::int64_t> sorted(const std::vector<double>& keys) {
    std::vector<std::int64_t> order(keys.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](auto a, auto b) { return keys[at(a)] > keys[at(b)]; });
    return order;
  }

  void note_margin(OracleRow& result, double a, double b) const {
    const double scale = std::max({std::fabs(a), std::fabs(b), floor_});
    if (a != b && std::fabs(a - b) < 1e-6 * scale) result.clear = false;
  }

  void drop_groups(OracleRow& result) {
    const std::size_t size = keys_.size() / at(config_.num_groups);
    std::vector<double> groups;
    for (std::size_t begin = 0; begin < keys_.size(); begin += size) {
      std::vector<double> best(keys_.begin() + static_cast<std::ptrdiff_t>(begin),
                               keys_.begin() + static_cast<std::ptrdiff_t>(begin + size));
      std::sort(best.rbegin(), best.rend());
      const bool two = config_.group_score == GroupScore::sum_of_two_best && size > 1;
      groups.push_back(two ? best[0] + best[1] : best[0]);
    }
    const auto order = sorted(groups);
    for (std::size_t i = at(config_.topk_group); i < order.size(); ++i) {
      note_margin(result, groups[at(order[i - 1])], groups[at(order[i])]);
      for (std::size_t e = 0; e < size; ++e) {
        keys_[at(order[i]) * size + e] = -std::numeric_limits<double>::infinity();
      }
    }
  }

  RoutingConfig config_;
  std::vector<double> logits_;
  std::vector<double> scores_;
  std::vector<double> keys_;
  double floor_ = 0.0;
};

// Rounding of a stored weight on top of fp32 maths.
inline double weight_tolerance(DType dtype) {
  return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-10 : 4e-6;
}

// Every row equals the oracle's; returns how many rows were clear enough to compare ids.
inline std::int64_t expect_oracle(const RoutingConfig& config, const TestMatrix& logits,
                                  const std::vector<double>& bias, const TestMatrix& weights,
                                  const TestMatrix& ids, const std::string& what) {
  std::int64_t clear = 0;
  for (std::int64_t row = 0; row < logits.rows(); ++row) {
    RoutingOracle oracle(config, logits.row(row), bias);
    OracleRow expected = oracle.run();
    const auto got = ids.id_row(row);
    if (expected.clear) {
      ++clear;
      EXPECT_EQ(got, expected.ids) << what << " row " << row;
      if (got != expected.ids) continue;
    } else {
      expected.weights = oracle.weights_of(got);
    }
    for (std::int64_t k = 0; k < config.top_k; ++k) {
      const double want = expected.weights[static_cast<std::size_t>(k)];
      EXPECT_NEAR(weights.get(row, k), want,
                  weight_tolerance(weights.dtype()) * std::fabs(want) + 1e-7)
          << what << " row " << row << " k " << k;
    }
  }
  EXPECT_TRUE(weights.padding_untouched()) << what;
  EXPECT_TRUE(ids.padding_untouched()) << what;
  return clear;
}

// Deterministic on every platform, unlike the distributions of <random>.
class TestRandom {
 public:
  explicit TestRandom(std::uint64_t seed) : state_(seed * 2 + 1) {}
  std::uint32_t next() {
    state_ = state_ * 6364136223846793005U + 1442695040888963407U;
    return static_cast<std::uint32_t>(state_ >> 33);
  }
  float uniform(float low, float high) {
    return low + (high - low) * static_cast<float>(next() % 100003U) / 100003.0F;
  }

 private:
  std::uint64_t state_;
};

inline TestMatrix random_matrix(DType dtype, std::int64_t rows, std::int64_t columns, float low,
                                float high, std::uint64_t seed, std::int64_t padding = 0,
                                std::int64_t shift = 0) {
  TestRandom random(seed);
  TestMatrix matrix(dtype, rows, columns, padding, shift);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) matrix.set(r, c, random.uniform(low, high));
  }
  return matrix;
}

inline TestMatrix matrix_of(DType dtype, const std::vector<std::vector<float>>& rows) {
  TestMatrix matrix(dtype, static_cast<std::int64_t>(rows.size()),
                    static_cast<std::int64_t>(rows[0].size()));
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (std::size_t c = 0; c < rows[r].size(); ++c) {
      matrix.set(static_cast<std::int64_t>(r), static_cast<std::int64_t>(c), rows[r][c]);
    }
  }
  return matrix;
}

}  // namespace fusedmoe
