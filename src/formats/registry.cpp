// One row per weight format.
#include <array>

#include "formats/bf16.h"
#include "formats/f16.h"
#include "formats/f32.h"
#include "formats/format.h"
#include "formats/fp8_e4m3.h"
#include "formats/fp8_e5m2.h"
#include "formats/int4.h"
#include "formats/int8.h"
#include "formats/mxfp4.h"
#include "formats/mxfp8.h"
#include "formats/nvfp4.h"
#include "formats/q4_k.h"
#include "formats/q5_k.h"
#include "formats/q6_k.h"

namespace fusedmoe {
namespace {

using namespace formats;

constexpr unsigned bit(ScaleLayout layout) { return 1U << static_cast<int>(layout); }
constexpr unsigned bit(ScaleType type) { return 1U << static_cast<int>(type); }
constexpr unsigned kFloats = bit(ScaleType::f32) | bit(ScaleType::f16) | bit(ScaleType::bf16);

constexpr ScaleRule kPlain{.layouts = bit(ScaleLayout::none), .any_order = true};
constexpr ScaleRule kFp8{
    .layouts = bit(ScaleLayout::tensor) | bit(ScaleLayout::channel) | bit(ScaleLayout::block),
    .types = kFloats,
    .any_order = true};
constexpr ScaleRule kMx{
    .layouts = bit(ScaleLayout::group), .types = bit(ScaleType::e8m0), .group_size = 32};
constexpr ScaleRule kMxBytes{.layouts = bit(ScaleLayout::group),
                             .types = bit(ScaleType::e8m0),
                             .group_size = 32,
                             .any_order = true};
constexpr ScaleRule kNv{.layouts = bit(ScaleLayout::group),
                        .types = bit(ScaleType::e4m3),
                        .group_size = 16,
                        .global = true};
constexpr ScaleRule kInt8{.layouts = bit(ScaleLayout::channel) | bit(ScaleLayout::group),
                          .types = kFloats,
                          .any_order = true};
constexpr ScaleRule kInt4{.layouts = bit(ScaleLayout::channel) | bit(ScaleLayout::group),
                          .types = kFloats,
                          .zero_points = true};
constexpr ScaleRule kBlocks{.layouts = bit(ScaleLayout::none)};

double over_e4m3(double largest) { return largest / 448; }
double over_e5m2(double largest) { return largest / 57344; }
double over_int8(double largest) { return largest / 127; }
double over_int4(double largest) { return largest / 7; }
double over_e2m1(double largest) { return largest / 6; }
double mx_over_e4m3(double largest) { return e8m0_to_f32(e8m0_scale(largest, 8)); }
double mx_over_e2m1(double largest) { return e8m0_to_f32(e8m0_scale(largest, 2)); }

using F = WeightFormat;
constexpr std::array kFormats = {
    FormatInfo{F::f32, "f32", 1, 4, kPlain, &decode_f32, &encode_f32},
    FormatInfo{F::f16, "f16", 1, 2, kPlain, &decode_f16, &encode_f16},
    FormatInfo{F::bf16, "bf16", 1, 2, kPlain, &decode_bf16, &encode_bf16},
    FormatInfo{F::fp8_e4m3, "fp8_e4m3", 1, 1, kFp8, &decode_fp8_e4m3, &encode_fp8_e4m3, nullptr,
               &over_e4m3},
    FormatInfo{F::fp8_e5m2, "fp8_e5m2", 1, 1, kFp8, &decode_fp8_e5m2, &encode_fp8_e5m2, nullptr,
               &over_e5m2},
    FormatInfo{F::mxfp8, "mxfp8", 1, 1, kMxBytes, &decode_mxfp8, &encode_mxfp8, nullptr,
               &mx_over_e4m3},
    FormatInfo{F::mxfp4, "mxfp4", 2, 1, kMx, &decode_mxfp4, &encode_mxfp4, nullptr, &mx_over_e2m1},
    FormatInfo{F::nvfp4, "nvfp4", 2, 1, kNv, &decode_nvfp4, &encode_nvfp4, nullptr, &over_e2m1},
    FormatInfo{F::int8, "int8", 1, 1, kInt8, &decode_int8, &encode_int8, nullptr, &over_int8},
    FormatInfo{F::int4, "int4", 2, 1, kInt4, &decode_int4, &encode_int4, nullptr, &over_int4},
    FormatInfo{F::q4_k, "q4_k", 256, 144, kBlocks, &decode_q4_k, nullptr, &encode_q4_k},
    FormatInfo{F::q5_k, "q5_k", 256, 176, kBlocks, &decode_q5_k, nullptr, &encode_q5_k},
    FormatInfo{F::q6_k, "q6_k", 256, 210, kBlocks, &decode_q6_k, nullptr, &encode_q6_k},
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
  if (tensor.layout == WeightLayout::kn) return tensor.outputs;
  const std::int64_t block = format_info(tensor.format).block_elements;
  return (tensor.inputs + block - 1) / block * block;
}

std::int64_t expert_stride_of(const WeightTensor& tensor) noexcept {
  if (tensor.expert_stride != 0) return tensor.expert_stride;
  return row_stride_of(tensor) *
         (tensor.layout == WeightLayout::nk ? tensor.outputs : tensor.inputs);
}

std::int64_t byte_offset(const WeightTensor& tensor, std::int64_t element_index) noexcept {
  const FormatInfo& format = format_info(tensor.format);
  return element_index / format.block_elements * format.block_bytes;
}

std::int64_t element_index(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                           std::int64_t k) noexcept {
  const bool nk = tensor.layout == WeightLayout::nk;
  return expert * expert_stride_of(tensor) + (nk ? n : k) * row_stride_of(tensor) + (nk ? k : n);
}

}  // namespace fusedmoe
