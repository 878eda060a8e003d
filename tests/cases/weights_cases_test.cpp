// Cases F8, MX and IQ as far as they stand today (a format that is not built is refused by name),
// CK in API form (a layout is what the flag says), and LD: what a packed layer costs in memory.
#include <fstream>
#include <memory>

#include "case_layer.h"

namespace fusedmoe::cases {
namespace {

const MoeConfig kConfig{.hidden_size = 64, .intermediate_size = 32, .num_experts = 4, .top_k = 2};

TEST(Cases_F8, B045_ScalesOfUnquantisedWeightsAreRefused) {
  const Weights weights = Weights::random(kConfig, 4);
  const float scale = 1;
  ExpertWeights with_data = weights.view();
  with_data.w13.scales.data = &scale;
  ExpertWeights with_layout = weights.view();
  with_layout.w2.scales.layout = ScaleLayout::channel;
  EXPECT_TRUE(
      says(refusal(ErrorCode::invalid_argument, [&] { FusedMoe::create(kConfig, with_data); }),
           {"weights.w13.scales", "none for bf16"}));
  EXPECT_TRUE(
      says(refusal(ErrorCode::invalid_argument, [&] { FusedMoe::create(kConfig, with_layout); }),
           {"weights.w2.scales", "none for bf16"}));
}

// Shapes that say nothing about the layout: w13 is square when H = 2I, w2 when H = I.
TEST(Cases_CK, B161_LayoutIsTheFlagNeverTheShape) {
  for (const std::int64_t inter : {32, 64}) {
    MoeConfig config = kConfig;
    config.intermediate_size = inter;
    config.dtype = DType::f32;
    const bool square13 = 2 * inter == 64;
    for (const WeightLayout layout13 : {WeightLayout::nk, WeightLayout::kn}) {
      for (const WeightLayout layout2 : {WeightLayout::nk, WeightLayout::kn}) {
        const Weights weights = Weights::random(config, 4, {WeightFormat::f32, layout13, layout2});
        Call call(config, 5);
        call.apply(FusedMoe::create(config, weights.view(), with_isa("")));
        EXPECT_TRUE(is_right(config, weights.view(), call));
        const auto bytes = call.output.bytes();
        // The same bytes under the other flag: what that flag says, not what it was before.
        ExpertWeights other = weights.view();
        WeightTensor& tensor = square13 ? other.w13 : other.w2;
        tensor.layout = tensor.layout == WeightLayout::nk ? WeightLayout::kn : WeightLayout::nk;
        call.apply(FusedMoe::create(config, other, with_isa("")));
        EXPECT_TRUE(is_right(config, other, call));
        EXPECT_NE(call.output.bytes(), bytes);
      }
    }
  }
}

// A source yields one expert at a time: in order, once, and never two alive.
struct CountingSource {
  const ExpertWeights& whole;
  std::int64_t called = 0;
  std::int64_t alive = 0;
  std::int64_t most_alive = 0;
  std::vector<std::byte> w13 = {};
  std::vector<std::byte> w2 = {};

  ExpertWeights give(std::int64_t expert) {
    EXPECT_EQ(expert, called++);
    const auto copy = [&](const WeightTensor& tensor, std::vector<std::byte>& to) {
      std::vector<std::byte>().swap(to);  // what was given before ends here
      const std::int64_t bytes = tensor.outputs * tensor.inputs * 2;
      to.resize(bytes);
      std::memcpy(to.data(), static_cast<const std::byte*>(tensor.data) + expert * bytes, bytes);
      WeightTensor one = tensor;
      one.data = to.data();
      one.experts = 1;
      return one;
    };
    ExpertWeights result;
    result.w13 = copy(whole.w13, w13);
    result.w2 = copy(whole.w2, w2);
    return result;
  }
};

// Peak resident bytes since the last reset; 0 where the system does not say.
std::int64_t peak_bytes(bool reset) {
#if defined(FUSEDMOE_TEST_ADDRESS_SANITIZER) || defined(FUSEDMOE_TEST_THREAD_SANITIZER)
  return 0;
#else
  if (reset) {
    std::ofstream clear("/proc/self/clear_refs");
    clear << "5" << std::flush;
    if (!clear) return 0;
  }
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return 1024 * std::stoll(line.substr(6));
  }
  return 0;
#endif
}

TEST(Cases_LD, B136_PackingPeaksAtPackedPlusOneExpert) {
  const MoeConfig config{
      .hidden_size = 520, .intermediate_size = 136, .num_experts = 96, .top_k = 2};
  const Weights weights = Weights::random(config, 96);
  ExpertWeights given = weights.view();
  CountingSource source{weights.view()};
  given.w13.data = nullptr;
  given.w2.data = nullptr;
  given.source = [&source](std::int64_t expert) { return source.give(expert); };
  const std::int64_t before = peak_bytes(true);
  const FusedMoe plan = FusedMoe::create(config, given, with_isa("", 2));
  const std::int64_t after = peak_bytes(false);
  EXPECT_EQ(source.called, 96);
  if (before > 0) {
    const std::int64_t expert = 3 * 520 * 136 * 2;
    EXPECT_LE(after - before, plan.weight_bytes() + 2 * expert + (2 << 20));
  }
  Call call(config, 6);
  call.apply(plan);
  EXPECT_TRUE(is_right(config, weights.view(), call));
}

// H, I, experts and formats of models: packed weights stay within a tenth of what came.
TEST(Cases_LD, B138_PackedBytesAreNearTheSources) {
  struct Model {
    std::int64_t hidden, inter, experts;
    Activation kind = Activation::silu;
    bool bias = false;
  };
  for (const Model& m : {Model{4096, 14336, 8}, Model{2048, 768, 128}, Model{7168, 2048, 256},
                         Model{2880, 2880, 32, Activation::swigluoai, true}, Model{2048, 1408, 60},
                         Model{2816, 704, 128, Activation::gelu_tanh},
                         Model{2688, 1856, 128, Activation::relu2}, Model{1536, 512, 40}}) {
    for (const WeightFormat format : kFormats) {
      const MoeConfig config{.hidden_size = m.hidden,
                             .intermediate_size = m.inter,
                             .num_experts = m.experts,
                             .top_k = 1,
                             .activation = {m.kind}};
      const std::int64_t parts = is_gated(m.kind) ? 2 : 1;
      ExpertWeights weights;  // shapes alone: sizes never need data
      weights.source = [](std::int64_t) { return ExpertWeights{}; };
      weights.w13 = {
          .format = format, .experts = m.experts, .outputs = parts * m.inter, .inputs = m.hidden};
      weights.w2 = {.format = format, .experts = m.experts, .outputs = m.hidden, .inputs = m.inter};
      std::int64_t came = format_info(format).bytes(m.experts * (parts + 1) * m.inter * m.hidden);
      if (m.bias) {
        weights.w13_bias = {nullptr, DType::bf16, m.experts, parts * m.inter};
        weights.w2_bias = {nullptr, DType::bf16, m.experts, m.hidden};
        came += m.experts * (parts * m.inter + m.hidden) * 2;
      }
      const std::int64_t packed = FusedMoe::packed_weights_size(config, weights).bytes;
      EXPECT_LE(static_cast<double>(packed), 1.1 * static_cast<double>(came)) << m.hidden;
      EXPECT_GE(packed, came) << m.hidden;
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cases
