// Cases EP and RB with their own numbers; ep_test.cpp has the general ones.
#include <numeric>

#include "expert_ranks.h"

namespace fusedmoe::cases {
namespace {

std::vector<ExpertMap> linear_ranks(int size) {
  std::vector<ExpertMap> maps;
  for (int rank = 0; rank < size; ++rank) maps.push_back(ExpertMap::linear(rank, size));
  return maps;
}

bool is_zero(const Call& call, std::int64_t token) {
  for (std::int64_t h = 0; h < call.output.view().columns; ++h) {
    if (call.output.get(token, h) != 0) return false;
  }
  return true;
}

TEST(Cases_EP, B082_GlobalIdsAreNotLocalIds) {
  const MoeConfig config{.hidden_size = 48,
                         .intermediate_size = 20,
                         .num_experts = 8,
                         .top_k = 2,
                         .output_dtype = DType::f32};
  const Weights weights = Weights::random(config, 8);
  Call call(config, 3);
  call.set_ids({{2, 3}, {0, 5}, {2, 7}});
  expect_sum_is_whole(config, weights, call, linear_ranks(4));
  // Which tokens have a term on which rank.
  const bool has[4][3] = {
      {false, true, false}, {true, false, true}, {false, true, false}, {false, false, true}};
  for (int rank = 0; rank < 4; ++rank) {
    call.apply(rank_plan(config, weights, ExpertMap::linear(rank, 4)));
    for (std::int64_t t = 0; t < 3; ++t) EXPECT_EQ(!is_zero(call, t), has[rank][t]) << rank;
  }
}

TEST(Cases_EP, B083_OneHundredTwentyEightExpertsOnSixRanks) {
  const MoeConfig config{.hidden_size = 256,
                         .intermediate_size = 128,
                         .num_experts = 128,
                         .top_k = 8,
                         .output_dtype = DType::f32};
  const Weights weights = Weights::random(config, 128);
  std::vector<ExpertMap> maps;
  std::int32_t next = 0;
  for (const std::int32_t count : {22, 22, 21, 21, 21, 21}) {
    Map map(128, -1);
    for (std::int32_t i = 0; i < count; ++i) map[next++] = i;
    EXPECT_EQ(ExpertMap::linear(static_cast<int>(maps.size()), 6).resolve(128), map);
    maps.push_back(ExpertMap::explicit_map(map));
  }
  expect_sum_is_whole(config, weights, Call(config, 16), maps);
}

TEST(Cases_EP, B084_MapsBeyondTheExpertsAreRefusedByThePlan) {
  const MoeConfig config{.hidden_size = 24, .intermediate_size = 8, .num_experts = 64, .top_k = 2};
  const Weights weights = Weights::random(config, 8);
  const auto refused = [&](const Map& map) {
    PlanOptions options = with_isa("", 1);
    options.expert_map = ExpertMap::explicit_map(map);
    const std::string message = refusal(ErrorCode::invalid_argument,
                                        [&] { FusedMoe::create(config, weights.view(), options); });
    EXPECT_EQ(FusedMoe::supports(config, weights.view(), options).reason, message);
    return message;
  };
  Map beyond(68, -1);  // offset 60, 8 local experts
  std::iota(beyond.begin() + 60, beyond.end(), 0);
  EXPECT_TRUE(says(refused(beyond), {"expert_map", "64", "68"}));
  Map twice(64, -1);
  std::iota(twice.begin(), twice.begin() + 8, 0);
  twice[7] = 3;
  EXPECT_TRUE(says(refused(twice), {"expert_map[7]", "got 3", "global expert 3"}));
  Map high(64, -1);
  std::iota(high.begin(), high.begin() + 8, 0);
  high[7] = 8;
  EXPECT_TRUE(says(refused(high), {"expert_map[7]", "0..7", "got 8"}));
  // A sound map, but weights for another number of experts.
  Map nine(64, -1);
  std::iota(nine.begin(), nine.begin() + 9, 0);
  EXPECT_TRUE(says(refused(nine), {"weights.w13", "[9, 16, 24]", "[8, 16, 24]"}));
}

TEST(Cases_EP, B085_NonLocalIdsInOddTopK) {
  for (const std::int64_t top_k : {3, 1}) {
    const MoeConfig config{.hidden_size = 48,
                           .intermediate_size = 20,
                           .num_experts = 8,
                           .top_k = top_k,
                           .output_dtype = DType::f32};
    const Weights weights = Weights::random(config, 8);
    for (const std::int64_t m : {2, 1}) {
      Call call(config, m);
      call.set_ids({{0, 4, 1}, {5, 2, 6}});
      expect_sum_is_whole(config, weights, call, linear_ranks(2));
    }
  }
}

// Ids are physical and the same on all ranks: replicas are experts like any others.
TEST(Cases_RB, B088_ReplicasCountOnce) {
  const MoeConfig logical{.hidden_size = 48,
                          .intermediate_size = 20,
                          .num_experts = 4,
                          .top_k = 2,
                          .output_dtype = DType::f32};
  MoeConfig physical = logical;
  physical.num_experts = 6;
  const std::int64_t logical_of[] = {0, 1, 2, 3, 0, 1};
  const auto value13 = [](std::int64_t e, int part, std::int64_t i, std::int64_t k) {
    return 0.25 * noise(e, 2 * i + part, k);
  };
  const auto value2 = [](std::int64_t e, std::int64_t h, std::int64_t i) {
    return 0.4 * noise(50 + e, h, i);
  };
  const Weights four(logical, 4, value13, value2);
  const Weights six(
      physical, 6,
      [&](std::int64_t e, int part, std::int64_t i, std::int64_t k) {
        return value13(logical_of[e], part, i, k);
      },
      [&](std::int64_t e, std::int64_t h, std::int64_t i) { return value2(logical_of[e], h, i); });
  Call call(physical, 5);
  const std::vector<std::vector<std::int64_t>> ids = {{0, 1}, {4, 5}, {4, 3}, {2, 5}, {1, 4}};
  call.set_ids(ids);
  expect_sum_is_whole(physical, six, call, linear_ranks(2));

  call.apply(FusedMoe::create(physical, six.view(), with_isa("", 2)));
  auto with_logical_ids = ids;
  for (auto& row : with_logical_ids) {
    for (std::int64_t& id : row) id = logical_of[id];
  }
  call.set_ids(with_logical_ids);
  EXPECT_TRUE(is_right(logical, four.view(), call));
}

TEST(Cases_RB, B089_EntryBeyondThePhysicalExpertsIsRefused) {
  const MoeConfig config{.hidden_size = 24, .intermediate_size = 8, .num_experts = 6, .top_k = 2};
  const Weights weights = Weights::random(config, 6);
  PlanOptions options = with_isa("", 1);
  options.expert_map = ExpertMap::explicit_map({0, 1, 2, 3, 4, 6});
  EXPECT_TRUE(says(refusal(ErrorCode::invalid_argument,
                           [&] { FusedMoe::create(config, weights.view(), options); }),
                   {"expert_map[5]", "0..5", "got 6"}));
}

}  // namespace
}  // namespace fusedmoe::cases
