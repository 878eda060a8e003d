// Implementation of panel_format.h.
#include "backends/cpu/panel_format.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "formats/format.h"
#include "fusedmoe/error.h"

namespace fusedmoe::cpu {
namespace {

// Segments are cut to at most this many k, so that pieces of K stay small; a group that is longer
// becomes several with equal scales.
constexpr std::int64_t kMaxSegmentK = 256;
// k after which a sum of products of int8 without groups goes to fp32.
constexpr std::int64_t kIntegerK = 2048;

// The longest divisor of a group that is a multiple of 4 and at most kMaxSegmentK; 0 = none.
std::int64_t segment_k(std::int64_t group) {
  for (std::int64_t k = kMaxSegmentK; k >= 4; k -= 4) {
    if (group % k == 0) return k;
  }
  return 0;
}

// Inputs that share a scale; the whole row's when it is one group.
std::int64_t scaled_k(const WeightTensor& tensor) {
  switch (tensor.scales.layout) {
    case ScaleLayout::group:
      return std::min(tensor.scales.group_size, tensor.inputs);
    case ScaleLayout::block:
      return std::min(tensor.scales.block_k, tensor.inputs);
    default:
      return tensor.inputs;
  }
}

SegmentLayout::Scale record_scale(const WeightTensor& tensor) {
  using Scale = SegmentLayout::Scale;
  if (tensor.scales.layout == ScaleLayout::block) return Scale::f32;  // a few, whatever their type
  switch (tensor.scales.type) {
    case ScaleType::f32:
      return Scale::f32;
    case ScaleType::f16:
      return Scale::f16;
    case ScaleType::bf16:
      return Scale::bf16;
    case ScaleType::e8m0:
      return Scale::e8m0;
    case ScaleType::e4m3:
      return Scale::e4m3;
  }
  return Scale::f32;
}

SegmentLayout segments(const WeightTensor& tensor, bool integers) {
  using Scale = SegmentLayout::Scale;
  using Offset = SegmentLayout::Offset;
  switch (tensor.format) {
    case WeightFormat::q4_k:
    case WeightFormat::q5_k:
      return {.k = 32, .scale = Scale::six_bits, .offset = Offset::minima};
    case WeightFormat::q6_k:
      return {.k = 16, .scale = Scale::signed_bits};
    default:
      break;
  }
  SegmentLayout result;
  const Code code = code_of(tensor.format);
  if (code == Code::u4) {
    result.offset = tensor.scales.zero_points != nullptr ? Offset::zero_points : Offset::centre;
  }
  const std::int64_t group = scaled_k(tensor);
  if (group == tensor.inputs) {  // a scale per output: any segments do
    if (bits_of(code) == 4) {    // whose kernels want some
      result.k = kMaxSegmentK;
      result.scale = record_scale(tensor);
    } else if (integers) {
      result.k = kIntegerK;
    }
    return result;
  }
  result.k = segment_k(group);
  result.scale = record_scale(tensor);
  // A panel's 16 outputs of a kind lie in one block, also when they are every other row.
  result.per_half = tensor.scales.layout == ScaleLayout::block && tensor.scales.block_n % 32 == 0;
  return result;
}

}  // namespace

std::int64_t PanelFormat::period() const {
  return std::lcm<std::int64_t>(layout.k_multiple, segments.period());
}

PanelFormat panel_format(const WeightTensor& tensor, const GemmKernel& kernel) {
  PanelFormat format;
  format.code = code_of(tensor.format);
  const GemmInputs& inputs = inputs_of(kernel);
  format.layout = inputs.panel;
  const int usual_bits = inputs.dtype == DType::i8 ? 8 : 16;
  format.rows_per_pass = std::max(1, inputs.rows_per_pass * bits_of(format.code) / usual_bits);
  format.segments = segments(tensor, kernel.dtype == DType::i8);
  // What is not in the records: scales per output, and the global scale.
  const bool in_records = format.segments.scale != SegmentLayout::Scale::one ||
                          tensor.scales.layout == ScaleLayout::none;
  format.column_scales = !in_records || format_info(tensor.format).scales.global;
  return format;
}

void check_panel_format(const char* name, const WeightTensor& tensor) {
  const std::int64_t group = scaled_k(tensor);
  if (group == tensor.inputs || segment_k(group) > 0) return;
  throw Error(ErrorCode::unsupported,
              std::string(name) +
                  ".scales: expected a multiple of 4 inputs to share a scale, got " +
                  std::to_string(group) + "; the CPU's kernels do not split units of 4");
}

}  // namespace fusedmoe::cpu
