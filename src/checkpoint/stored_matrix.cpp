// Implementation of stored_matrix.h.
#include "checkpoint/stored_matrix.h"

#include <cstring>
#include <string>
#include <utility>

#include "checkpoint/unpack.h"
#include "fusedmoe/error.h"

namespace fusedmoe::checkpoint {
namespace {

std::int64_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// Converted data, scales and zero points of one expert.
void convert(const StoredMatrix& matrix, std::int64_t expert, ExpertBuffers& buffers,
             WeightTensor& out) {
  const std::int64_t n = out.outputs;
  const std::int64_t k = out.inputs;
  WeightScales& scales = out.scales;
  const std::int64_t group = scales.layout == ScaleLayout::group ? scales.group_size : k;
  const std::int64_t groups = k / group;
  const std::byte* const data = matrix.part(Part::data).at(expert);
  const auto zeros = [&] { return matrix.part(Part::zero_point).at(expert); };
  std::byte* to = nullptr;
  switch (matrix.conversion) {
    case Conversion::none:
      break;
    case Conversion::zeros: {
      if (!matrix.part(Part::zero_point).present()) break;
      std::byte* const points = buffers.add(n * groups);
      unpack_ct_zeros(zeros(), n, groups, points);
      scales.zero_points = points;
      break;
    }
    case Conversion::ct_int8:
      to = buffers.add(n * k);
      unpack_ct_int8(data, n, k, to);
      break;
    case Conversion::gptq:
    case Conversion::awq: {
      to = buffers.add(n * k / 2);
      std::byte* const points = buffers.add(n * groups);
      if (matrix.conversion == Conversion::gptq) {
        unpack_gptq(data, n, k, to);
        unpack_gptq_zeros(zeros(), groups, n, matrix.zero_offset, points);
      } else {
        unpack_awq(data, n, k, to);
        unpack_awq_zeros(zeros(), groups, n, points);
      }
      scales.zero_points = points;
      break;
    }
    case Conversion::q8_0:
    case Conversion::q4_0: {
      const bool q8 = matrix.conversion == Conversion::q8_0;
      const std::int64_t count = n * groups;
      const bool as_f32 = scales.type == ScaleType::f32;
      to = buffers.add(n * k / (q8 ? 1 : 2));
      const float factor =
          matrix.factors.empty() ? 1.0F : matrix.factors[static_cast<std::size_t>(expert)];
      const SplitScales split{buffers.add(count * (as_f32 ? 4 : 2)), as_f32, factor};
      (q8 ? split_q8_0 : split_q4_0)(data, count, to, split);
      scales.data = split.out;
      break;
    }
    case Conversion::mxfp4_blocks:
    case Conversion::nvfp4_blocks: {
      const bool mx = matrix.conversion == Conversion::mxfp4_blocks;
      to = buffers.add(n * k / 2);
      std::byte* const codes = buffers.add(n * groups);
      if (mx) {
        split_mxfp4(data, n * groups, to, codes);
      } else {
        split_nvfp4(data, n * groups / 4, to, codes);
      }
      scales.data = codes;
      break;
    }
  }
  if (to != nullptr) out.data = to;
}

// Gate's and up's bias, one behind the other.
BiasTensor joined_bias(const ExpertTable& table, std::int64_t expert, ExpertBuffers& buffers) {
  const StoredBias& gate = table.w13_bias;
  const StoredBias& up = table.w13_up_bias;
  const std::int64_t bytes = gate.size * bytes_of(gate.dtype);
  std::byte* const to = buffers.add(2 * bytes);
  std::memcpy(to, gate.data + expert * bytes, static_cast<std::size_t>(bytes));
  std::memcpy(to + bytes, up.data + expert * bytes, static_cast<std::size_t>(bytes));
  return {to, gate.dtype, 1, gate.size + up.size};
}

BiasTensor bias_of(const StoredBias& bias, std::int64_t expert) {
  if (bias.empty()) return {};
  return {bias.data + expert * bias.size * bytes_of(bias.dtype), bias.dtype, 1, bias.size};
}

BiasTensor stated_bias(const ExpertTable& table, const StoredBias& bias, bool with_data) {
  if (bias.empty()) return {};
  return {with_data ? bias.data : nullptr, bias.dtype, table.num_experts, bias.size};
}

const float* scales_or_null(const std::vector<float>& scales, std::int64_t expert) {
  return scales.empty() ? nullptr : scales.data() + expert;
}

// What keeps one expert's views alive.
struct ExpertOwner {
  std::shared_ptr<const ExpertTable> table;
  ExpertBuffers buffers;
};

ExpertWeights one_expert(const std::shared_ptr<const ExpertTable>& table, std::int64_t expert) {
  if (expert < 0 || expert >= table->num_experts) {
    throw Error(ErrorCode::invalid_argument, "expert: expected 0 to " +
                                                 std::to_string(table->num_experts - 1) + ", got " +
                                                 std::to_string(expert));
  }
  auto owner = std::make_shared<ExpertOwner>();
  owner->table = table;
  ExpertWeights weights;
  if (!table->w13.empty()) weights.w13 = table->w13.expert(expert, owner->buffers);
  if (!table->w13_up.empty()) weights.w13_up = table->w13_up.expert(expert, owner->buffers);
  weights.w2 = table->w2.expert(expert, owner->buffers);
  weights.w13_bias = table->w13_up_bias.empty() ? bias_of(table->w13_bias, expert)
                                                : joined_bias(*table, expert, owner->buffers);
  weights.w2_bias = bias_of(table->w2_bias, expert);
  weights.w13_input_scales = scales_or_null(table->w13_input_scales, expert);
  weights.w2_input_scales = scales_or_null(table->w2.input_scales, expert);
  weights.owner = std::move(owner);
  return weights;
}

}  // namespace

std::byte* ExpertBuffers::add(std::int64_t bytes) {
  // Not zeroed first: every byte is written by the conversion.
  blocks_.push_back(std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes)));
  return blocks_.back().get();
}

