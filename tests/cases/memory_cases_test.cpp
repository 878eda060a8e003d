// Cases WS, ST and AL: sizes of workspaces, strides, overlapping buffers.
#include "case_layer.h"

namespace fusedmoe::cases {
namespace {

const MoeConfig kConfig{.hidden_size = 104, .intermediate_size = 56, .num_experts = 8, .top_k = 3};

TEST(Cases_WS, B097_ExactAndTooSmallAndMissingAndMisaligned) {
  const Weights weights = Weights::random(kConfig, 8);
  const FusedMoe plan = FusedMoe::create(kConfig, weights.view(), with_isa("", 2));
  Call call(kConfig, 21);
  call.apply(plan);  // exactly workspace_size(21)
  EXPECT_TRUE(is_right(kConfig, weights.view(), call));
  const auto exact = call.output.bytes();

  const WorkspaceSize size = plan.workspace_size(21);
  const WorkspaceSize least = plan.min_workspace_size();
  Scratch scratch(size);
  const auto with = [&](Workspace workspace) {
    call.output.dirty();
    plan.apply(call.output.view(), call.hidden.view(), call.topk_weights.view(),
               call.topk_ids.view(), workspace);
  };
  const auto refused = [&](ErrorCode code, Workspace workspace) {
    const std::string message = refusal(code, [&] { with(workspace); });
    EXPECT_TRUE(call.output.is_untouched());
    return message;
  };
  // One byte less: in two chunks, the same bits.
  with(scratch.span().first(scratch.span().size() - 1));
  EXPECT_EQ(call.output.bytes(), exact);
  with(scratch.span().first(static_cast<std::size_t>(least.bytes)));
  EXPECT_EQ(call.output.bytes(), exact);

  EXPECT_TRUE(says(refused(ErrorCode::workspace_too_small,
                           scratch.span().first(static_cast<std::size_t>(least.bytes) - 1)),
                   {"workspace", "at least " + std::to_string(least.bytes),
                    std::to_string(size.bytes) + " for num_tokens=21",
                    "got " + std::to_string(least.bytes - 1)}));
  EXPECT_TRUE(says(refused(ErrorCode::workspace_too_small, Workspace(nullptr, 0)), {"got 0"}));
  for (const std::size_t offset : {1, 2, 8, 32, 63}) {
    Scratch larger({size.bytes + 64, size.alignment});
    EXPECT_TRUE(says(refused(ErrorCode::invalid_argument, larger.span().subspan(offset)),
                     {"workspace", "multiple of 64", std::to_string(offset) + " beyond"}));
  }
  with({});  // without one, the call allocates
  EXPECT_EQ(call.output.bytes(), exact);
}

TEST(Cases_WS, B098_OneTokenMoreThanTheWorkspaceWasFor) {
  const Weights weights = Weights::random(kConfig, 8);
  for (const std::string& isa : isas()) {
    const FusedMoe plan = FusedMoe::create(kConfig, weights.view(), with_isa(isa));
    Call call(kConfig, 65);
    Scratch scratch(plan.workspace_size(64));
    call.apply(plan, scratch);
    EXPECT_TRUE(scratch.behind_is_untouched());
    EXPECT_TRUE(is_right(kConfig, weights.view(), call)) << isa;
    const auto chunked = call.output.bytes();
    call.apply(plan);
    EXPECT_EQ(call.output.bytes(), chunked) << isa;
  }
}

TEST(Cases_ST, B110_OddRowStrideAndTransposedWeights) {
  const MoeConfig config{
      .hidden_size = 1024, .intermediate_size = 40, .num_experts = 3, .top_k = 2};
  for (const WeightLayout layout : {WeightLayout::nk, WeightLayout::kn}) {
    const Weights weights = Weights::random(config, 3, {WeightFormat::bf16, layout, layout});
    for (const std::string& isa : isas()) {
      Call call(config, 6);
      Matrix strided(DType::bf16, 6, 1024, 1025);
      strided.fill([&](std::int64_t t, std::int64_t h) { return call.hidden.get(t, h); });
      const FusedMoe plan = FusedMoe::create(config, weights.view(), with_isa(isa));
      call.apply(plan);
      const auto dense = call.output.bytes();
      EXPECT_TRUE(is_right(config, weights.view(), call));
      call.hidden = strided;
      call.apply(plan);
      EXPECT_EQ(call.output.bytes(), dense) << isa;
    }
  }
  // Rows that overlap are refused.
  const Weights weights = Weights::random(config, 3);
  const FusedMoe plan = FusedMoe::create(config, weights.view(), with_isa("", 1));
  Call call(config, 6);
  const std::string message = refusal(ErrorCode::invalid_argument, [&] {
    plan.apply(call.output.view(), {call.hidden.data(), DType::bf16, 6, 1024, 1023},
               call.topk_weights.view(), call.topk_ids.view());
  });
  EXPECT_TRUE(says(message, {"hidden.row_stride", "at least 1024", "1023"}));
  EXPECT_TRUE(call.output.is_untouched());
}

TEST(Cases_ST, B111_TailOfAPaddedOutputStays) {
  const MoeConfig config{
      .hidden_size = 2880, .intermediate_size = 24, .num_experts = 4, .top_k = 2};
  const Weights weights = Weights::random(config, 4);
  for (const std::string& isa : isas()) {
    for (const DType output_dtype : kDtypes) {
      MoeConfig other = config;
      other.output_dtype = output_dtype;
      Call call(other, 5);
      call.apply(FusedMoe::create(other, weights.view(), with_isa(isa)));
      EXPECT_TRUE(is_right(other, weights.view(), call)) << isa;
      Matrix padded(output_dtype, 5, 3072);
      padded.fill([](auto...) { return 7.0; });
      FusedMoe::create(other, weights.view(), with_isa(isa))
          .apply({padded.data(), output_dtype, 5, 2880, 3072}, call.hidden.view(),
                 call.topk_weights.view(), call.topk_ids.view());
      for (std::int64_t t = 0; t < 5; ++t) {
        for (std::int64_t h = 0; h < 3072; ++h) {
          ASSERT_EQ(padded.get(t, h), h < 2880 ? call.output.get(t, h) : 7.0);
        }
      }
    }
  }
}

TEST(Cases_AL, B113_InputsStayAsTheyAre) {
  for (const WeightStorage storage : {WeightStorage::own, WeightStorage::borrowed}) {
    Weights weights = Weights::random(kConfig, 8);
    PlanOptions options = with_isa("", 2);
    options.weight_storage = storage;
    Call call(kConfig, 33);
    const Call before = call;
    const auto w13 = weights.w13_bytes();
    const auto w2 = weights.w2_bytes();
    call.apply(FusedMoe::create(kConfig, weights.view(), options));
    EXPECT_EQ(call.hidden.bytes(), before.hidden.bytes());
    EXPECT_EQ(call.topk_ids.bytes(), before.topk_ids.bytes());
    EXPECT_EQ(call.topk_weights.bytes(), before.topk_weights.bytes());
    EXPECT_EQ(weights.w13_bytes(), w13);
    EXPECT_EQ(weights.w2_bytes(), w2);
  }
}

TEST(Cases_AL, B114_OutputInTheWorkspaceOrHalfOverHidden) {
  const Weights weights = Weights::random(kConfig, 8);
  const FusedMoe plan = FusedMoe::create(kConfig, weights.view(), with_isa("", 2));
  Call call(kConfig, 10);
  call.apply(plan);
  const auto apart = call.output.bytes();
  Scratch scratch(plan.workspace_size(10));
  const auto apply_to = [&](void* output, const void* hidden) {
    plan.apply({output, DType::bf16, 10, 104}, {hidden, DType::bf16, 10, 104},
               call.topk_weights.view(), call.topk_ids.view(), scratch.span());
  };
  std::vector<std::byte> before(scratch.span().begin(), scratch.span().end());
  for (const std::int64_t offset :
       {std::int64_t{0}, std::int64_t{128}, plan.workspace_size(10).bytes - 2}) {
    EXPECT_TRUE(says(refusal(ErrorCode::invalid_argument,
                             [&] { apply_to(scratch.span().data() + offset, call.hidden.data()); }),
                     {"workspace", "output"}));
  }
  EXPECT_TRUE(std::equal(before.begin(), before.end(), scratch.span().begin()));

  Matrix both(DType::bf16, 11, 104);  // hidden is its rows 0..9
  both.fill([&](std::int64_t t, std::int64_t h) { return t < 10 ? call.hidden.get(t, h) : 7.0; });
  const auto bytes = both.bytes();
  for (const std::int64_t elements : {1, 52, 104}) {
    EXPECT_TRUE(says(refusal(ErrorCode::invalid_argument,
                             [&] { apply_to(both.data() + 2 * elements, both.data()); }),
                     {"output", "hidden", "overlap"}));
    EXPECT_EQ(both.bytes(), bytes);
  }
  apply_to(both.data(), both.data());  // exactly in place
  EXPECT_TRUE(std::equal(apart.begin(), apart.end(), both.bytes().begin()));
}

// In place, in chunks, with fp32 sums in the output itself: every combination is the same layer.
TEST(Cases_AL, B114_InPlaceInChunksAndEveryDtype) {
  for (const std::string& isa : isas()) {
    for (const DType dtype : kDtypes) {
      MoeConfig config = kConfig;
      config.dtype = dtype;
      const Weights weights = Weights::random(config, 8);
      const FusedMoe plan = FusedMoe::create(config, weights.view(), with_isa(isa, 3));
      Call call(config, 17);
      call.apply(plan);
      for (const std::int64_t tokens : {1, 4, 17}) {
        Matrix in_place = call.hidden;
        Scratch scratch(plan.workspace_size(tokens));
        plan.apply(in_place.view(), in_place.view(), call.topk_weights.view(), call.topk_ids.view(),
                   scratch.span());
        EXPECT_EQ(in_place.bytes(), call.output.bytes()) << isa << ", " << tokens << " at once";
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cases
