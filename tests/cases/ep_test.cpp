// Expert parallelism: what ranks compute adds up to the whole layer, a call's own map wins over the
// plan's, and maps that would read another expert's weights are refused.
#include <numeric>

#include "expert_ranks.h"

namespace fusedmoe::cases {
namespace {

// Ranks of the sizes given, experts dealt out from the last to the first.
std::vector<ExpertMap> uneven(const std::vector<std::int64_t>& sizes) {
  const std::int64_t experts = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  std::vector<ExpertMap> maps;
  std::int64_t next = experts;
  for (const std::int64_t size : sizes) {
    Map map(experts, -1);
    for (std::int64_t i = 0; i < size; ++i) map[--next] = static_cast<std::int32_t>(i);
    maps.push_back(ExpertMap::explicit_map(map));
  }
  return maps;
}

class Ep : public testing::TestWithParam<int> {};

TEST_P(Ep, SumOfLinearAndRoundRobinRanksIsTheWhole) {
  const int ranks = GetParam();
  for (const std::int64_t experts : {5, 13}) {  // with 8 ranks and 5 experts some have none
    const MoeConfig config{.hidden_size = 67,
                           .intermediate_size = 29,
                           .num_experts = experts,
                           .top_k = 3,
                           .output_dtype = DType::f32};
    const Weights weights = Weights::random(config, experts);
    Call call(config, 11);
    call.topk_ids.set(4, 1, -1);
    for (const bool linear : {true, false}) {
      std::vector<ExpertMap> maps;
      for (int rank = 0; rank < ranks; ++rank) {
        maps.push_back(linear ? ExpertMap::linear(rank, ranks)
                              : ExpertMap::round_robin(rank, ranks));
      }
      expect_sum_is_whole(config, weights, call, maps);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, Ep, testing::Range(1, 9));

TEST(Ep, SumOfUnevenAndEmptyRanksIsTheWhole) {
  const MoeConfig config{.hidden_size = 35,
                         .intermediate_size = 18,
                         .num_experts = 13,
                         .top_k = 5,
                         .output_dtype = DType::f32};
  const Weights weights = Weights::random(config, 13);
  for (const auto& sizes : std::vector<std::vector<std::int64_t>>{
           {13}, {0, 13, 0}, {1, 12}, {7, 1, 5}, {2, 0, 3, 1, 0, 4, 2, 1}}) {
    expect_sum_is_whole(config, weights, Call(config, 9), uneven(sizes));
  }
}

TEST(Ep, ARankWithoutExpertsGivesZeros) {
  const MoeConfig config{.hidden_size = 35, .intermediate_size = 18, .num_experts = 3, .top_k = 2};
  PlanOptions options = with_isa("", 2);
  options.expert_map = ExpertMap::linear(5, 8);
  const FusedMoe plan = FusedMoe::create(config, {}, options);
  EXPECT_EQ(plan.num_local_experts(), 0);
  Call call(config, 7);
  call.apply(plan);
  EXPECT_TRUE(std::all_of(call.output.bytes().begin(), call.output.bytes().end(),
                          [](std::byte b) { return b == std::byte{0}; }));
}

// A token whose experts all lie on one rank has the bits of the whole layer there: the order of its
// sum depends on nothing else. Nor does it depend on the order in which its ids came.
TEST(Ep, OrderOfATokensSumIsThatOfLocalIds) {
  const MoeConfig config{.hidden_size = 50, .intermediate_size = 21, .num_experts = 9, .top_k = 4};
  const Weights weights = Weights::random(config, 9);
  Call call(config, 6);
  call.set_ids(
      {{8, 5, 7, 6}, {5, 6, 7, 8}, {6, 5, 8, 7}, {7, 8, 6, 5}, {8, 7, 6, 5}, {5, 8, 6, 7}});
  call.apply(FusedMoe::create(config, weights.view(), with_isa("", 2)));
  const auto whole = call.output.bytes();
  call.apply(rank_plan(config, weights, ExpertMap::explicit_map({-1, -1, -1, -1, -1, 0, 1, 2, 3})));
  EXPECT_EQ(call.output.bytes(), whole);

  Call turned = call;
  for (std::int64_t t = 0; t < 6; ++t) {
    for (std::int64_t k = 0; k < 4; ++k) {
      turned.topk_weights.set(t, k, call.topk_weights.get(t, 3 - k));
    }
  }
  turned.set_ids(
      {{6, 7, 5, 8}, {8, 7, 6, 5}, {7, 8, 5, 6}, {5, 6, 8, 7}, {5, 6, 7, 8}, {7, 6, 8, 5}});
  turned.apply(FusedMoe::create(config, weights.view(), with_isa("", 2)));
  EXPECT_EQ(turned.output.bytes(), whole);
}

TEST(Ep, AMapOfTheCallWinsOverThePlans) {
  const MoeConfig config{.hidden_size = 35, .intermediate_size = 18, .num_experts = 6, .top_k = 2};
  const Weights weights = Weights::random(config, 6);
  const FusedMoe plan = rank_plan(config, weights, ExpertMap::linear(0, 2));
  const ExpertWeights locals = of_rank(weights.view(), ExpertMap::linear(0, 2).resolve(6));
  Call call(config, 8);
  call.apply(plan);
  const auto of_plan = call.output.bytes();
  for (const Map& map : {Map{2, 1, 0, -1, -1, -1}, Map{-1, 0, -1, 1, -1, 2}}) {
    call.apply(plan, {.expert_map = map});
    EXPECT_TRUE(is_right(config, locals, call, map));
    EXPECT_NE(call.output.bytes(), of_plan);
  }
  call.apply(plan);  // and only for its call
  EXPECT_EQ(call.output.bytes(), of_plan);
}

TEST(Ep, ABadMapOfTheCallIsRefused) {
  const MoeConfig config{.hidden_size = 35, .intermediate_size = 18, .num_experts = 6, .top_k = 2};
  const Weights weights = Weights::random(config, 6);
  for (const bool own_map : {true, false}) {
    const FusedMoe plan = own_map ? rank_plan(config, weights, ExpertMap::linear(0, 2))
                                  : FusedMoe::create(config, weights.view(), with_isa("", 2));
    Call call(config, 8);
    call.apply(plan);
    const auto before = call.output.bytes();
    const auto expect_refused = [&](const Map& map, const std::vector<std::string>& parts) {
      const std::string message =
          refusal(ErrorCode::invalid_argument, [&] { call.apply(plan, {.expert_map = map}); });
      EXPECT_TRUE(says(message, parts));
      EXPECT_TRUE(says(message, {"context.expert_map", "num_experts=6"}));
      EXPECT_TRUE(call.output.is_untouched());
    };
    const std::int32_t n = own_map ? 3 : 6;
    Map good(6, -1);
    for (std::int32_t i = 0; i < n; ++i) good[i] = i;
    expect_refused(Map(good.begin(), good.begin() + 5), {"got 5 entries"});
    Map longer = good;
    longer.push_back(-1);
    expect_refused(longer, {"got 7 entries"});
    Map twice = good;
    twice[2] = 0;
    expect_refused(twice, {"expert_map[2] = 0", "expert_map[0]"});
    for (const std::int32_t beyond : {n, std::int32_t{1} << 30, -2}) {
      Map bad = good;
      bad[1] = beyond;
      expect_refused(bad, {"expert_map[1] = " + std::to_string(beyond)});
    }
    Map fewer = good;
    fewer[n - 1] = -1;
    expect_refused(fewer, {"got " + std::to_string(n - 1) + " local experts"});
    call.apply(plan, {.expert_map = good});
    EXPECT_EQ(call.output.bytes(), before);
  }
}

TEST(Ep, NumExpertsOfZeroOrLessIsRefusedByName) {
  for (const std::int64_t experts : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{-1} << 40}) {
    const MoeConfig config{
        .hidden_size = 8, .intermediate_size = 8, .num_experts = experts, .top_k = 1};
    const std::string message =
        refusal(ErrorCode::invalid_argument, [&] { FusedMoe::create(config, {}); });
    EXPECT_TRUE(says(message, {"config.num_experts", "got " + std::to_string(experts)}));
    EXPECT_EQ(FusedMoe::supports(config, {}).reason, message);
  }
}

}  // namespace
}  // namespace fusedmoe::cases
