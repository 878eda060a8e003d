// Cases GU and AC: order and layout of gate and up, kinds of activations and their parameters.
#include "case_layer.h"

namespace fusedmoe::cases {
namespace {

// A layer in which every gate projection gives `gate` and every up projection `up`, and w2 passes
// each activated channel through: the output is the activation's value, in fp32.
std::vector<double> activated(MoeConfig config, double gate, double up, const std::string& isa,
                              const WeightsOptions& options = {.format = WeightFormat::f32}) {
  config.hidden_size = 33;
  config.intermediate_size = 33;
  config.num_experts = 2;
  config.top_k = 1;
  const Weights weights(
      config, 2,
      [&](std::int64_t, int part, std::int64_t, std::int64_t k) {
        return k != 5 ? 0.0 : part == 0 ? gate : up;
      },
      [](std::int64_t, std::int64_t h, std::int64_t i) { return h == i ? 1.0 : 0.0; }, options);
  const FusedMoe plan = FusedMoe::create(config, weights.view(), with_isa(isa, 1));
  Call call(config, 3);
  call.hidden.fill([](auto...) { return 1.0; });
  call.topk_weights.fill([](auto...) { return 1.0; });
  call.apply(plan);
  std::vector<double> values;
  for (std::int64_t t = 0; t < 3; ++t) {
    for (std::int64_t h = 0; h < 33; ++h) values.push_back(call.output.get(t, h));
  }
  return values;
}

void expect_all_near(const std::vector<double>& values, double expected, double tolerance) {
  for (const double value : values) ASSERT_NEAR(value, expected, tolerance);
}

MoeConfig f32_config(const ActivationConfig& activation) {
  MoeConfig config{.activation = activation, .dtype = DType::f32};
  return config;
}

// silu(1) * 2 = 1.46212; silu(2) * 1 = 1.76159 would be a swap.
TEST(Cases_GU, B054_BothLayoutsInEveryFormat) {
  for (const std::string& isa : isas()) {
    for (const WeightFormat format : kFormats) {
      for (const DType dtype : kDtypes) {
        for (const GateUpLayout layout : {GateUpLayout::halves, GateUpLayout::interleaved}) {
          for (const WeightLayout order : {WeightLayout::nk, WeightLayout::kn}) {
            const MoeConfig config{.dtype = dtype, .gate_up_layout = layout};
            const double tolerance = dtype == DType::f32 ? 1e-5 : dtype == DType::f16 ? 2e-3 : 0.01;
            expect_all_near(activated(config, 1, 2, isa, {format, order, order}), 1.46212,
                            tolerance);
          }
        }
      }
    }
  }
}

TEST(Cases_GU, B055_BothOrders) {
  for (const std::string& isa : isas()) {
    for (const GateUpLayout layout : {GateUpLayout::halves, GateUpLayout::interleaved}) {
      for (const GateUpOrder order : {GateUpOrder::gate_up, GateUpOrder::up_gate}) {
        MoeConfig config = f32_config({Activation::silu});
        config.gate_up_layout = layout;
        config.gate_up_order = order;
        expect_all_near(activated(config, 1, 2, isa), 1.46212, 1e-5);
      }
    }
  }
  // The same bytes under the other order are the swapped layer: the flag decides, nothing else.
  MoeConfig swapped{.hidden_size = 32,
                    .intermediate_size = 16,
                    .num_experts = 2,
                    .top_k = 1,
                    .dtype = DType::f32};
  const Weights weights(
      swapped, 2, [](std::int64_t, int part, std::int64_t, std::int64_t) { return part + 1.0; },
      [](std::int64_t, std::int64_t h, std::int64_t i) { return h == i ? 1.0 : 0.0; });
  swapped.gate_up_order = GateUpOrder::up_gate;
  Call call(swapped, 1);
  call.hidden.fill([](std::int64_t, std::int64_t h) { return h == 0 ? 1.0 : 0.0; });
  call.topk_weights.fill([](auto...) { return 1.0; });
  call.apply(FusedMoe::create(swapped, weights.view(), with_isa("", 1)));
  EXPECT_NEAR(call.output.get(0, 0), 1.76159, 1e-5);
}

TEST(Cases_AC, B058_TheClampReachesTheKernel) {
  for (const std::string& isa : isas()) {
    MoeConfig config = f32_config({Activation::silu});
    expect_all_near(activated(config, 20, -20, isa), -400, 1e-3);
    config.clamp_limit = 10.0F;
    expect_all_near(activated(config, 20, -20, isa), -99.9955, 1e-3);
    // No lower clamp on the gate: silu(-20) * 3, where silu(-10) * 3 would be -1.36e-3.
    expect_all_near(activated(config, -20, 3, isa), -20 / (1 + std::exp(20.0)) * 3, 1e-12);
  }
}

TEST(Cases_AC, B059_ConstantsOfOneModelDoNotLeak) {
  for (const std::string& isa : isas()) {
    expect_all_near(
        activated(f32_config({.kind = Activation::swigluoai, .alpha = 1.702F, .limit = 7.0F}), 8,
                  -9, isa),
        -41.99972, 1e-4);
    expect_all_near(activated(f32_config({Activation::silu}), 1, 1, isa), 0.731059, 1e-6);
    // Other parameters than the defaults: (u + 1) g sigmoid(alpha g), g <= 2, |u| <= 2.
    expect_all_near(
        activated(f32_config({.kind = Activation::swigluoai, .alpha = 0.5F, .limit = 2.0F}), 3, 5,
                  isa),
        3 * 2 / (1 + std::exp(-1.0)), 1e-5);
    expect_all_near(
        activated(f32_config({.kind = Activation::swiglustep, .limit = 1.5F}), 3, -5, isa),
        1.5 * -1.5, 1e-5);
    expect_all_near(
        activated(f32_config({.kind = Activation::situ, .beta = 2.0F, .linear_beta = 3.0F}), 1.5,
                  -4, isa),
        2 * std::tanh(0.75) / (1 + std::exp(-1.5)) * (3 * std::tanh(-4 / 3.0)), 1e-5);
  }
}

TEST(Cases_AC, B060_SquaredReluHasNoGate) {
  const MoeConfig config{.hidden_size = 64,
                         .intermediate_size = 48,
                         .num_experts = 4,
                         .top_k = 2,
                         .activation = {Activation::relu2}};
  // Even channels project to -3, odd ones to 2; w2 passes channel i to column i.
  const Weights weights(
      config, 4,
      [](std::int64_t, int, std::int64_t i, std::int64_t k) {
        return k != 0 ? 0.0 : i % 2 == 0 ? -3.0 : 2.0;
      },
      [](std::int64_t, std::int64_t h, std::int64_t i) { return h == i ? 1.0 : 0.0; });
  ASSERT_EQ(weights.view().w13.outputs, 48);
  for (const std::string& isa : isas()) {
    Call call(config, 5);
    call.hidden.fill([](auto...) { return 1.0; });
    call.topk_weights.fill([](auto...) { return 0.5; });
    call.apply(FusedMoe::create(config, weights.view(), with_isa(isa)));
    for (std::int64_t t = 0; t < 5; ++t) {
      for (std::int64_t h = 0; h < 64; ++h) {
        ASSERT_EQ(call.output.get(t, h), h < 48 && h % 2 == 1 ? 4.0 : 0.0);
      }
    }
  }
  // Twice the rows would be a gate: refused with both shapes.
  ExpertWeights wide = weights.view();
  wide.w13.outputs = 96;
  EXPECT_TRUE(says(refusal(ErrorCode::invalid_argument, [&] { FusedMoe::create(config, wide); }),
                   {"weights.w13", "[4, 48, 64]", "[4, 96, 64]"}));
}

// The activation is applied before anything is kept, so that both kinds keep I values per row: the
// non-gated one must not ask for more, and neither may write behind its workspace.
TEST(Cases_AC, B061_WorkspaceOfANonGatedLayerIsEnough) {
  std::int64_t gated_bytes = 0;
  for (const Activation kind : {Activation::silu, Activation::relu2}) {
    const MoeConfig config{.hidden_size = 72,
                           .intermediate_size = 200,
                           .num_experts = 8,
                           .top_k = 3,
                           .activation = {kind}};
    const Weights weights = Weights::random(config, 8);
    for (const std::string& isa : isas()) {
      const FusedMoe plan = FusedMoe::create(config, weights.view(), with_isa(isa, 3));
      const std::int64_t bytes = plan.workspace_size(65).bytes;
      if (kind == Activation::silu) gated_bytes = bytes;
      EXPECT_LE(bytes, gated_bytes);
      Call call(config, 65);
      Scratch scratch({bytes, plan.workspace_size(65).alignment});
      call.apply(plan, scratch);
      EXPECT_TRUE(scratch.behind_is_untouched());
      EXPECT_TRUE(is_right(config, weights.view(), call)) << to_string(kind) << " " << isa;
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cases
