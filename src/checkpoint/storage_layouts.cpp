// The table of layouts.
#include "checkpoint/storage_layouts.h"

#include <algorithm>
#include <iterator>

namespace fusedmoe::checkpoint {
namespace {

using enum TensorType;
using enum PartShape;

constexpr TensorType kPlain[] = {f32, f16, bf16};
constexpr TensorType kFp8[] = {f8_e4m3, f8_e5m2};
constexpr TensorType kScales[] = {f32, f16, bf16};
constexpr TensorType kF32[] = {f32};
constexpr TensorType kE4m3[] = {f8_e4m3};
constexpr TensorType kE8m0[] = {u8, f8_e8m0};
constexpr TensorType kU8[] = {u8};
constexpr TensorType kI8[] = {i8};
constexpr TensorType kI32[] = {i32};
constexpr TensorType kI64[] = {i64};
constexpr TensorType kHalf[] = {f16, bf16};

constexpr PartRule kInputScale = {Part::input_scale, ".input_scale", scalar, kScales,
                                  Need::optional};
constexpr PartRule kPlainWeight = {Part::plain, ".weight", matrix, kPlain, Need::optional};
constexpr PartRule kActOrder = {Part::group_index, ".weight_g_idx", inputs, kI32, Need::refused};
constexpr PartRule kShape = {Part::shape, ".weight_shape", two, kI64};

constexpr PartRule kPlainParts[] = {{Part::data, ".weight", matrix, kPlain}};
constexpr PartRule kFp8BlockParts[] = {{Part::data, ".weight", matrix, kFp8},
                                       {Part::scale, ".weight_scale_inv", blocks, kScales},
                                       kInputScale};
constexpr PartRule kCtFp8BlockParts[] = {{Part::data, ".weight", matrix, kFp8},
                                         {Part::scale, ".weight_scale", blocks, kScales},
                                         kInputScale};
constexpr PartRule kFp8TensorParts[] = {{Part::data, ".weight", matrix, kFp8},
                                        {Part::scale, ".weight_scale", scalar, kScales},
                                        kInputScale};
constexpr PartRule kFp8ChannelParts[] = {{Part::data, ".weight", matrix, kFp8},
                                         {Part::scale, ".weight_scale", channels, kScales},
                                         kInputScale};
constexpr PartRule kInt8Parts[] = {{Part::data, ".weight", matrix, kI8},
                                   {Part::scale, ".weight_scale", groups, kScales},
                                   kInputScale,
                                   kActOrder};
constexpr PartRule kInt8PackedParts[] = {{Part::data, ".weight_packed", words, kI32},
                                         {Part::scale, ".weight_scale", groups, kScales},
                                         kShape,
                                         kInputScale,
                                         kActOrder,
                                         kPlainWeight};
constexpr PartRule kInt4PackedParts[] = {
    {Part::data, ".weight_packed", words, kI32},
    {Part::scale, ".weight_scale", groups, kScales},
    {Part::zero_point, ".weight_zero_point", packed_zeros, kI32, Need::if_asymmetric},
    kShape,
    kInputScale,
    kActOrder,
    kPlainWeight};
constexpr PartRule kCtNvfp4Parts[] = {
    {Part::data, ".weight_packed", half_bytes, kU8},
    {Part::scale, ".weight_scale", groups, kE4m3},
    {Part::global, ".weight_global_scale", scalar, kF32},
    {Part::input_scale, ".input_global_scale", scalar, kF32, Need::optional},
    kPlainWeight};
constexpr PartRule kCtMxfp4Parts[] = {{Part::data, ".weight_packed", half_bytes, kU8},
                                      {Part::scale, ".weight_scale", groups, kE8m0},
                                      kPlainWeight};
constexpr PartRule kGptqParts[] = {{Part::data, ".qweight", words_by_k, kI32},
                                   {Part::scale, ".scales", groups_by_n, kHalf},
                                   {Part::zero_point, ".qzeros", zeros_by_n, kI32},
                                   {Part::group_index, ".g_idx", inputs, kI32, Need::optional},
                                   kPlainWeight};
constexpr PartRule kAwqParts[] = {{Part::data, ".qweight", words_by_n, kI32},
                                  {Part::scale, ".scales", groups_by_n, kHalf},
                                  {Part::zero_point, ".qzeros", zeros_by_n, kI32},
                                  kPlainWeight};
constexpr PartRule kGptOssParts[] = {
    {Part::data, "_blocks", mx_blocks, kU8}, {Part::scale, "_scales", groups, kE8m0}, kPlainWeight};
constexpr PartRule kModelOptNvfp4Parts[] = {{Part::data, ".weight", half_bytes, kU8},
                                            {Part::scale, ".weight_scale", groups, kE4m3},
                                            {Part::global, ".weight_scale_2", scalar, kF32},
                                            kInputScale};

constexpr TensorType kQ8_0[] = {q8_0};
constexpr TensorType kQ4_0[] = {q4_0};
constexpr TensorType kMxfp4[] = {mxfp4};
constexpr TensorType kNvfp4[] = {nvfp4};
constexpr TensorType kQ4K[] = {q4_k};
constexpr TensorType kQ5K[] = {q5_k};
constexpr TensorType kQ6K[] = {q6_k};

// A number for each expert that its outputs are multiplied by.
constexpr PartRule kGgufScale = {Part::global, ".scale", scalar, kF32, Need::optional};
constexpr PartRule kGgufInputScale = {Part::input_scale, ".input_scale", scalar, kF32,
                                      Need::optional};
constexpr PartRule kGgufParts[] = {
    {Part::data, ".weight", matrix, kPlain}, kGgufScale, kGgufInputScale};
constexpr PartRule kQ8_0Parts[] = {
    {Part::data, ".weight", matrix, kQ8_0}, kGgufScale, kGgufInputScale};
constexpr PartRule kQ4_0Parts[] = {
    {Part::data, ".weight", matrix, kQ4_0}, kGgufScale, kGgufInputScale};
constexpr PartRule kMxfp4Parts[] = {
    {Part::data, ".weight", matrix, kMxfp4}, kGgufScale, kGgufInputScale};
constexpr PartRule kNvfp4Parts[] = {
    {Part::data, ".weight", matrix, kNvfp4}, kGgufScale, kGgufInputScale};
constexpr PartRule kQ4KParts[] = {
    {Part::data, ".weight", matrix, kQ4K}, kGgufScale, kGgufInputScale};
constexpr PartRule kQ5KParts[] = {
    {Part::data, ".weight", matrix, kQ5K}, kGgufScale, kGgufInputScale};
constexpr PartRule kQ6KParts[] = {
    {Part::data, ".weight", matrix, kQ6K}, kGgufScale, kGgufInputScale};

// In the order of LayoutId.
constexpr StorageLayout kLayouts[] = {
    {.name = "unquantised",
     .format = WeightFormat::bf16,  // follows the data
     .scales = ScaleLayout::none,
     .parts = kPlainParts,
     .stacked = true},
    {.name = "fp8 in blocks",
     .format = WeightFormat::fp8_e4m3,
     .scales = ScaleLayout::block,
     .parts = kFp8BlockParts,
     .stacked = true},
    {.name = "compressed-tensors fp8 in blocks",
     .format = WeightFormat::fp8_e4m3,
     .scales = ScaleLayout::block,
     .parts = kCtFp8BlockParts},
    {.name = "fp8 per tensor",
     .format = WeightFormat::fp8_e4m3,
     .scales = ScaleLayout::tensor,
     .parts = kFp8TensorParts},
    {.name = "fp8 per channel",
     .format = WeightFormat::fp8_e4m3,
     .scales = ScaleLayout::channel,
     .parts = kFp8ChannelParts},
    {.name = "compressed-tensors int8",
     .format = WeightFormat::int8,
     .scales = ScaleLayout::group,
     .parts = kInt8Parts},
    {.name = "compressed-tensors int8, packed",
     .format = WeightFormat::int8,
     .scales = ScaleLayout::group,
     .parts = kInt8PackedParts,
     .conversion = Conversion::ct_int8},
    {.name = "compressed-tensors int4, packed",
     .format = WeightFormat::int4,
     .scales = ScaleLayout::group,
     .parts = kInt4PackedParts,
     .conversion = Conversion::zeros},
    {.name = "compressed-tensors nvfp4",
     .format = WeightFormat::nvfp4,
     .scales = ScaleLayout::group,
     .parts = kCtNvfp4Parts,
     .group = 16,
     .global_divides = true},
    {.name = "compressed-tensors mxfp4",
     .format = WeightFormat::mxfp4,
     .scales = ScaleLayout::group,
     .parts = kCtMxfp4Parts,
     .group = 32},
    {.name = "GPTQ int4",
     .format = WeightFormat::int4,
     .scales = ScaleLayout::group,
     .parts = kGptqParts,
     .conversion = Conversion::gptq,
     .scales_transposed = true},
    {.name = "AWQ int4",
     .format = WeightFormat::int4,
     .scales = ScaleLayout::group,
     .parts = kAwqParts,
     .conversion = Conversion::awq,
     .scales_transposed = true},
    {.name = "mxfp4 of gpt-oss",
     .format = WeightFormat::mxfp4,
     .scales = ScaleLayout::group,
     .parts = kGptOssParts,
     .group = 32,
     .stacked = true},
    {.name = "ModelOpt nvfp4",
     .format = WeightFormat::nvfp4,
     .scales = ScaleLayout::group,
     .parts = kModelOptNvfp4Parts,
     .group = 16},
    {.name = "GGUF",
     .format = WeightFormat::bf16,  // follows the data
     .scales = ScaleLayout::none,
     .parts = kGgufParts,
     .stacked = true},
};
static_assert(std::size(kLayouts) == static_cast<std::size_t>(LayoutId::gguf) + 1);

constexpr StorageLayout gguf_row(std::string_view name, WeightFormat format, ScaleLayout scales,
                                 std::span<const PartRule> parts, Conversion conversion,
                                 std::int64_t group) {
  return {.name = name,
          .format = format,
          .scales = scales,
          .parts = parts,
          .conversion = conversion,
          .group = group,
          .stacked = true};
}

constexpr StorageLayout kGgufLayouts[] = {
    gguf_row("Q8_0", WeightFormat::int8, ScaleLayout::group, kQ8_0Parts, Conversion::q8_0, 32),
    gguf_row("Q4_0", WeightFormat::int4, ScaleLayout::group, kQ4_0Parts, Conversion::q4_0, 32),
    gguf_row("MXFP4", WeightFormat::mxfp4, ScaleLayout::group, kMxfp4Parts,
             Conversion::mxfp4_blocks, 32),
    gguf_row("NVFP4", WeightFormat::nvfp4, ScaleLayout::group, kNvfp4Parts,
             Conversion::nvfp4_blocks, 16),
    gguf_row("Q4_K", WeightFormat::q4_k, ScaleLayout::none, kQ4KParts, Conversion::none, 0),
    gguf_row("Q5_K", WeightFormat::q5_k, ScaleLayout::none, kQ5KParts, Conversion::none, 0),
    gguf_row("Q6_K", WeightFormat::q6_k, ScaleLayout::none, kQ6KParts, Conversion::none, 0),
};

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::int64_t bits_of(const StorageLayout& layout) {
  return layout.format == WeightFormat::int8 ? 8 : 4;
}

std::int64_t group_of(const Extent& extent, const StorageLayout& layout,
                      const QuantNumbers& numbers) {
  if (layout.group != 0) return layout.group;
  return numbers.group_size != 0 ? numbers.group_size : extent.inputs;
}

bool contains(const StorageLayout& layout, PartShape shape) {
  return std::any_of(layout.parts.begin(), layout.parts.end(),
                     [shape](const PartRule& rule) { return rule.shape == shape; });
}

}  // namespace

const PartRule* StorageLayout::find(Part part) const noexcept {
  for (const PartRule& rule : parts) {
    if (rule.part == part) return &rule;
  }
  return nullptr;
}

std::vector<std::int64_t> part_shape(PartShape shape, const Extent& extent,
                                     const StorageLayout& layout, const QuantNumbers& numbers) {
  const std::int64_t n = extent.outputs;
  const std::int64_t k = extent.inputs;
  const std::int64_t g = group_of(extent, layout, numbers);
  const std::int64_t bits = bits_of(layout);
  switch (shape) {
    case matrix:
      return {extent.rows(), extent.columns()};
    case half_bytes:
      return {n, k / 2};
    case words:
      return {n, ceil_div(k * bits, 32)};
    case scalar:
      return {};
    case channels:
      return {n, 1};
    case groups:
      return {n, k / g};
    case blocks: {
      const std::int64_t parts = extent.two_parts ? 2 : 1;
      const std::int64_t along_n = parts * ceil_div(n / parts, numbers.block_n);
      const std::int64_t along_k = ceil_div(k, numbers.block_k);
      if (extent.layout == WeightLayout::kn) return {along_k, along_n};
      return {along_n, along_k};
    }
    case packed_zeros:
      return {ceil_div(n * bits, 32), k / g};
    case words_by_k:
      return {k * bits / 32, n};
    case words_by_n:
      return {k, n * bits / 32};
    case groups_by_n:
      return {k / g, n};
    case zeros_by_n:
      return {k / g, n * bits / 32};
    case inputs:
      return {k};
    case two:
      return {2};
    case mx_blocks:
      return {n, k / 32, 16};
  }
  return {};
}

std::optional<std::string> misfit(const Extent& extent, const StorageLayout& layout,
                                  const QuantNumbers& numbers) {
  const auto multiple = [](const char* what, std::int64_t size, std::int64_t of,
                           const char* unit) -> std::optional<std::string> {
    if (size % of == 0) return std::nullopt;
    return std::string(what) + " = " + std::to_string(size) + " is no multiple of " + unit + " " +
           std::to_string(of);
  };
  const std::int64_t g = group_of(extent, layout, numbers);
  std::optional<std::string> reason;
  if (layout.scales == ScaleLayout::group) {
    reason = multiple("K", extent.inputs, g, "the group size");
  }
  if (!reason && (contains(layout, words_by_k) || contains(layout, words_by_n))) {
    reason = multiple("N", extent.outputs, 8, "the columns in a word,");
    if (!reason) reason = multiple("K", extent.inputs, 8, "the rows in a word,");
  }
  if (!reason && layout.scales == ScaleLayout::block && extent.layout == WeightLayout::kn &&
      numbers.block_n != numbers.block_k) {
    reason = "its matrix is stored transposed, for which weight_block_size must be square";
  }
  if (!reason && layout.scales == ScaleLayout::block && extent.interleaved) {
    reason = "its rows alternate between gate and up, which blocks cannot tell apart";
  }
  return reason;
}

const StorageLayout& storage_layout(LayoutId id) noexcept {
  return kLayouts[static_cast<std::size_t>(id)];
}

const StorageLayout* gguf_layout(TensorType type) noexcept {
  if (plain_format(type)) return &storage_layout(LayoutId::gguf);
  for (const StorageLayout& layout : kGgufLayouts) {
    if (layout.parts.front().types.front() == type) return &layout;
  }
  return nullptr;
}

std::optional<WeightFormat> plain_format(TensorType type) noexcept {
  switch (type) {
    case f32:
      return WeightFormat::f32;
    case f16:
      return WeightFormat::f16;
    case bf16:
      return WeightFormat::bf16;
    default:
      return std::nullopt;
  }
}

std::optional<ScaleType> scale_type(TensorType type) noexcept {
  switch (type) {
    case f32:
      return ScaleType::f32;
    case f16:
      return ScaleType::f16;
    case bf16:
      return ScaleType::bf16;
    case u8:
    case f8_e8m0:
      return ScaleType::e8m0;
    case f8_e4m3:
      return ScaleType::e4m3;
    default:
      return std::nullopt;
  }
}

}  // namespace fusedmoe::checkpoint
