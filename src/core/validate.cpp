#include "core/validate.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <string>

#include "formats/check.h"
#include "formats/scales.h"
#include "fusedmoe/error.h"

namespace fusedmoe {
namespace {

// Of a plan: its scratch grows with them.
constexpr int kMaxThreads = 4096;
void check_size(const char* name, std::int64_t value) {
  if (value > 0 && value <= kMaxSize) return;
  refuse(name, "a count from 1 to 2^31", std::to_string(value), "set the model's value");
}

bool is_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

void check_float(const char* name, DType dtype) {
  if (is_float(dtype)) return;
  refuse(name, "float32, float16 or bfloat16", to_string(dtype), "convert the tensors to one");
}

void check_positive(const char* name, float value, bool may_be_infinite, const char* remedy) {
  if (value > 0.0F && (may_be_infinite || std::isfinite(value))) return;
  refuse(name, may_be_infinite ? "a number > 0" : "a finite number > 0", std::to_string(value),
         remedy);
}

void check_activation(const MoeConfig& config) {
  const ActivationConfig& act = config.activation;
  check_enum("config.activation.kind", act.kind, Activation::relu2);
  if (act.kind == Activation::swigluoai) {
    if (!std::isfinite(act.alpha)) {
      refuse("config.activation.alpha", "a finite number", std::to_string(act.alpha),
             "gpt-oss uses 1.702");
    }
    check_positive("config.activation.limit", act.limit, true, "gpt-oss uses 7");
  }
  if (act.kind == Activation::swiglustep) {
    check_positive("config.activation.limit", act.limit, true, "the usual value is 7");
  }
  if (act.kind == Activation::situ) {
    check_positive("config.activation.beta", act.beta, false, "set the model's beta");
    if (act.linear_beta != 0.0F) {
      check_positive("config.activation.linear_beta", act.linear_beta, false, "0 turns it off");
    }
  }
  if (config.clamp_limit.has_value()) {
    check_positive("config.clamp_limit", *config.clamp_limit, false, "unset it to turn it off");
    if (act.kind != Activation::silu && act.kind != Activation::gelu &&
        act.kind != Activation::gelu_tanh) {
      refuse("config.clamp_limit", "unset, or activation silu, gelu or gelu_tanh",
             std::string("activation ") + to_string(act.kind),
             "swigluoai and swiglustep take activation.limit");
    }
  }
}

// Gate and up in one tensor: whether the scales are those of two matrices has to be clear.
void check_parts(const PlanSpec& spec, const WeightTensor& w13) {
  const WeightScales& scales = w13.scales;
  if (scales.parts != ScaleParts::one) {
    const bool halves = spec.config.gate_up_layout == GateUpLayout::halves;
    if (!spec.gated() || halves != (scales.parts == ScaleParts::halves)) {
      refuse("weights.w13.scales.parts", "one, or what config.gate_up_layout says", "another",
             "set it to halves or interleaved as the rows of gate and up lie");
    }
    return;
  }
  const std::int64_t size = spec.config.intermediate_size;
  if (scales.layout != ScaleLayout::block || !spec.gated() ||
      spec.config.gate_up_layout != GateUpLayout::halves || size % scales.block_n == 0) {
    return;
  }
  WeightTensor apart = w13;
  apart.scales.parts = ScaleParts::halves;
  const auto shape = [](const WeightTensor& tensor) {
    const ScaleShape s = scale_shape(tensor);
    return "[" + std::to_string(tensor.experts) + ", " + std::to_string(s.rows) + ", " +
           std::to_string(s.columns) + "]";
  };
  refuse("weights.w13.scales",
         shape(apart) + ", rows of blocks for gate and for up (parts = halves), since block_n=" +
             std::to_string(scales.block_n) +
             " does not divide intermediate_size=" + std::to_string(size),
         shape(w13) + " (parts = one)", "quantise gate and up apart and say parts = halves");
}

void check_tensor(const std::string& name, const WeightTensor& tensor, std::int64_t experts,
                  std::int64_t outputs, std::int64_t inputs, bool shapes_only) {
  if (tensor.experts != experts || tensor.outputs != outputs || tensor.inputs != inputs) {
    WeightTensor expected = tensor;
    expected.experts = experts;
    expected.outputs = outputs;
    expected.inputs = inputs;
    refuse(name, shape_text(expected) + " (" + to_string(tensor.layout) + ")", shape_text(tensor),
           "state the shape that config and expert_map imply");
  }
  check_weight_tensor(name, tensor, shapes_only);
}

void check_bias(const char* name, const BiasTensor& bias, std::int64_t experts, std::int64_t size,
                bool may_be_null) {
  if (bias.empty()) return;
  check_float((std::string(name) + ".dtype").c_str(), bias.dtype);
  if (bias.experts != experts || bias.size != size) {
    refuse(name, "[" + std::to_string(experts) + ", " + std::to_string(size) + "]",
           "[" + std::to_string(bias.experts) + ", " + std::to_string(bias.size) + "]",
           "state the shape that config and expert_map imply");
  }
  if (bias.data == nullptr && !may_be_null && experts > 0) {
    refuse(name, "data", "a null pointer", "give the address of the bias, or leave size 0");
  }
}

std::string shape(const char* rows, std::int64_t num_rows, const char* columns,
                  std::int64_t num_columns) {
  return "[" + std::string(rows) + "=" + std::to_string(num_rows) + ", " + columns + "=" +
         std::to_string(num_columns) + "]";
}

std::string describe(const ConstMatrixView& view) {
  return std::string(to_string(view.dtype)) + " [" + std::to_string(view.rows) + ", " +
         std::to_string(view.columns) + "]";
}

struct Expected {
  const char* name;
  const char* dtypes;
  bool dtype_ok;
  std::int64_t rows, columns;
  const char* column_name;
};

// Text is put together only when something is wrong: a sound call allocates nothing.
[[noreturn]] void refuse_view(const Expected& expected, const std::string& got,
                              const std::string& remedy) {
  refuse(expected.name,
         std::string(expected.dtypes) + " " +
             shape("num_tokens", expected.rows, expected.column_name, expected.columns),
         got, remedy);
}

void check_view(const Expected& expected, const ConstMatrixView& view) {
  if (!expected.dtype_ok) refuse_view(expected, describe(view), "cast it");
  if (view.columns != expected.columns) {
    refuse_view(expected, describe(view),
                std::string("pass ") + expected.column_name + " columns, as the plan's config has");
  }
  if (view.rows != expected.rows) {
    refuse_view(expected, describe(view), "pass the same num_tokens in all four tensors");
  }
  if (view.data == nullptr) refuse_view(expected, "a null pointer", "pass its address");
  if (view.row_stride < view.columns && view.rows > 1) {
    refuse(std::string(expected.name) + ".row_stride", "at least " + std::to_string(view.columns),
           std::to_string(view.row_stride),
           "make the rows distinct, the last dimension contiguous");
  }
  if (view.rows > 1 && !in_memory(view.rows, view.row_stride)) {
    refuse(std::string(expected.name) + ".row_stride",
           "num_tokens=" + std::to_string(view.rows) + " rows within memory",
           std::to_string(view.row_stride), "pass the stride in elements");
  }
  const auto bytes = static_cast<std::uintptr_t>(bytes_per_element(view.dtype));
  const std::uintptr_t beyond = reinterpret_cast<std::uintptr_t>(view.data) % bytes;
  if (beyond != 0) {
    refuse(expected.name, "an address that is a multiple of " + std::to_string(bytes) + " bytes",
           "one that is " + std::to_string(beyond) + " beyond", "align it to its dtype");
  }
}

// Rows of bytes in memory, for overlap.
struct Extent {
  const char* name;
  std::uintptr_t begin;
  std::int64_t row_bytes, stride, rows;