bool StoredMatrix::in_place() const noexcept { return stacked && !converts(); }

WeightTensor StoredMatrix::stack() const {
  WeightTensor tensor = shape;
  tensor.data = part(Part::data).at(0);
  if (part(Part::scale).present()) tensor.scales.data = part(Part::scale).at(0);
  if (!globals.empty()) tensor.scales.global = globals.data();
  return tensor;
}

WeightTensor StoredMatrix::expert(std::int64_t index, ExpertBuffers& buffers) const {
  WeightTensor tensor = shape;
  tensor.experts = 1;
  tensor.data = part(Part::data).at(index);
  if (part(Part::scale).present()) tensor.scales.data = part(Part::scale).at(index);
  if (!globals.empty()) tensor.scales.global = globals.data() + index;
  if (converts()) convert(*this, index, buffers, tensor);
  return tensor;
}

ExpertWeights expert_weights(std::shared_ptr<const ExpertTable> table) {
  ExpertWeights weights;
  const bool whole = (table->w13.empty() || table->w13.in_place()) &&
                     (table->w13_up.empty() || table->w13_up.in_place()) && table->w2.in_place() &&
                     table->w13_up_bias.empty();
  const auto stated = [whole](const StoredMatrix& matrix) {
    if (matrix.empty()) return WeightTensor();
    return whole ? matrix.stack() : matrix.shape;
  };
  weights.w13 = stated(table->w13);
  weights.w13_up = stated(table->w13_up);
  weights.w2 = stated(table->w2);
  weights.w13_bias = stated_bias(*table, table->w13_bias, whole);
  weights.w13_bias.size += table->w13_up_bias.size;
  weights.w2_bias = stated_bias(*table, table->w2_bias, whole);
  if (whole) {
    weights.w13_input_scales = scales_or_null(table->w13_input_scales, 0);
    weights.w2_input_scales = scales_or_null(table->w2.input_scales, 0);
    weights.owner = std::move(table);
  } else {
    weights.source = [table = std::move(table)](std::int64_t expert) {
      return one_expert(table, expert);
    };
  }
  return weights;
}

}  // namespace fusedmoe::checkpoint
