// Weights of the C ABI -> ExpertWeights: tensors, scales, biases, the source callback and the
// version counter.
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <string>

#include "core/c_api_convert.h"

namespace fusedmoe::c_api {
namespace {

// apply reads the caller's plain counter through std::atomic.
using Counter = std::atomic<std::uint64_t>;
static_assert(sizeof(Counter) == 8 && Counter::is_always_lock_free);

WeightScales to_scales(const Path& path, const fusedmoe_weight_scales* from) {
  WeightScales scales;
  if (from == nullptr) return scales;
  fusedmoe_weight_scales c;
  fusedmoe_weight_scales_init(&c);
  read_struct(path, from, offsetof(fusedmoe_weight_scales, group_size), c);
  scales.data = c.data;
  scales.type = to_enum({"type", &path}, c.type, ScaleType::e4m3, "a FUSEDMOE_SCALE_* value");
  scales.layout =
      to_enum({"layout", &path}, c.layout, ScaleLayout::block, "a FUSEDMOE_SCALE_LAYOUT_* value");
  scales.group_size = c.group_size;
  scales.block_n = c.block_n;
  scales.block_k = c.block_k;
  scales.transposed = to_bool({"transposed", &path}, c.transposed);
  scales.zero_points = c.zero_points;
  scales.global = c.global;
  scales.parts =
      to_enum({"parts", &path}, c.parts, ScaleParts::interleaved, "a FUSEDMOE_SCALE_PARTS_* value");
  return scales;
}

WeightTensor to_tensor(const Path& path, const fusedmoe_weight_tensor* from) {
  fusedmoe_weight_tensor c;
  fusedmoe_weight_tensor_init(&c);
  read_struct(path, from, offsetof(fusedmoe_weight_tensor, row_stride), c);
  WeightTensor tensor;
  tensor.data = c.data;
  tensor.format =
      to_enum({"format", &path}, c.format, WeightFormat::q6_k, "a FUSEDMOE_FORMAT_* value");
  tensor.layout =
      to_enum({"layout", &path}, c.layout, WeightLayout::kn, "a FUSEDMOE_WEIGHT_LAYOUT_* value");
  tensor.experts = c.experts;
  tensor.outputs = c.outputs;
  tensor.inputs = c.inputs;
  tensor.row_stride = c.row_stride;
  tensor.expert_stride = c.expert_stride;
  tensor.scales = to_scales({"scales", &path}, c.scales);
  return tensor;
}

BiasTensor to_bias(const Path& path, const fusedmoe_bias_tensor* from) {
  BiasTensor bias;
  if (from == nullptr) return bias;
  fusedmoe_bias_tensor c;
  fusedmoe_bias_tensor_init(&c);
  read_struct(path, from, sizeof c, c);
  need_zero(path, c.reserved);
  bias.data = c.data;
  bias.dtype = to_dtype({"dtype", &path}, c.dtype);
  bias.experts = c.experts;
  bias.size = c.size;
  return bias;
}

ExpertWeights to_tensors(const Path& path, const fusedmoe_expert_weights& c) {
  ExpertWeights weights;
  weights.w13 = to_tensor({"w13", &path}, c.w13);
  weights.w2 = to_tensor({"w2", &path}, c.w2);
  if (c.w13_up != nullptr) weights.w13_up = to_tensor({"w13_up", &path}, c.w13_up);
  weights.w13_bias = to_bias({"w13_bias", &path}, c.w13_bias);
  weights.w2_bias = to_bias({"w2_bias", &path}, c.w2_bias);
  weights.w13_input_scales = c.w13_input_scales;
  weights.w2_input_scales = c.w2_input_scales;
  return weights;
}

constexpr std::size_t kWeightsHead = offsetof(fusedmoe_expert_weights, w13_up);

// The C callback as ExpertWeights::source.
struct SourceCall {
  fusedmoe_weights_source source;
  void* self;
  std::size_t struct_size;  // of the struct that carried the callback: what it may write

  ExpertWeights operator()(std::int64_t local_expert) const {
    // As large as any struct_size that passes: a callback from a newer header writes more than we
    // know, and its tail must then be zero.
    alignas(fusedmoe_expert_weights) std::array<std::byte, kMaxStructSize> memory{};
    auto* expert = new (memory.data()) fusedmoe_expert_weights;
    fusedmoe_expert_weights_init(expert);
    expert->struct_size = struct_size;
    std::array<char, 512> message{};
    const std::string who = "weights.source: local expert " + std::to_string(local_expert);
    const fusedmoe_status status = call(who, local_expert, expert, message);
    message.back() = '\0';
    if (status != FUSEDMOE_OK) {
      if (status < FUSEDMOE_ERROR_INVALID_ARGUMENT || status > FUSEDMOE_ERROR_INTERNAL) {
        throw Error(ErrorCode::invalid_argument,
                    who + ": expected a status in 0..9, got " + std::to_string(status) +
                        "; return a FUSEDMOE_ERROR_* value: " + message.data());
      }
      throw Error(static_cast<ErrorCode>(status),
                  who + ": " + (message[0] == '\0' ? "failed without a message" : message.data()));
    }
    const Path path{"weights.source"};
    fusedmoe_expert_weights c;
    fusedmoe_expert_weights_init(&c);
    read_struct(path, expert, kWeightsHead, c);
    if (c.source != nullptr) {
      refuse({"source", &path}, "null in what a source yields", "a callback", "yield tensors");
    }
    return to_tensors(path, c);
  }

 private:
  fusedmoe_status call(const std::string& who, std::int64_t local_expert,
                       fusedmoe_expert_weights* expert, std::array<char, 512>& message) const {
    try {
      return source(self, local_expert, expert, message.data(), message.size());
    } catch (const Error&) {
      throw;
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& error) {
      throw Error(ErrorCode::internal, who + ": the callback threw '" + error.what() +
                                           "'; let it return a status instead");
    }
  }
};

}  // namespace

ExpertWeights to_weights(const Path& path, const fusedmoe_expert_weights* from) {
  fusedmoe_expert_weights c;
  fusedmoe_expert_weights_init(&c);
  read_struct(path, from, kWeightsHead, c);
  ExpertWeights weights = to_tensors(path, c);
  if (c.source != nullptr) weights.source = SourceCall{c.source, c.self, c.struct_size};
  if (reinterpret_cast<std::uintptr_t>(c.version) % alignof(Counter) != 0) {
    refuse({"version", &path}, "an 8-byte aligned counter", "another address", "align it");
  }
  weights.version = reinterpret_cast<const Counter*>(c.version);
  return weights;
}

}  // namespace fusedmoe::c_api
