// A user's program: a tiny bf16 layer with known values. Gate rows give 1 and up rows give 2, so
// that expert 0 yields silu(1) * 2 = 1.46212 and expert 1, with w2 twice as large, 2.92423.
#include <fusedmoe/fusedmoe.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  constexpr int kHidden = 32;
  constexpr int kIntermediate = 16;
  constexpr int kExperts = 2;
  constexpr int kTokens = 2;
  using Bf16 = std::uint16_t;  // 0x3F80 = 1, 0x3D00 = 1 / 32, 0x3D80 = 1 / 16, 0x3E00 = 1 / 8
  std::vector<Bf16> w13;
  std::vector<Bf16> w2;
  for (int expert = 0; expert < kExperts; ++expert) {
    w13.insert(w13.end(), kIntermediate * kHidden, 0x3D00);  // gate
    w13.insert(w13.end(), kIntermediate * kHidden, 0x3D80);  // up
    w2.insert(w2.end(), kHidden * kIntermediate, expert == 0 ? 0x3D80 : 0x3E00);
  }
  const std::vector<Bf16> hidden(kTokens * kHidden, 0x3F80);
  const std::vector<float> topk_weights(kTokens, 1.0F);
  const std::vector<std::int32_t> topk_ids = {0, 1};
  std::vector<Bf16> output(kTokens * kHidden, 0xFFFF);

  using namespace fusedmoe;
  MoeConfig config;
  config.hidden_size = kHidden;
  config.intermediate_size = kIntermediate;
  config.num_experts = kExperts;
  config.top_k = 1;
  ExpertWeights weights;
  weights.w13.data = w13.data();
  weights.w13.experts = kExperts;
  weights.w13.outputs = 2 * kIntermediate;
  weights.w13.inputs = kHidden;
  weights.w2.data = w2.data();
  weights.w2.experts = kExperts;
  weights.w2.outputs = kHidden;
  weights.w2.inputs = kIntermediate;
  try {
    const FusedMoe moe = FusedMoe::create(config, weights);
    const WorkspaceBuffer workspace(Device::cpu(), moe.workspace_size(kTokens));
    moe.apply({output.data(), DType::bf16, kTokens, kHidden},
              {hidden.data(), DType::bf16, kTokens, kHidden},
              {topk_weights.data(), DType::f32, kTokens, 1},
              {topk_ids.data(), DType::i32, kTokens, 1}, workspace);
  } catch (const Error& error) {
    std::fprintf(stderr, "consumer: %s: %s\n", to_string(error.code()), error.what());
    return 1;
  }
  for (int i = 0; i < kTokens * kHidden; ++i) {
    const float got = std::bit_cast<float>(std::uint32_t{output[i]} << 16);
    const float expected = i < kHidden ? 1.46212F : 2.92423F;
    if (!(std::fabs(got - expected) < 0.01F * expected)) {
      std::fprintf(stderr, "consumer: output[%d]: expected %g, got %g\n", i, expected, got);
      return 1;
    }
  }
  std::printf("consumer: fusedmoe %s, values as expected\n", version());
  return 0;
}
