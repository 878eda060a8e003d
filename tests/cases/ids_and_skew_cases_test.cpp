// Cases ID, DU, SK and NN: skipped slots, the same id twice, experts without tokens, all tokens on
// one expert, dirty buffers.
#include "case_layer.h"
#include "fusedmoe/routing.h"

namespace fusedmoe::cases {
namespace {

TEST(Cases_ID, B022_SkippedSlotsContributeNothing) {
  const MoeConfig config{.hidden_size = 128, .intermediate_size = 64, .num_experts = 4, .top_k = 2};
  const Weights weights = Weights::random(config, 4);
  for (const std::string& isa : isas()) {
    const FusedMoe plan = FusedMoe::create(config, weights.view(), with_isa(isa));
    Call call(config, 4);
    call.set_ids({{0, 1}, {-1, -1}, {2, -1}, {3, 1}});
    call.topk_weights.fill([](auto...) { return 0.5; });
    // A skipped slot's weight is not even read as a number.
    call.topk_weights.set(1, 0, std::nan(""));
    call.topk_weights.set(2, 1, std::nan(""));
    call.apply(plan);
    for (std::int64_t h = 0; h < 128; ++h) ASSERT_EQ(call.output.get(1, h), 0.0);
    EXPECT_TRUE(is_right(config, weights.view(), call)) << isa;

    Call alone(config, 3);  // token 2 through its one expert
    alone.set_ids({{-1, -1}, {-1, -1}, {-1, 2}});
    alone.topk_weights.fill([](auto...) { return 0.5; });
    alone.apply(plan);
    for (std::int64_t h = 0; h < 128; ++h) {
      ASSERT_EQ(call.output.get(2, h), alone.output.get(2, h));
    }
  }
}

TEST(Cases_DU, B026_ARepeatedExpertCountsEachTime) {
  const MoeConfig config{
      .hidden_size = 256, .intermediate_size = 128, .num_experts = 144, .top_k = 6};
  // Whatever is not chosen is NaN: it must not be read into a result.
  const auto chosen = [](std::int64_t e) { return e == 1 || e == 2 || e == 6 || e == 9; };
  Weights weights = Weights::random(config, 144);
  for (auto* bytes : {&weights.w13_bytes(), &weights.w2_bytes()}) {
    const std::size_t size = bytes->size() / 144;
    for (std::int64_t e = 0; e < 144; ++e) {
      if (!chosen(e)) std::fill_n(bytes->begin() + e * size, size, std::byte{0xff});
    }
  }
  Call call(config, 9);
  call.set_ids(std::vector<std::vector<std::int64_t>>(9, {6, 9, 6, 1, 2, 6}));
  call.topk_weights.fill([](auto...) { return 1.0 / 6; });
  // The same sum with expert 6 once, weight 0.5.
  Call once(config, 9);
  once.set_ids(std::vector<std::vector<std::int64_t>>(9, {6, 9, -1, 1, 2, -1}));
  once.topk_weights.fill(
      [](std::int64_t, std::int64_t k) { return static_cast<double>(k == 0 ? 0.5F : 1.0F / 6); });
  for (const std::string& isa : isas()) {
    const FusedMoe plan = FusedMoe::create(config, weights.view(), with_isa(isa));
    call.apply(plan);
    EXPECT_TRUE(is_right(config, weights.view(), call)) << isa;
    once.apply(plan);
    for (std::int64_t t = 0; t < 9; ++t) {
      for (std::int64_t h = 0; h < 256; ++h) {
        ASSERT_NEAR(call.output.get(t, h), once.output.get(t, h),
                    1e-4 + 0x1p-7 * std::abs(once.output.get(t, h)));
      }
    }
  }
}

TEST(Cases_DU, B027_RowsOfNaNLogitsPassThroughApply) {
  const MoeConfig config{
      .hidden_size = 40, .intermediate_size = 24, .num_experts = 128, .top_k = 8};
  const Weights weights = Weights::random(config, 128);
  Matrix logits(DType::f32, 3, 128);
  logits.fill([](std::int64_t t, std::int64_t e) {
    return t == 1 ? std::nan("") : t == 2 ? HUGE_VAL : 4 * noise(3, t, e);
  });
  Call call(config, 3);
  topk_softmax({.top_k = 8}, logits.view(), call.topk_weights.view(), call.topk_ids.view());
  const FusedMoe plan = FusedMoe::create(config, weights.view(), with_isa("", 2));
  ASSERT_NO_THROW(call.apply(plan));
  Call first(config, 1);
  topk_softmax({.top_k = 8}, {logits.data(), DType::f32, 1, 128}, first.topk_weights.view(),
               first.topk_ids.view());
  first.apply(plan);
  for (std::int64_t h = 0; h < 40; ++h) {
    ASSERT_EQ(call.output.get(0, h), first.output.get(0, h));
    ASSERT_TRUE(std::isfinite(call.output.get(0, h)));
  }
}

TEST(Cases_SK, B030_ExpertsWithoutTokensLeaveNothingBehind) {
  const MoeConfig config{
      .hidden_size = 128, .intermediate_size = 64, .num_experts = 64, .top_k = 1};
  const Weights weights = Weights::random(config, 64);
  for (const std::string& isa : isas()) {
    const FusedMoe plan = FusedMoe::create(config, weights.view(), with_isa(isa));
    Call call(config, 40);
    call.topk_ids.fill([](auto...) { return 63.0; });
    call.apply(plan);
    EXPECT_TRUE(is_right(config, weights.view(), call)) << isa;
  }
}

TEST(Cases_SK, B031_AllTokensOnOneExpert) {
  for (const std::int64_t top_k : {1, 2}) {
    const MoeConfig config{
        .hidden_size = 256, .intermediate_size = 128, .num_experts = 32, .top_k = top_k};
    const Weights weights = Weights::random(config, 32);
    const FusedMoe plan = FusedMoe::create(config, weights.view(), with_isa("", 2));
    Call call(config, 1024);
    call.topk_ids.fill([](std::int64_t, std::int64_t k) { return static_cast<double>(31 - k); });
    call.apply(plan);  // the workspace has exactly workspace_size(1024)
    EXPECT_TRUE(is_right(config, weights.view(), call)) << "top_k " << top_k;
  }
}

TEST(Cases_SK, B032_GroupsOfSizeZeroBetweenOthers) {
  const MoeConfig config{
      .hidden_size = 1031, .intermediate_size = 131, .num_experts = 16, .top_k = 1};
  const Weights weights = Weights::random(config, 16);
  for (const std::string& isa : isas()) {
    const FusedMoe plan = FusedMoe::create(config, weights.view(), with_isa(isa, 3));
    Call call(config, 196);  // tokens per expert: 0, 1, 0, 0, 130, 0 ... 0, 65
    call.topk_ids.fill([](std::int64_t t, std::int64_t) {
      return t == 77 ? 1.0 : t % 3 == 1 ? 15.0 : 4.0;
    });
    call.apply(plan);
    EXPECT_TRUE(is_right(config, weights.view(), call)) << isa;
  }
}

TEST(Cases_NN, B035_BitsDoNotDependOnWhatBuffersHeld) {
  for (const DType dtype : kDtypes) {
    const MoeConfig config{
        .hidden_size = 83, .intermediate_size = 37, .num_experts = 16, .top_k = 4, .dtype = dtype};
    const Weights weights = Weights::random(config, 16);
    const FusedMoe plan = FusedMoe::create(config, weights.view(), with_isa("", 2));
    std::vector<std::byte> first;
    for (const int run : {0x00, 0xff, -1}) {
      Call call(config, 37);
      call.topk_ids.set(5, 2, -1);
      for (std::int64_t k = 0; k < 4; ++k) call.topk_ids.set(11, k, -1);
      Scratch scratch(plan.workspace_size(37));
      const auto fill = [run](std::byte* data, std::size_t size) {
        for (std::size_t i = 0; i < size; ++i) {
          data[i] = run >= 0 ? static_cast<std::byte>(run)
                             : static_cast<std::byte>(
                                   static_cast<int>(128 * noise(static_cast<int>(i), 1, 2)));
        }
      };
      fill(scratch.span().data(), scratch.span().size());
      fill(call.output.data(), call.output.bytes().size());
      plan.apply(call.output.view(), call.hidden.view(), call.topk_weights.view(),
                 call.topk_ids.view(), scratch.span());
      if (first.empty()) {
        first = call.output.bytes();
        EXPECT_TRUE(is_right(config, weights.view(), call)) << to_string(dtype);
      }
      EXPECT_EQ(call.output.bytes(), first) << to_string(dtype) << ", fill " << run;
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cases
