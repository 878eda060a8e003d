// What route() refuses: every check of its arguments, before a byte is written. For topk.cpp alone.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "fusedmoe/error.h"
#include "fusedmoe/routing.h"

namespace fusedmoe::routing {

[[noreturn]] inline void refuse(const std::string& message) {
  throw Error(ErrorCode::invalid_argument, message);
}

inline bool has_selection_bias(const RoutingConfig& config) noexcept {
  const ConstMatrixView& bias = config.selection_bias;
  return bias.data != nullptr || bias.rows != 0 || bias.columns != 0;
}

inline bool is_float(DType dtype) noexcept {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

inline bool is_id(DType dtype) noexcept { return dtype == DType::i32 || dtype == DType::i64; }

inline void check_config(const RoutingConfig& config, std::int64_t num_experts) {
  using std::to_string;
  const auto check_enum = [](const char* name, auto value, auto last) {
    if (value > last) refuse(std::string(name) + ": no such value; use the enumerators");
  };
  check_enum("score_function", *config.score_function, ScoreFunction::softplus_sqrt);
  check_enum("renormalise", config.renormalise, Renormalise::max_sum_epsilon);
  check_enum("group_score", config.group_score, GroupScore::best);

  if (num_experts <= 0) {
    refuse("num_experts: expected > 0, got " + to_string(num_experts) +
           "; it is the number of columns of logits");
  }
  if (config.top_k <= 0 || config.top_k > num_experts) {
    refuse("top_k: expected 1..num_experts=" + to_string(num_experts) + ", got " +
           to_string(config.top_k) + "; a token cannot have more experts than there are");
  }
  if (config.num_groups <= 0 || num_experts % config.num_groups != 0) {
    refuse("num_groups: expected a divisor of num_experts=" + to_string(num_experts) + ", got " +
           to_string(config.num_groups) + "; 1 means no groups");
  }
  if (config.topk_group <= 0 || config.topk_group > config.num_groups) {
    refuse("topk_group: expected 1..num_groups=" + to_string(config.num_groups) + ", got " +
           to_string(config.topk_group) + "; it is how many groups stay");
  }
  const std::int64_t candidates = config.topk_group * (num_experts / config.num_groups);
  if (config.top_k > candidates) {
    refuse("topk_group: expected enough groups for top_k=" + to_string(config.top_k) + ", got " +
           to_string(config.topk_group) + " of num_groups=" + to_string(config.num_groups) +
           ", which hold " + to_string(candidates) + " experts; raise topk_group or lower top_k");
  }
  const auto check_positive = [](const char* name, float value) {
    if (!std::isfinite(value) || value <= 0.0F) {
      refuse(std::string(name) + ": expected finite and > 0, got " + to_string(value) +
             "; leave the default where the model has none");
    }
  };
  check_positive("scaling_factor", config.scaling_factor);
  if (config.renormalise == Renormalise::sum_epsilon ||
      config.renormalise == Renormalise::max_sum_epsilon) {
    // Not to_string: an epsilon may be far smaller than six decimals show.
    if (!std::isfinite(config.epsilon) || config.epsilon <= 0.0F) {
      refuse("epsilon: expected finite and > 0; use Renormalise::sum where the model has none");
    }
  }
}

// What a matrix is expected to be. Kept as numbers: a call that is sound allocates no message.
struct ExpectedMatrix {
  const char* name;
  const char* dtypes;
  bool dtype_fits;
  const char* row_name;  // null: one row, without a name
  std::int64_t rows;
  const char* column_name;
  std::int64_t columns;
};

[[noreturn]] inline void refuse_matrix(const ExpectedMatrix& expected, const ConstMatrixView& view,
                                       const std::string& detail, const char* remedy) {
  using std::to_string;
  const std::string rows =
      (expected.row_name == nullptr ? "" : std::string(expected.row_name) + "=") +
      to_string(expected.rows);
  refuse(std::string(expected.name) + ": expected " + expected.dtypes + " [" + rows + ", " +
         expected.column_name + "=" + to_string(expected.columns) + "], got " +
         to_string(view.dtype) + " [" + to_string(view.rows) + ", " + to_string(view.columns) +
         "]" + detail + "; " + remedy);
}

inline void check_matrix(const ExpectedMatrix& expected, const ConstMatrixView& view) {
  if (!expected.dtype_fits) refuse_matrix(expected, view, "", "cast it");
  if (view.rows != expected.rows || view.columns != expected.columns) {
    refuse_matrix(expected, view, "", "pass a view of that shape");
  }
  if (view.rows == 0) return;
  if (view.data == nullptr) {
    refuse_matrix(expected, view, " at a null pointer", "point it at the data");
  }
  // The last element's offset in bytes fits into 64 bits.
  const std::int64_t most = std::numeric_limits<std::int64_t>::max() / 16 / view.rows;
  if (view.row_stride < view.columns || view.row_stride > most) {
    refuse_matrix(expected, view, " with row_stride=" + std::to_string(view.row_stride),
                  "a row's stride is in elements, at least its columns");
  }
}

// Whether two matrices share a byte. Exact for equal strides, as columns of one buffer have them;
// otherwise whether their ranges of addresses meet.
inline bool overlap(const ConstMatrixView& a, const ConstMatrixView& b) noexcept {
  struct Extent {
    std::uintptr_t begin, row, stride, end;
    explicit Extent(const ConstMatrixView& view)
        : begin(reinterpret_cast<std::uintptr_t>(view.data)),
          row(static_cast<std::uintptr_t>(view.columns * bytes_per_element(view.dtype))),
          stride(static_cast<std::uintptr_t>(view.row_stride * bytes_per_element(view.dtype))),
          end(begin + static_cast<std::uintptr_t>(view.rows - 1) * stride + row) {}
  };
  const Extent x(a);
  const Extent y(b);
  if (x.end <= y.begin || y.end <= x.begin) return false;
  if (x.stride != y.stride) return true;
  const std::uintptr_t shift =
      x.begin <= y.begin ? (y.begin - x.begin) % x.stride : (x.begin - y.begin) % x.stride;
  const std::uintptr_t first = x.begin <= y.begin ? x.row : y.row;
  const std::uintptr_t second = x.begin <= y.begin ? y.row : x.row;
  return shift < first || shift + second > x.stride;
}

// Throws invalid_argument with what came, what was expected and what to do.
inline void check_routing(const RoutingConfig& config, const ConstMatrixView& logits,
                          const ConstMatrixView& topk_weights, const ConstMatrixView& topk_ids) {
  using std::to_string;
  constexpr const char* kFloats = "float32, float16 or bfloat16";
  const std::int64_t num_tokens = logits.rows;
  const std::int64_t num_experts = logits.columns;
  if (!config.score_function) {
    refuse(
        "score_function: expected one of softmax, softmax_of_chosen, sigmoid, softplus_sqrt, "
        "got none; set it");
  }
  if (num_tokens < 0) {
    refuse("num_tokens: expected >= 0, got " + to_string(num_tokens) +
           "; it is the number of rows of logits");
  }
  check_config(config, num_experts);
  check_matrix({"logits", kFloats, is_float(logits.dtype), "num_tokens", num_tokens, "num_experts",
                num_experts},
               logits);
  check_matrix({"topk_weights", kFloats, is_float(topk_weights.dtype), "num_tokens", num_tokens,
                "top_k", config.top_k},
               topk_weights);
  check_matrix({"topk_ids", "int32 or int64", is_id(topk_ids.dtype), "num_tokens", num_tokens,
                "top_k", config.top_k},
               topk_ids);
  if (topk_ids.dtype == DType::i32 && num_experts > std::numeric_limits<std::int32_t>::max()) {
    refuse("topk_ids: expected int64 for num_experts=" + to_string(num_experts) +
           ", got int32; cast it");
  }
  const bool biased = has_selection_bias(config);
  const ConstMatrixView& bias = config.selection_bias;
  if (biased && (num_tokens > 0 || bias.data != nullptr)) {
    check_matrix(
        {"selection_bias", kFloats, is_float(bias.dtype), nullptr, 1, "num_experts", num_experts},
        bias);
  }
  if (num_tokens == 0) return;
  const auto check_apart = [](const char* name, const ConstMatrixView& output, const char* other,
                              const ConstMatrixView& view) {
    if (overlap(output, view)) {
      refuse(std::string(name) + ": expected memory of its own, got memory that overlaps " + other +
             "; give it a buffer of its own");
    }
  };
  check_apart("topk_weights", topk_weights, "topk_ids", topk_ids);
  check_apart("topk_weights", topk_weights, "logits", logits);
  check_apart("topk_ids", topk_ids, "logits", logits);
  if (biased) {
    check_apart("topk_weights", topk_weights, "selection_bias", bias);
    check_apart("topk_ids", topk_ids, "selection_bias", bias);
  }
}

}  // namespace fusedmoe::routing
