#include "random_case.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "random_case_weights.h"
#include "random_draw.h"

namespace fusedmoe::tool {
namespace {

// The dimension that is large in a case; the others are small, so that the oracle stays quick.
enum class Focus { none, tiny, hidden, intermediate, tokens, experts, top_k };

std::int64_t small_size(Draw& draw) {
  switch (draw.in(0, 4)) {
    case 0:
      return draw.in(1, 9);
    case 1:
      return draw.near(16);
    case 2:
      return draw.near(draw.in(1, 4) * 32);
    case 3:
      return draw.near(48);
    default:
      return draw.in(1, 130);
  }
}

// Past the tiles: panels of 32 outputs in groups of 16, pieces of 256 and 1024 inputs.
std::int64_t large_size(Draw& draw, std::int64_t max) {
  const std::int64_t edge = draw.one_of<std::int64_t>({256, 512, 768, 1024, 1280, 2048});
  if (edge < max && draw.chance(0.4)) return draw.near(edge);
  return draw.log_in(std::min<std::int64_t>(257, max), max);
}

std::int64_t draw_tokens(Draw& draw) {
  if (draw.chance(0.04)) return 0;
  return draw.chance(0.3) ? draw.in(1, 4) : draw.log_in(1, 60);
}

void draw_sizes(RandomCase& drawn, Draw& draw, const SizeLimits& limits) {
  const auto focus = static_cast<Focus>(draw.in(0, 6));
  MoeConfig& config = drawn.config;
  std::int64_t& tokens = drawn.input.num_tokens;
  const auto small = [&] { return focus == Focus::tiny ? draw.in(1, 8) : small_size(draw); };
  config.hidden_size = focus == Focus::hidden ? large_size(draw, limits.max_hidden) : small();
  config.intermediate_size =
      focus == Focus::intermediate ? large_size(draw, limits.max_intermediate) : small();
  config.num_experts = focus == Focus::experts
                           ? draw.log_in(30, std::max<std::int64_t>(30, limits.max_experts))
                       : focus == Focus::top_k  ? draw.in(5, 40)
                       : focus == Focus::tokens ? draw.in(1, 5)
                                                : draw.in(1, 14);
  tokens = focus == Focus::tokens ? draw.log_in(49, std::max<std::int64_t>(49, limits.max_tokens))
                                  : draw_tokens(draw);
  config.top_k = focus == Focus::top_k ? draw.in(5, 12) : draw.in(1, 4);
  if (draw.chance(0.1)) config.top_k = config.num_experts;

  const std::int64_t hidden_multiple = multiple_of(drawn.weights.w13_format);
  const std::int64_t inter_multiple = multiple_of(drawn.weights.w2_format);
  const auto whole = [](std::int64_t size, std::int64_t multiple, std::int64_t max) {
    return std::min((size + multiple - 1) / multiple, max / multiple) * multiple;
  };
  config.hidden_size = whole(config.hidden_size, hidden_multiple, limits.max_hidden);
  config.intermediate_size =
      whole(config.intermediate_size, inter_multiple, limits.max_intermediate);
  config.num_experts = std::min(config.num_experts, limits.max_experts);
  tokens = std::min(tokens, limits.max_tokens);

  // Shrink what is largest, the focus last, until the oracle is quick enough.
  std::int64_t* const dimensions[] = {&config.hidden_size, &config.intermediate_size,
                                      &config.num_experts, &config.top_k, &tokens};
  const std::int64_t* const kept = focus == Focus::hidden         ? &config.hidden_size
                                   : focus == Focus::intermediate ? &config.intermediate_size
                                   : focus == Focus::tokens       ? &tokens
                                   : focus == Focus::experts      ? &config.num_experts
                                   : focus == Focus::top_k        ? &config.top_k
                                                                  : nullptr;
  const std::int64_t max_weights = std::max<std::int64_t>(3, limits.max_weights);
  const std::int64_t budget = std::max<std::int64_t>(
      3, limits.max_multiply_adds >> draw.in(0, 4));  // most cases are far below the limit
  const auto least = [&](const std::int64_t* dimension) {
    return dimension == &config.hidden_size         ? hidden_multiple
           : dimension == &config.intermediate_size ? inter_multiple
                                                    : 1;
  };
  const auto halve = [&](std::int64_t* dimension) {
    const std::int64_t multiple = least(dimension);
    *dimension = (*dimension / multiple + 1) / 2 * multiple;
  };
  for (;;) {
    config.top_k = std::min(config.top_k, config.num_experts);
    const std::int64_t matrix = 3 * config.hidden_size * config.intermediate_size;
    const bool many_weights = matrix * config.num_experts > max_weights;
    if (!many_weights && matrix * tokens * config.top_k <= budget) break;
    std::int64_t* largest = nullptr;
    for (std::int64_t* dimension : dimensions) {
      if (dimension == kept || *dimension <= least(dimension)) continue;
      if (many_weights && (dimension == &tokens || dimension == &config.top_k)) continue;
      if (!many_weights && dimension == &config.num_experts) continue;
      if (largest == nullptr || *dimension > *largest) largest = dimension;
    }
    if (largest == nullptr) {
      for (std::int64_t* dimension : dimensions) halve(dimension);
    } else {
      halve(largest);
    }
  }
}

void draw_layer(RandomCase& drawn, Draw& draw) {
  MoeConfig& config = drawn.config;
  config.dtype = draw.one_of({DType::f32, DType::f16, DType::bf16});
  if (draw.chance(0.4)) config.output_dtype = draw.one_of({DType::f32, DType::f16, DType::bf16});
  config.activation.kind = static_cast<Activation>(draw.in(0, 6));
  config.activation.alpha = draw.one_of({1.702F, 1.0F, 0.3F});
  config.activation.limit =
      draw.one_of({7.0F, 0.5F, 1.25F, std::numeric_limits<float>::infinity()});
  config.activation.beta = draw.one_of({1.0F, 0.25F, 4.0F});
  config.activation.linear_beta = draw.one_of({0.0F, 0.75F, 3.0F});
  const Activation kind = config.activation.kind;
  const bool may_clamp =
      kind == Activation::silu || kind == Activation::gelu || kind == Activation::gelu_tanh;
  const float clamp = draw.one_of({0.0F, 0.0F, 0.3F, 7.0F});
  if (may_clamp && clamp > 0.0F) config.clamp_limit = clamp;
  config.gate_up_layout = draw.one_of({GateUpLayout::halves, GateUpLayout::interleaved});
  config.gate_up_order = draw.one_of({GateUpOrder::gate_up, GateUpOrder::up_gate});
  config.apply_router_weight_on_input = draw.chance(0.25);
}

// `num_local` of the experts are local, under shuffled local ids.
std::vector<std::int32_t> shuffled_map(Draw& draw, std::int64_t num_experts,
                                       std::int64_t num_local) {
  std::vector<std::int32_t> map(static_cast<std::size_t>(num_experts), -1);
  std::iota(map.begin(), map.begin() + num_local, 0);
  for (std::size_t i = map.size(); i > 1; --i) {
    std::swap(map[i - 1],
              map[static_cast<std::size_t>(draw.in(0, static_cast<std::int64_t>(i) - 1))]);
  }
  return map;
}

void draw_map(RandomCase& drawn, Draw& draw) {
  const std::int64_t experts = drawn.config.num_experts;
  drawn.map_kind = draw.one_of({MapKind::none, MapKind::none, MapKind::none, MapKind::none,
                                MapKind::none, MapKind::none, MapKind::linear, MapKind::round_robin,
                                MapKind::uneven, MapKind::uneven});
  if (draw.chance(0.03)) drawn.map_kind = MapKind::empty;
  const auto size = static_cast<int>(draw.in(1, std::min<std::int64_t>(experts + 1, 6)));
  const auto rank = static_cast<int>(draw.in(0, size - 1));
  switch (drawn.map_kind) {
    case MapKind::none:
      break;
    case MapKind::linear:
      drawn.expert_map = ExpertMap::linear(rank, size);
      break;
    case MapKind::round_robin:
      drawn.expert_map = ExpertMap::round_robin(rank, size);
      break;
    case MapKind::uneven:
      drawn.expert_map = ExpertMap::explicit_map(shuffled_map(draw, experts, draw.in(1, experts)));
      break;
    case MapKind::empty:
      drawn.expert_map = ExpertMap::explicit_map(shuffled_map(draw, experts, 0));
      break;
  }
  const std::vector<std::int32_t> map = drawn.expert_map.resolve(experts);
  drawn.num_local = std::ranges::count_if(map, [](std::int32_t local) { return local >= 0; });
  if (draw.chance(0.2)) drawn.call_map = shuffled_map(draw, experts, drawn.num_local);
}

void draw_input(RandomCase& drawn, Draw& draw) {
  RandomInputOptions& input = drawn.input;
  input.ids_dtype = draw.one_of({DType::i32, DType::i64});
  input.topk_weights_dtype = draw.one_of({DType::f32, DType::f32, DType::f16, DType::bf16});
  if (draw.chance(0.3)) input.hidden_padding = draw.in(1, 40);
  if (draw.chance(0.3)) input.output_padding = draw.in(1, 40);
  if (draw.chance(0.3)) input.topk_padding = draw.in(1, 5);
  input.skip_share = draw.one_of({0.0, 0.0, 0.2, 0.7});
  if (draw.chance(0.02)) input.skip_share = 1.0;
  input.nan_skipped_weights = draw.chance(0.5);
  input.hot_share = draw.one_of({0.0, 0.0, 0.5, 1.0});
  input.repeated_ids = draw.chance(0.2);
  if (draw.chance(0.3)) drawn.hidden_offset = draw.in(1, 31);
  if (draw.chance(0.3)) drawn.output_offset = draw.in(1, 31);
}

CaseRun draw_run(const RandomCase& drawn, Draw& draw) {
  CaseRun run;
  run.threads = static_cast<int>(draw.in(1, 8));
  run.storage = static_cast<StorageKind>(draw.in(0, 4));
  run.workspace = static_cast<WorkspaceMode>(draw.in(0, 4));
  run.tokens_between = draw.in(1, std::max<std::int64_t>(1, drawn.input.num_tokens - 1));
  run.runner =
      draw.one_of({RunnerKind::none, RunnerKind::none, RunnerKind::fork_join, RunnerKind::gang});
  run.runner_threads = static_cast<int>(draw.in(1, 8));
  const DType output = drawn.config.output_dtype.value_or(drawn.config.dtype);
  run.in_place = draw.chance(0.25) && output == drawn.config.dtype;
  return run;
}

}  // namespace

RandomCase draw_case(std::uint64_t seed, const SizeLimits& limits,
                     std::span<const std::string> isas) {
  RandomCase drawn;
  drawn.seed = seed;
  Draw draw(seed);
  draw_formats(drawn, draw, limits);
  draw_sizes(drawn, draw, limits);
  draw_layer(drawn, draw);
  draw_weights(drawn, draw);
  draw_map(drawn, draw);
  draw_input(drawn, draw);
  for (CaseRun& run : drawn.runs) run = draw_run(drawn, draw);
  // The second run differs from the first in threads and in workspace, whatever was drawn.
  CaseRun& second = drawn.runs[1];
  if (second.threads == drawn.runs[0].threads) second.threads = second.threads % 8 + 1;
  if (second.workspace == drawn.runs[0].workspace) {
    second.workspace = static_cast<WorkspaceMode>((static_cast<int>(second.workspace) + 1) % 5);
  }
  if (!isas.empty()) {
    drawn.isa =
        isas[static_cast<std::size_t>(draw.in(0, static_cast<std::int64_t>(isas.size()) - 1))];
  }
  if (drawn.mode == ComputeMode::a8 && !supports_a8(drawn)) drawn.mode = ComputeMode::a16;
  return drawn;
}

}  // namespace fusedmoe::tool
