#include "random_case_weights.h"

#include <algorithm>

#include "formats/format.h"
#include "formats/quantize.h"
#include "fusedmoe/fused_moe.h"

namespace fusedmoe::tool {
namespace {

template <class Enum>
Enum legal_one(Draw& draw, unsigned mask) {
  for (;;) {
    const auto value = static_cast<unsigned>(draw.in(0, 7));
    if ((mask >> value & 1) != 0) return static_cast<Enum>(value);
  }
}

// Inputs that share a scale: whole units of 4, or more than there are.
std::int64_t draw_group(Draw& draw, std::int64_t inputs) {
  switch (draw.in(0, 4)) {
    case 0:
      return 4 * draw.in(1, 20);
    case 1:
      return inputs + draw.in(0, 70);
    case 2:
      return 4 * draw.in(1, std::max<std::int64_t>(1, inputs / 3));
    case 3:
      for (const std::int64_t parts : {5, 4, 3, 2}) {  // whole groups
        if (inputs % (4 * parts) == 0) return inputs / parts;
      }
      [[fallthrough]];
    default:
      return draw.one_of<std::int64_t>({16, 32, 64, 128, 256});
  }
}

WeightScales draw_scales(Draw& draw, WeightFormat format, std::int64_t inputs) {
  const ScaleRule& rule = format_info(format).scales;
  WeightScales scales = default_scales(format);
  if (scales.layout == ScaleLayout::none) return scales;
  scales.layout = legal_one<ScaleLayout>(draw, rule.layouts);
  scales.type = legal_one<ScaleType>(draw, rule.types);
  scales.group_size = rule.group_size;
  if (scales.layout == ScaleLayout::group && rule.group_size == 0) {
    scales.group_size = draw_group(draw, inputs);
  }
  if (scales.layout == ScaleLayout::block) {
    scales.block_n = draw.one_of<std::int64_t>({128, 64, 32, draw.in(1, 150), draw.in(1, 40)});
    scales.block_k = draw_group(draw, inputs);
  }
  const bool matrix = scales.layout == ScaleLayout::group || scales.layout == ScaleLayout::block;
  scales.transposed = matrix && draw.chance(0.25);
  return scales;
}

// Gate and up in one tensor, quantised apart.
ScaleParts draw_parts(Draw& draw, const MoeConfig& config, const WeightScales& scales) {
  const bool halves = config.gate_up_layout == GateUpLayout::halves;
  if (scales.layout == ScaleLayout::block && !halves) return ScaleParts::one;
  const bool must =
      scales.layout == ScaleLayout::block && config.intermediate_size % scales.block_n != 0;
  if (!must && draw.chance(0.4)) return ScaleParts::one;
  return halves ? ScaleParts::halves : ScaleParts::interleaved;
}

}  // namespace

std::int64_t multiple_of(WeightFormat format) {
  const FormatInfo& info = format_info(format);
  return info.encode == nullptr ? info.block_elements : 1;
}

void draw_formats(RandomCase& drawn, Draw& draw, const SizeLimits& limits) {
  RandomWeightsOptions& weights = drawn.weights;
  constexpr std::int64_t kBlock = 256;
  const bool blocks =
      std::min(limits.max_hidden, limits.max_intermediate) >= kBlock &&
      std::min(limits.max_weights, limits.max_multiply_adds >> 4) >= 3 * kBlock * kBlock;
  const std::int64_t last =
      static_cast<std::int64_t>(blocks ? WeightFormat::q6_k : WeightFormat::int4);
  const auto any = [&] { return static_cast<WeightFormat>(draw.in(0, last)); };
  if (draw.chance(0.1)) {  // those that mode a8 may be built for, more often
    drawn.mode = ComputeMode::a8;
    weights.w13_format = draw.one_of({WeightFormat::int8, WeightFormat::int4});
    weights.w2_format = draw.one_of({WeightFormat::int8, WeightFormat::int4});
    return;
  }
  weights.w13_format = any();
  weights.w2_format = draw.chance(0.4) ? weights.w13_format : any();
}

void draw_weights(RandomCase& drawn, Draw& draw) {
  RandomWeightsOptions& weights = drawn.weights;
  const MoeConfig& config = drawn.config;
  const auto layout = [&](WeightFormat format) {
    const WeightLayout any = draw.one_of({WeightLayout::nk, WeightLayout::kn});
    return format_info(format).scales.any_order ? any : WeightLayout::nk;
  };
  weights.w13_layout = layout(weights.w13_format);
  weights.w2_layout = layout(weights.w2_format);
  const bool gated = is_gated(config.activation.kind);
  weights.gate_up_apart = draw.chance(0.25) && gated;
  weights.w13_scales = draw_scales(draw, weights.w13_format, config.hidden_size);
  weights.w2_scales = draw_scales(draw, weights.w2_format, config.intermediate_size);
  if (gated && !weights.gate_up_apart && weights.w13_scales->layout != ScaleLayout::none) {
    weights.w13_scales->parts = draw_parts(draw, config, *weights.w13_scales);
  }
  weights.zero_points = draw.chance(0.5);
  weights.w13_bias = draw.chance(0.4);
  weights.w2_bias = draw.chance(0.4);
  weights.bias_dtype = draw.one_of({DType::f32, DType::f16, DType::bf16});
  if (draw.chance(0.3)) weights.row_padding = draw.in(1, 20);
  if (draw.chance(0.3)) weights.expert_padding = draw.in(1, 90);
  if (draw.chance(0.3)) weights.misalign = draw.one_of({1, 2, 3, 4, 8, 17, 32, 62});
}

bool supports_a8(const RandomCase& drawn) {
  PlanOptions options;
  options.isa = drawn.isa;
  options.expert_map = drawn.expert_map;
  options.mode = ComputeMode::a8;
  ExpertWeights weights = stated_weights(drawn.config, drawn.num_local, drawn.weights);
  weights.source = [](std::int64_t) { return ExpertWeights(); };  // supports() never calls it
  return FusedMoe::supports(drawn.config, weights, options).ok;
}

}  // namespace fusedmoe::tool