  std::uintptr_t end() const {
    return rows == 0 ? begin : begin + static_cast<std::uintptr_t>(stride * (rows - 1) + row_bytes);
  }
};

Extent extent(const char* name, const ConstMatrixView& view) {
  const std::int64_t bytes = bytes_per_element(view.dtype);
  return {name, reinterpret_cast<std::uintptr_t>(view.data), view.columns * bytes,
          view.rows > 1 ? view.row_stride * bytes : 0, view.rows};
}

Extent extent(const char* name, std::span<const std::byte> span) {
  const auto size = static_cast<std::int64_t>(span.size());
  return {name, reinterpret_cast<std::uintptr_t>(span.data()), size, size, span.empty() ? 0 : 1};
}

bool overlap(const Extent& a, const Extent& b) {
  if (a.rows == 0 || b.rows == 0) return false;
  if (a.begin >= b.end() || b.begin >= a.end()) return false;
  // Columns of one buffer side by side: the same stride, and disjoint within it.
  if (a.rows > 1 && b.rows > 1 && a.stride == b.stride) {
    const std::int64_t distance = static_cast<std::int64_t>(b.begin - a.begin) % a.stride;
    const std::int64_t offset = distance < 0 ? distance + a.stride : distance;
    if (offset >= a.row_bytes && offset + b.row_bytes <= a.stride) return false;
  }
  return true;
}

std::string range(const Extent& extent) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "[%#zx, %#zx)", static_cast<std::size_t>(extent.begin),
                static_cast<std::size_t>(extent.end()));
  return text.data();
}

