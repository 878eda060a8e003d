// Cases T0, NE and DM: no tokens, few tokens, odd numbers of experts, sizes off every grid.
#include "case_layer.h"

namespace fusedmoe::cases {
namespace {

TEST(Cases_T0, B001_NoTokensAndNullPointersThenThree) {
  const MoeConfig config{
      .hidden_size = 288, .intermediate_size = 45, .num_experts = 32, .top_k = 4};
  const Weights weights = Weights::random(config, 32);
  for (const std::string& isa : isas()) {
    const FusedMoe plan = FusedMoe::create(config, weights.view(), with_isa(isa));
    int runs = 0;
    const auto count = [](void* self, int n, void (*body)(void*, int), void* argument) {
      ++*static_cast<int*>(self);
      for (int i = 0; i < n; ++i) body(argument, i);
    };
    const ThreadRunner runner{count, &runs, 3, false};
    const ApplyContext context{.runner = &runner};
    const auto none = [](DType dtype, std::int64_t columns) {
      return MatrixView(nullptr, dtype, 0, columns);
    };
    plan.apply(none(DType::bf16, 288), none(DType::bf16, 288), none(DType::f32, 4),
               none(DType::i32, 4), {}, context);
    plan.apply(none(DType::bf16, 288), none(DType::bf16, 288), none(DType::f32, 4),
               none(DType::i32, 4), Workspace(nullptr, 0), context);
    EXPECT_EQ(runs, 0);

    Call call(config, 3);
    call.apply(plan, context);
    EXPECT_TRUE(is_right(config, weights.view(), call)) << isa;
    EXPECT_GT(runs, 0);
  }
}

// In bf16, a smaller layer: every number of tokens passes every switch between schedules, and a
// token's bits are the same in each.
TEST(Cases_T0, B003_EveryTokenCountTo40) {
  const MoeConfig config{
      .hidden_size = 521, .intermediate_size = 203, .num_experts = 16, .top_k = 4};
  const Weights weights = Weights::random(config, 16);
  for (const std::string& isa : isas()) {
    const FusedMoe plan = FusedMoe::create(config, weights.view(), with_isa(isa));
    Call whole(config, 40);
    whole.apply(plan);
    EXPECT_TRUE(is_right(config, weights.view(), whole)) << isa;
    for (std::int64_t m = 1; m < 40; ++m) {
      Call call(config, m);  // its tokens are the first m of the whole
      call.apply(plan);
      EXPECT_TRUE(std::equal(call.output.bytes().begin(), call.output.bytes().end(),
                             whole.output.bytes().begin()))
          << isa << ", " << m << " tokens";
    }
  }
}

TEST(Cases_NE, B012_TopKAboveExpertsIsRefused) {
  const MoeConfig config{.hidden_size = 24, .intermediate_size = 8, .num_experts = 8, .top_k = 9};
  const Weights weights = Weights::random(config, 8);
  const std::string message =
      refusal(ErrorCode::invalid_argument, [&] { FusedMoe::create(config, weights.view()); });
  EXPECT_TRUE(says(message, {"config.top_k", "num_experts = 8", "got 9"}));
  EXPECT_EQ(FusedMoe::supports(config, weights.view()).reason, message);
}

TEST(Cases_NE, B013_ThirtyAndTwoHundredFiftySevenExperts) {
  for (const std::int64_t experts : {30, 257}) {
    const MoeConfig config{
        .hidden_size = 256, .intermediate_size = 128, .num_experts = experts, .top_k = 6};
    const Weights weights = Weights::random(config, experts);
    const FusedMoe plan = FusedMoe::create(config, weights.view(), with_isa("", 2));
    Call call(config, 7);
    for (const DType ids : {DType::i32, DType::i64}) {
      Matrix other(ids, 7, 6);
      other.fill([&](std::int64_t t, std::int64_t k) {  // the first, the last, and some between
        return k == 0   ? 0.0
               : k == 1 ? static_cast<double>(experts - 1)
                        : static_cast<double>(1 + (t * 5 + k * 4) % (experts - 2));
      });
      call.topk_ids = other;
      call.apply(plan);
      EXPECT_TRUE(is_right(config, weights.view(), call)) << experts << " " << to_string(ids);
    }
  }
}

TEST(Cases_DM, B016_EveryChannelOfEveryWidth) {
  for (const std::int64_t inter : {704, 768, 896, 1408, 1856}) {
    const MoeConfig config{
        .hidden_size = 512, .intermediate_size = inter, .num_experts = 4, .top_k = 2};
    const Weights weights(
        config, 4, [](auto...) { return 0.01; }, [](auto...) { return 0.01; });
    for (const std::string& isa : isas()) {
      const FusedMoe plan = FusedMoe::create(config, weights.view(), with_isa(isa));
      Call call(config, 2);
      call.hidden.fill([](auto...) { return 0.5; });
      call.apply(plan);
      EXPECT_TRUE(is_right(config, weights.view(), call)) << inter << " " << isa;
      for (std::int64_t h = 1; h < 512; ++h) {  // all channels alike, in bits
        ASSERT_EQ(call.output.get(1, h), call.output.get(1, 0)) << inter << " " << isa;
      }
    }
  }
}

// The sizes of a model, unquantised, with fewer experts.
void expect_right_at(const MoeConfig& config, std::initializer_list<std::int64_t> token_counts) {
  const Weights weights = Weights::random(config, config.num_experts);
  const FusedMoe plan = FusedMoe::create(config, weights.view(), with_isa("", 2));
  for (const std::int64_t m : token_counts) {
    Call call(config, m);
    call.apply(plan);
    EXPECT_TRUE(is_right(config, weights.view(), call)) << m << " tokens";
  }
}

TEST(Cases_DM, B017_Intermediate704NeedsNoPad) {
  expect_right_at({.hidden_size = 2816,
                   .intermediate_size = 704,
                   .num_experts = 3,
                   .top_k = 2,
                   .activation = {Activation::gelu_tanh}},
                  {33});
}

TEST(Cases_DM, B018_Hidden2880Intermediate2880) {
  expect_right_at({.hidden_size = 2880,
                   .intermediate_size = 2880,
                   .num_experts = 1,
                   .top_k = 1,
                   .activation = {Activation::swigluoai},
                   .gate_up_layout = GateUpLayout::interleaved},
                  {1, 17});
}

TEST(Cases_DM, B019_Intermediate232WithoutAGate) {
  expect_right_at({.hidden_size = 2688,
                   .intermediate_size = 232,
                   .num_experts = 16,
                   .top_k = 6,
                   .activation = {Activation::relu2}},
                  {5});
}

}  // namespace
}  // namespace fusedmoe::cases
