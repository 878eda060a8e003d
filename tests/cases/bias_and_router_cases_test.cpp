// Cases BI and RW: biases of the experts, and where the router's weight enters.
#include "case_layer.h"

namespace fusedmoe::cases {
namespace {

// Ranks that hold a quarter of the channels each: strided views into the same tensors.
ExpertWeights shard(const ExpertWeights& whole, std::int64_t inter, std::int64_t rank,
                    std::int64_t ranks) {
  const std::int64_t part = inter / ranks;
  const std::int64_t hidden = whole.w13.inputs;
  const auto at = [](const WeightTensor& tensor, std::int64_t elements) {
    return static_cast<const std::byte*>(tensor.data) + 2 * elements;  // bf16
  };
  ExpertWeights result = whole;
  result.w13.data = at(whole.w13, rank * part * hidden);
  result.w13.outputs = part;
  result.w13.expert_stride = 2 * inter * hidden;
  result.w13_up = result.w13;
  result.w13_up.data = at(whole.w13, (inter + rank * part) * hidden);
  result.w2.data = at(whole.w2, rank * part);
  result.w2.inputs = part;
  result.w2.row_stride = inter;
  if (rank != 0) result.w2_bias = {};  // the bias belongs to one rank
  return result;
}

TEST(Cases_BI, B064_DownBiasOfTensorParallelRanksIsAddedOnce) {
  const MoeConfig config{.hidden_size = 20,
                         .intermediate_size = 24,
                         .num_experts = 4,
                         .top_k = 2,
                         .output_dtype = DType::f32};
  MoeConfig of_rank = config;
  of_rank.intermediate_size = 6;
  for (const bool zero : {true, false}) {
    Weights weights = zero
                          ? Weights(
                                config, 4, [](auto...) { return 0.0; }, [](auto...) { return 0.0; })
                          : Weights::random(config, 4);
    weights.set_w2_bias(DType::f32, [](auto...) { return 1.0; });
    Call call(config, 9);
    call.topk_weights.fill([](auto...) { return 0.5; });
    std::vector<double> sum(9 * 20, 0.0);
    for (std::int64_t rank = 0; rank < 4; ++rank) {
      call.apply(FusedMoe::create(of_rank, shard(weights.view(), 24, rank, 4), with_isa("", 2)));
      for (std::int64_t i = 0; i < 9 * 20; ++i) sum[i] += call.output.get(i / 20, i % 20);
    }
    if (zero) {
      for (const double value : sum) ASSERT_EQ(value, 1.0);  // 4 is the fault
      continue;
    }
    call.output.fill([&](std::int64_t t, std::int64_t h) { return sum[t * 20 + h]; });
    EXPECT_TRUE(is_right(config, weights.view(), call));
  }
}

TEST(Cases_BI, B065_DownBiasIsWeighted) {
  const MoeConfig config{.hidden_size = 35, .intermediate_size = 9, .num_experts = 4, .top_k = 4};
  Weights weights(
      config, 4, [](auto...) { return 0.0; }, [](auto...) { return 0.0; });
  weights.set_w13_bias(DType::f32, [](auto...) { return 0.0; });
  weights.set_w2_bias(DType::f32, [](auto...) { return 1.0; });
  for (const std::string& isa : isas()) {
    Call call(config, 3);
    call.topk_weights.fill([](auto...) { return 0.25; });
    call.apply(FusedMoe::create(config, weights.view(), with_isa(isa)));
    for (std::int64_t t = 0; t < 3; ++t) {
      for (std::int64_t h = 0; h < 35; ++h) ASSERT_EQ(call.output.get(t, h), 1.0);
    }
  }
}

TEST(Cases_BI, B066_BiasesOfEveryDtypeAreNeverDropped) {
  for (const WeightFormat format : kFormats) {
    for (const DType bias_dtype : kDtypes) {
      for (const GateUpLayout layout : {GateUpLayout::halves, GateUpLayout::interleaved}) {
        const MoeConfig config{.hidden_size = 45,
                               .intermediate_size = 35,
                               .num_experts = 3,
                               .top_k = 2,
                               .dtype = DType::f32,
                               .gate_up_layout = layout};
        std::vector<std::vector<std::byte>> results;
        for (int which = 0; which < 4; ++which) {
          Weights weights = Weights::random(config, 3, {format, {}, WeightLayout::kn});
          if ((which & 1) != 0) {
            weights.set_w13_bias(bias_dtype, [](std::int64_t e, int part, std::int64_t i) {
              return noise(e, part + 3, i);
            });
          }
          if ((which & 2) != 0) {
            weights.set_w2_bias(bias_dtype,
                                [](std::int64_t e, std::int64_t h) { return noise(e, 9, h); });
          }
          for (const WeightStorage storage : {WeightStorage::own, WeightStorage::borrowed}) {
            PlanOptions options = with_isa("");
            options.weight_storage = storage;
            Call call(config, 5);
            call.apply(FusedMoe::create(config, weights.view(), options));
            EXPECT_TRUE(is_right(config, weights.view(), call))
                << to_string(format) << ", biases " << which << " of " << to_string(bias_dtype);
            if (storage == WeightStorage::own) results.push_back(call.output.bytes());
          }
        }
        for (std::size_t a = 0; a < 4; ++a) {
          for (std::size_t b = 0; b < a; ++b) EXPECT_NE(results[a], results[b]);
        }
      }
    }
  }
}

TEST(Cases_RW, B069_RouterWeightOnTheInputIsAppliedOnce) {
  MoeConfig config{.hidden_size = 32,
                   .intermediate_size = 16,
                   .num_experts = 2,
                   .top_k = 1,
                   .activation = {Activation::relu2},
                   .dtype = DType::f32,
                   .apply_router_weight_on_input = true};
  const Weights weights = Weights::random(config, 2);
  for (const std::string& isa : isas()) {
    const auto run = [&](bool on_input, double x, double router) {
      MoeConfig other = config;
      other.apply_router_weight_on_input = on_input;
      Call call(other, 1);
      call.set_ids({{1}});
      call.hidden.fill([x](auto...) { return x; });
      call.topk_weights.fill([router](auto...) { return router; });
      call.apply(FusedMoe::create(other, weights.view(), with_isa(isa)));
      EXPECT_TRUE(is_right(other, weights.view(), call)) << isa;
      return call;
    };
    const Call once = run(true, 2, 0.5);
    const Call halved = run(false, 1, 1);                   // f(0.5 x)
    const Call on_output = run(false, 2, 0.5);              // 0.5 f(x)
    const Call twice = run(false, 1, 0.5);                  // 0.5 f(0.5 x)
    EXPECT_EQ(once.output.bytes(), halved.output.bytes());  // powers of two: exact
    EXPECT_NE(once.output.bytes(), on_output.output.bytes());
    EXPECT_NE(once.output.bytes(), twice.output.bytes());
  }
}

// The weight multiplies gemm1's fp32 result before the bias: the bias itself stays as it is.
TEST(Cases_RW, B069_TheBiasIsNotWeighted) {
  MoeConfig config{.hidden_size = 7,
                   .intermediate_size = 5,
                   .num_experts = 3,
                   .top_k = 2,
                   .dtype = DType::f32,
                   .apply_router_weight_on_input = true};
  Weights weights(
      config, 3, [](auto...) { return 0.0; }, [](auto...) { return 1.0; });
  weights.set_w13_bias(DType::f32,
                       [](std::int64_t, int part, std::int64_t) { return part == 0 ? 1.0 : 2.0; });
  Call call(config, 2);
  call.topk_weights.fill([](auto...) { return 0.125; });
  call.apply(FusedMoe::create(config, weights.view(), with_isa("", 1)));
  for (std::int64_t h = 0; h < 7; ++h) {  // two experts, five channels of silu(1) * 2 each
    ASSERT_NEAR(call.output.get(1, h), 2 * 5 * 1.4621172, 1e-4);
  }
}

}  // namespace
}  // namespace fusedmoe::cases