void check_apart(const Extent& a, const Extent& b) {
  if (!overlap(a, b)) return;
  refuse(a.name, std::string("memory apart from ") + b.name + " at " + range(b), range(a),
         "use another buffer (output may be exactly hidden, nothing else may overlap)");
}

}  // namespace

PlanSpec make_spec(const MoeConfig& config, const PlanOptions& options) {
  check_size("config.hidden_size", config.hidden_size);
  check_size("config.intermediate_size", config.intermediate_size);
  check_size("config.num_experts", config.num_experts);
  check_size("config.top_k", config.top_k);
  if (config.top_k > config.num_experts) {
    refuse("config.top_k", "at most num_experts = " + std::to_string(config.num_experts),
           std::to_string(config.top_k), "a token cannot choose more experts than there are");
  }
  if (!in_memory(config.top_k, config.intermediate_size)) {
    refuse("config.top_k", "rows of intermediate_size that memory can hold",
           std::to_string(config.top_k), "check both");
  }
  check_activation(config);
  check_enum("config.gate_up_layout", config.gate_up_layout, GateUpLayout::interleaved);
  check_enum("config.gate_up_order", config.gate_up_order, GateUpOrder::up_gate);
  check_float("config.dtype", config.dtype);
  if (config.output_dtype.has_value()) check_float("config.output_dtype", *config.output_dtype);
  check_enum("options.mode", options.mode, ComputeMode::a8);
  check_enum("options.weight_storage", options.weight_storage, WeightStorage::adopt);
  check_enum("options.on_stale", options.on_stale, StalePolicy::refresh);
  if (options.max_threads < 0 || options.max_threads > kMaxThreads) {
    refuse("options.max_threads", "0 (automatic) to " + std::to_string(kMaxThreads),
           std::to_string(options.max_threads), "set a number of threads");
  }
  if (options.runner != nullptr) {
    check_runner("options.runner", *options.runner);
    if (options.max_threads == 0 && options.runner->num_threads > kMaxThreads) {
      refuse("options.runner", "num_threads <= " + std::to_string(kMaxThreads),
             std::to_string(options.runner->num_threads), "cap them with max_threads");
    }
  }
  if (options.device.index < 0) {
    refuse("options.device.index", "0 or more", std::to_string(options.device.index),
           "set the index of a device");
  }
  PlanSpec spec{config, options, {}, config.num_experts, {}};
  if (options.runner != nullptr) {
    spec.runner = *options.runner;
    spec.options.runner = nullptr;  // the caller's struct may be gone after the call
  }
  if (!options.expert_map.is_identity()) {
    spec.expert_map = options.expert_map.resolve(config.num_experts);
    spec.num_local_experts = 0;
    for (const std::int32_t local : spec.expert_map) spec.num_local_experts += local >= 0 ? 1 : 0;
  }
  return spec;
}

