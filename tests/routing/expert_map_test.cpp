// ExpertMap: its three kinds, and the maps that it refuses.
#include "fusedmoe/expert_map.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "fusedmoe/error.h"

namespace fusedmoe {
namespace {

using Table = std::vector<std::int32_t>;

void expect_refused(const std::string& text, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "accepted: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(std::string(error.what()).substr(0, text.size()), text);
    EXPECT_NE(std::string(error.what()).find("; "), std::string::npos) << "no remedy";
  }
}

void expect_map_refused(Table map, std::int64_t num_experts, const std::string& text) {
  expect_refused(text, [&] { ExpertMap::explicit_map(std::move(map)).resolve(num_experts); });
}

TEST(ExpertMap, DefaultIsIdentity) {
  EXPECT_TRUE(ExpertMap().is_identity());
  EXPECT_EQ(ExpertMap().resolve(4), (Table{0, 1, 2, 3}));
  EXPECT_FALSE(ExpertMap::linear(0, 1).is_identity());
  EXPECT_FALSE(ExpertMap::round_robin(0, 1).is_identity());
  EXPECT_FALSE(ExpertMap::explicit_map({0}).is_identity());
}

TEST(ExpertMap, LinearGivesTheFirstRanksOneMore) {
  EXPECT_EQ(ExpertMap::linear(0, 3).resolve(7), (Table{0, 1, 2, -1, -1, -1, -1}));
  EXPECT_EQ(ExpertMap::linear(1, 3).resolve(7), (Table{-1, -1, -1, 0, 1, -1, -1}));
  EXPECT_EQ(ExpertMap::linear(2, 3).resolve(7), (Table{-1, -1, -1, -1, -1, 0, 1}));
}

TEST(ExpertMap, RoundRobin) {
  EXPECT_EQ(ExpertMap::round_robin(0, 3).resolve(7), (Table{0, -1, -1, 1, -1, -1, 2}));
  EXPECT_EQ(ExpertMap::round_robin(2, 3).resolve(7), (Table{-1, -1, 0, -1, -1, 1, -1}));
}

TEST(ExpertMap, ARankMayHaveNone) {
  EXPECT_EQ(ExpertMap::linear(3, 4).resolve(2), (Table{-1, -1}));
  EXPECT_EQ(ExpertMap::round_robin(3, 4).resolve(2), (Table{-1, -1}));
  EXPECT_EQ(ExpertMap::explicit_map({-1, -1}).resolve(2), (Table{-1, -1}));
}

TEST(ExpertMap, RanksPartitionTheExperts) {
  for (const int size : {1, 2, 3, 5, 8}) {
    for (const std::int64_t num_experts : {1, 7, 8, 30, 257}) {
      for (const bool linear : {true, false}) {
        std::vector<int> owners(static_cast<std::size_t>(num_experts), 0);
        for (int rank = 0; rank < size; ++rank) {
          const auto map =
              linear ? ExpertMap::linear(rank, size) : ExpertMap::round_robin(rank, size);
          const auto table = map.resolve(num_experts);
          std::int32_t next = 0;
          for (std::size_t g = 0; g < table.size(); ++g) {
            if (table[g] < 0) continue;
            EXPECT_EQ(table[g], next++);  // both kinds keep the order of global ids
            ++owners[g];
          }
        }
        EXPECT_EQ(owners, std::vector<int>(static_cast<std::size_t>(num_experts), 1));
      }
    }
  }
}

TEST(ExpertMap, ExplicitMayBeInAnyOrder) {
  EXPECT_EQ(ExpertMap::explicit_map({2, -1, 0, 1}).resolve(4), (Table{2, -1, 0, 1}));
}

TEST(ExpertMap, RefusesRanks) {
  for (const auto& make : {&ExpertMap::linear, &ExpertMap::round_robin}) {
    expect_refused("expert_map: expected rank in 0..1 of size=2, got rank=2", [&] { make(2, 2); });
    expect_refused("expert_map: expected rank in 0..1 of size=2, got rank=-1",
                   [&] { make(-1, 2); });
    expect_refused("expert_map: expected size > 0, got size=0", [&] { make(0, 0); });
  }
}

TEST(ExpertMap, RefusesNoExperts) {
  for (const std::int64_t num_experts :
       {std::int64_t{0}, std::int64_t{-4}, std::int64_t{1} << 31}) {
    for (const auto& map : {ExpertMap(), ExpertMap::linear(0, 2), ExpertMap::round_robin(0, 2),
                            ExpertMap::explicit_map({})}) {
      expect_refused("num_experts: expected 1..2147483647, got " + std::to_string(num_experts),
                     [&] { map.resolve(num_experts); });
    }
  }
}

TEST(ExpertMap, RefusesExplicitMaps) {
  expect_map_refused({0, 1}, 3, "expert_map: expected num_experts=3 entries, got 2");
  expect_map_refused({}, 3, "expert_map: expected num_experts=3 entries, got 0");
  expect_map_refused({0, -2, 1}, 3, "expert_map[1]: expected a local id or -1, got -2");
  expect_map_refused({0, 2, -1}, 3, "expert_map[1]: expected a local id in 0..1 or -1, got 2");
  expect_map_refused({1, -1, 1}, 3,
                     "expert_map[2]: expected a local id of its own, got 1, which global expert 0");
}

TEST(RoutingCases, EP_B084_BeyondTheExperts) {
  Table beyond(68, -1);  // 8 local experts from 60 on, of 64
  std::iota(beyond.begin() + 60, beyond.end(), 0);
  expect_map_refused(beyond, 64, "expert_map: expected num_experts=64 entries, got 68");
  Table twice(64, -1);
  twice[5] = 0;
  twice[9] = 1;
  twice[60] = 1;
  expect_map_refused(twice, 64,
                     "expert_map[60]: expected a local id of its own, got 1, which global expert 9 "
                     "has; global experts 9 and 60 need two local ids");
  Table high(64, -1);
  for (std::size_t i = 0; i < 8; ++i) high[i] = static_cast<std::int32_t>(i + (i == 7));
  expect_map_refused(high, 64, "expert_map[7]: expected a local id in 0..7 or -1, got 8");
}

TEST(RoutingCases, RB_B089_EntryBeyondThePhysicalExperts) {
  expect_map_refused({0, 1, 2, 3, 4, 6}, 6,
                     "expert_map[5]: expected a local id in 0..5 or -1, got 6");
}

}  // namespace
}  // namespace fusedmoe
