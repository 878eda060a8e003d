// What an engine does with a stack of MoE layers: one workspace for all of them, steps with any
// number of tokens, and a weight update between two steps. Checks itself: the shared workspace
// gives the same bits as scratch that every call allocates. The C twin is decode_step.c.
#include <bit>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "fusedmoe/fusedmoe.h"

using fusedmoe::DType;

namespace {

constexpr std::int64_t kLayers = 4;
constexpr std::int64_t kHidden = 256;
constexpr std::int64_t kIntermediate = 96;
constexpr std::int64_t kExperts = 8;
constexpr std::int64_t kTopK = 2;
constexpr std::int64_t kMaxTokens = 16;

using Bf16 = std::uint16_t;  // the upper half of a float

std::vector<float> random_values(std::size_t count, float scale) {
  static std::uint32_t state = 1;
  std::vector<float> values(count);
  for (float& value : values) {
    state = state * 1664525U + 1013904223U;
    value = scale * (static_cast<float>(state >> 8) / 8388608.0F - 1.0F);
  }
  return values;
}

std::vector<Bf16> random_bf16(std::size_t count, float scale) {
  std::vector<Bf16> values;
  for (const float value : random_values(count, scale)) {
    values.push_back(static_cast<Bf16>(std::bit_cast<std::uint32_t>(value) >> 16));
  }
  return values;
}

struct Layer {
  std::vector<Bf16> w13 = random_bf16(kExperts * 2 * kIntermediate * kHidden, 0.2F);
  std::vector<Bf16> w2 = random_bf16(kExperts * kHidden * kIntermediate, 0.2F);

  fusedmoe::ExpertWeights weights() const {
    fusedmoe::ExpertWeights views;
    views.w13.data = w13.data();  // bf16, [experts, 2 * intermediate_size, hidden_size]
    views.w13.experts = kExperts;
    views.w13.outputs = 2 * kIntermediate;
    views.w13.inputs = kHidden;
    views.w2.data = w2.data();  // bf16, [experts, hidden_size, intermediate_size]
    views.w2.experts = kExperts;
    views.w2.outputs = kHidden;
    views.w2.inputs = kIntermediate;
    return views;
  }
};

// One step: every layer routes the tokens and applies its experts in place. num_tokens rows.
void step(const std::vector<fusedmoe::FusedMoe>& plans, std::vector<Bf16>& hidden,
          std::int64_t num_tokens, const std::vector<float>& logits,
          const fusedmoe::Workspace& workspace) {
  std::vector<float> topk_weights(num_tokens * kTopK);
  std::vector<std::int32_t> topk_ids(num_tokens * kTopK);
  const fusedmoe::MatrixView rows(hidden.data(), DType::bf16, num_tokens, kHidden);
  const fusedmoe::MatrixView weights(topk_weights.data(), DType::f32, num_tokens, kTopK);
  const fusedmoe::MatrixView ids(topk_ids.data(), DType::i32, num_tokens, kTopK);
  fusedmoe::RoutingConfig routing;
  routing.top_k = kTopK;
  routing.renormalise = fusedmoe::Renormalise::sum;
  for (std::size_t layer = 0; layer < plans.size(); ++layer) {
    // A model's own router would compute these from hidden.
    const float* layer_logits = logits.data() + layer * kMaxTokens * kExperts;
    topk_softmax(routing, {layer_logits, DType::f32, num_tokens, kExperts}, weights, ids);
    plans[layer].apply(rows, rows, weights, ids, workspace);
  }
}

int run() {
  fusedmoe::MoeConfig config;
  config.hidden_size = kHidden;
  config.intermediate_size = kIntermediate;
  config.num_experts = kExperts;
  config.top_k = kTopK;
  std::vector<Layer> layers(kLayers);
  std::vector<fusedmoe::FusedMoe> plans;
  plans.reserve(layers.size());
  for (const Layer& layer : layers) {
    plans.push_back(fusedmoe::FusedMoe::create(config, layer.weights()));
  }
  // Sized once for the largest step; from lock() on, growth would be an error.
  fusedmoe::WorkspaceBuffer workspace(fusedmoe::Device::cpu(),
                                      plans.front().workspace_size(kMaxTokens));
  workspace.lock();

  int number = 0;
  for (const std::int64_t num_tokens : {16, 1, 1, 5, 0, 1}) {  // a prompt, then decoding
    if (number == 3) {  // new weights for one layer, packed over the old ones
      layers[2].w2 = random_bf16(layers[2].w2.size(), 0.2F);
      plans[2].refresh(layers[2].weights());
    }
    std::vector<Bf16> shared = random_bf16(num_tokens * kHidden, 1.0F);
    std::vector<Bf16> allocated = shared;
    const std::vector<float> logits = random_values(kLayers * kMaxTokens * kExperts, 4.0F);
    step(plans, shared, num_tokens, logits, workspace);
    step(plans, allocated, num_tokens, logits, {});  // no workspace: each call allocates
    const bool same = shared == allocated;
    std::printf("step %d: %2d tokens through %d layers, %s\n", number, static_cast<int>(num_tokens),
                static_cast<int>(kLayers), same ? "bits equal to per-call scratch" : "BITS DIFFER");
    if (!same) return 1;
    ++number;
  }
  std::printf("one workspace of %lld bytes for %d layers; layer 2 has weights version %llu\n",
              static_cast<long long>(workspace.bytes()), static_cast<int>(kLayers),
              static_cast<unsigned long long>(plans[2].weights_version()));
  return 0;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const fusedmoe::Error& error) {
    std::fprintf(stderr, "decode_step: %s: %s\n", to_string(error.code()), error.what());
    return 1;
  }
}