void check_runner(const char* argument, const ThreadRunner& runner) {
  if (runner.run != nullptr && runner.num_threads >= 1) return;
  refuse(argument, "a function and num_threads >= 1",
         runner.run == nullptr ? "a null function" : std::to_string(runner.num_threads),
         "fill both, or pass no runner");
}

void check_weights(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t num_experts,
                   bool shapes_only) {
  if (num_experts == 0) return;  // nothing will be read
  const MoeConfig& config = spec.config;
  const std::int64_t inter = config.intermediate_size;
  const bool may_be_null = shapes_only || static_cast<bool>(weights.source);
  const bool apart = !weights.w13_up.empty();
  if (apart && !spec.gated()) {
    refuse("weights.w13_up", std::string("nothing for ") + to_string(config.activation.kind),
           "a tensor", "an activation without a gate has w13 alone");
  }
  check_tensor("weights.w13", weights.w13, num_experts, apart ? inter : spec.w13_outputs(),
               config.hidden_size, may_be_null);
  if (apart) {
    check_tensor("weights.w13_up", weights.w13_up, num_experts, inter, config.hidden_size,
                 may_be_null);
    if (weights.w13.scales.parts != ScaleParts::one) {
      refuse("weights.w13.scales.parts", "one beside w13_up", "two", "w13 holds gate rows alone");
    }
    if (weights.w13_up.format != weights.w13.format) {
      refuse("weights.w13_up.format", to_string(weights.w13.format),
             to_string(weights.w13_up.format), "give gate and up in one format");
    }
  }
  check_tensor("weights.w2", weights.w2, num_experts, config.hidden_size, inter, may_be_null);
  if (!apart) check_parts(spec, weights.w13);
  for (const WeightTensor* alone : {&weights.w13_up, &weights.w2}) {
    if (alone->scales.parts == ScaleParts::one) continue;
    refuse(alone == &weights.w2 ? "weights.w2.scales.parts" : "weights.w13_up.scales.parts", "one",
           "two", "only gate and up in one tensor are two parts");
  }
  check_bias("weights.w13_bias", weights.w13_bias, num_experts, spec.w13_outputs(), may_be_null);
  check_bias("weights.w2_bias", weights.w2_bias, num_experts, config.hidden_size, may_be_null);
}

void check_tensors(const PlanSpec& spec, const MatrixView& output, const ConstMatrixView& hidden,
                   const ConstMatrixView& topk_weights, const ConstMatrixView& topk_ids,
                   const Workspace& workspace) {
  const std::int64_t rows = hidden.rows;
  if (rows < 0) {
    refuse("hidden", "num_tokens of 0 or more", std::to_string(rows), "pass a real shape");
  }
  const std::int64_t h_size = spec.config.hidden_size;
  const std::int64_t top_k = spec.config.top_k;
  check_view({"hidden", to_string(spec.config.dtype), hidden.dtype == spec.config.dtype, rows,
              h_size, "hidden_size"},
             hidden);
  check_view({"output", to_string(spec.output_dtype()), output.dtype == spec.output_dtype(), rows,
              h_size, "hidden_size"},
             output);
  check_view({"topk_weights", "float32, float16 or bfloat16", is_float(topk_weights.dtype), rows,
              top_k, "top_k"},
             topk_weights);
  check_view({"topk_ids", "int32 or int64",
              topk_ids.dtype == DType::i32 || topk_ids.dtype == DType::i64, rows, top_k, "top_k"},
             topk_ids);

  const Extent out = extent("output", output);
  const Extent in = extent("hidden", hidden);
  const Extent router = extent("topk_weights", topk_weights);
  const Extent ids = extent("topk_ids", topk_ids);
  const bool in_place = out.begin == in.begin && out.row_bytes == in.row_bytes &&
                        (rows == 1 || out.stride == in.stride);
  if (!in_place) check_apart(out, in);
  check_apart(out, router);
  check_apart(out, ids);
  const Extent first = extent("workspace13", workspace.workspace13);
  const Extent second = extent("workspace", workspace.workspace2);
  check_apart(first, second);
  for (const Extent& scratch : {first, second}) {
    for (const Extent& tensor : {out, in, router, ids}) check_apart(scratch, tensor);
  }
}

}  // namespace fusedmoe
