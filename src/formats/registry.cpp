// One row per weight format.
#include <array>

#include "formats/bf16.h"
#include "formats/f16.h"
#include "formats/f32.h"
#include "formats/format.h"

namespace fusedmoe {
namespace {

using namespace formats;

constexpr std::array kFormats = {
    FormatInfo{WeightFormat::f32, "f32", 32, true, &decode_f32, &encode_f32},
    FormatInfo{WeightFormat::f16, "f16", 16, true, &decode_f16, &encode_f16},
    FormatInfo{WeightFormat::bf16, "bf16", 16, true, &decode_bf16, &encode_bf16},
    FormatInfo{WeightFormat::fp8_e4m3, "fp8_e4m3", 8},
    FormatInfo{WeightFormat::fp8_e5m2, "fp8_e5m2", 8},
    FormatInfo{WeightFormat::mxfp8, "mxfp8", 8},
    FormatInfo{WeightFormat::mxfp4, "mxfp4", 4},
    FormatInfo{WeightFormat::nvfp4, "nvfp4", 4},
    FormatInfo{WeightFormat::int8, "int8", 8},
    FormatInfo{WeightFormat::int4, "int4", 4},
    FormatInfo{WeightFormat::q4_k, "q4_k", 4},
    FormatInfo{WeightFormat::q5_k, "q5_k", 5},
    FormatInfo{WeightFormat::q6_k, "q6_k", 6},
};

}  // namespace

std::span<const FormatInfo> all_formats() noexcept { return kFormats; }

const FormatInfo& format_info(WeightFormat format) noexcept {
  static constexpr FormatInfo kUnknown{WeightFormat::f32, "unknown"};
  const auto index = static_cast<std::size_t>(format);
  return index < kFormats.size() ? kFormats[index] : kUnknown;
}

const char* to_string(WeightFormat format) noexcept { return format_info(format).name; }

std::int64_t row_stride_of(const WeightTensor& tensor) noexcept {
  if (tensor.row_stride != 0) return tensor.row_stride;
  return tensor.layout == WeightLayout::nk ? tensor.inputs : tensor.outputs;
}

std::int64_t expert_stride_of(const WeightTensor& tensor) noexcept {
  if (tensor.expert_stride != 0) return tensor.expert_stride;
  return row_stride_of(tensor) *
         (tensor.layout == WeightLayout::nk ? tensor.outputs : tensor.inputs);
}

std::int64_t element_index(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                           std::int64_t k) noexcept {
  const bool nk = tensor.layout == WeightLayout::nk;
  return expert * expert_stride_of(tensor) + (nk ? n : k) * row_stride_of(tensor) + (nk ? k : n);
}

}  // namespace fusedmoe
