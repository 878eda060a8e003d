// The permutation: its tables by definition, whatever ids, maps, strides and skew.
#include "routing/permutation.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "fusedmoe/expert_map.h"
#include "routing_oracle.h"

namespace fusedmoe {
namespace {

using Table = std::vector<std::int32_t>;

struct Tables {
  Table offsets, row_to_slot, slot_to_row;
  std::int32_t num_rows = 0;
};

Tables permuted(const ConstMatrixView& ids, std::int64_t num_experts, const Table& map,
                std::int64_t num_local) {
  const auto slots = static_cast<std::size_t>(ids.rows * ids.columns);
  Tables t{Table(static_cast<std::size_t>(num_local + 1), -1), Table(slots, -1), Table(slots, -1)};
  t.num_rows =
      routing::permute(ids, num_experts, map, num_local, {t.offsets, t.row_to_slot, t.slot_to_row});
  return t;
}

TestMatrix ids_of(DType dtype, const std::vector<std::vector<std::int64_t>>& rows,
                  std::int64_t padding = 0) {
  TestMatrix ids(dtype, static_cast<std::int64_t>(rows.size()),
                 static_cast<std::int64_t>(rows[0].size()), padding, padding);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (std::size_t c = 0; c < rows[r].size(); ++c) {
      ids.set_id(static_cast<std::int64_t>(r), static_cast<std::int64_t>(c), rows[r][c]);
    }
  }
  return ids;
}

// The definition: for each local expert, all its slots in order.
void expect_definition(const TestMatrix& ids, std::int64_t num_experts, const Table& map,
                       std::int64_t num_local) {
  const auto got = permuted(ids.view(), num_experts, map, num_local);
  const auto slots = static_cast<std::size_t>(ids.rows() * ids.columns());
  Tables want{{0}, {}, Table(slots, -1)};
  for (std::int64_t e = 0; e < num_local; ++e) {
    for (std::size_t slot = 0; slot < slots; ++slot) {
      const auto signed_slot = static_cast<std::int64_t>(slot);
      const auto id = ids.id(signed_slot / ids.columns(), signed_slot % ids.columns());
      if (id < 0 || id >= num_experts) continue;
      if ((map.empty() ? id : map[static_cast<std::size_t>(id)]) != e) continue;
      want.slot_to_row[slot] = static_cast<std::int32_t>(want.row_to_slot.size());
      want.row_to_slot.push_back(static_cast<std::int32_t>(slot));
    }
    want.offsets.push_back(static_cast<std::int32_t>(want.row_to_slot.size()));
  }
  EXPECT_EQ(got.num_rows, static_cast<std::int32_t>(want.row_to_slot.size()));
  want.row_to_slot.resize(slots, -1);  // and nothing written beyond
  EXPECT_EQ(got.offsets, want.offsets);
  EXPECT_EQ(got.row_to_slot, want.row_to_slot);
  EXPECT_EQ(got.slot_to_row, want.slot_to_row);
}

TEST(Permutation, TheWalkOfThreeTokens) {
  for (const DType dtype : {DType::i32, DType::i64}) {
    for (const std::int64_t padding : {0, 3}) {
      const auto ids = ids_of(dtype, {{2, 0}, {2, 1}, {0, 3}}, padding);
      const auto t = permuted(ids.view(), 4, {}, 4);
      EXPECT_EQ(t.num_rows, 6);
      EXPECT_EQ(t.offsets, (Table{0, 2, 3, 5, 6}));
      EXPECT_EQ(t.row_to_slot, (Table{1, 4, 3, 0, 2, 5}));
      EXPECT_EQ(t.slot_to_row, (Table{3, 0, 4, 2, 1, 5}));
    }
  }
}

TEST(Permutation, SkipsWhatIsNotLocal) {
  const auto ids = ids_of(DType::i32, {{2, 0}, {-1, 1}, {0, 3}});
  const auto t = permuted(ids.view(), 4, {1, -1, 0, -1}, 2);
  EXPECT_EQ(t.num_rows, 3);
  EXPECT_EQ(t.offsets, (Table{0, 1, 3}));
  EXPECT_EQ(t.row_to_slot, (Table{0, 1, 4, -1, -1, -1}));
  EXPECT_EQ(t.slot_to_row, (Table{0, 1, -1, -1, 2, -1}));
}

TEST(Permutation, RandomIdsFollowTheDefinition) {
  TestRandom random(3);
  for (const std::int64_t num_experts : {1, 2, 30, 257}) {
    for (const std::int64_t tokens : {1, 2, 7, 63}) {
      for (const std::int64_t top_k : {1, 3, 8}) {
        TestMatrix ids(tokens % 2 == 0 ? DType::i32 : DType::i64, tokens, top_k, top_k % 3);
        for (std::int64_t t = 0; t < tokens; ++t) {
          for (std::int64_t k = 0; k < top_k; ++k) {
            // From -2 to one beyond, the same id twice in a row included.
            ids.set_id(t, k, std::int64_t{random.next()} % (num_experts + 4) - 2);
          }
        }
        expect_definition(ids, num_experts, {}, num_experts);
        for (const int rank : {0, 2}) {
          const auto map = ExpertMap::round_robin(rank, 3).resolve(num_experts);
          std::int64_t num_local = 0;
          for (const auto local : map) num_local += local >= 0 ? 1 : 0;
          expect_definition(ids, num_experts, map, num_local);
        }
      }
    }
  }
}

TEST(Permutation, AllTokensOnOneExpert) {
  for (const std::int64_t expert : {0, 5, 7}) {
    TestMatrix ids(DType::i32, 100, 2);
    for (std::int64_t t = 0; t < 100; ++t) {
      ids.set_id(t, 0, expert);
      ids.set_id(t, 1, expert);
    }
    expect_definition(ids, 8, {}, 8);
  }
}

TEST(Permutation, NothingToDo) {
  const auto none = permuted(ConstMatrixView(nullptr, DType::i32, 0, 8), 4, {}, 4);
  EXPECT_EQ(none.num_rows, 0);
  EXPECT_EQ(none.offsets, (Table{0, 0, 0, 0, 0}));
  const auto ids = ids_of(DType::i64, {{2, 0}, {1, 1}});
  const auto no_locals = permuted(ids.view(), 3, {-1, -1, -1}, 0);
  EXPECT_EQ(no_locals.num_rows, 0);
  EXPECT_EQ(no_locals.offsets, (Table{0}));
  EXPECT_EQ(no_locals.slot_to_row, (Table{-1, -1, -1, -1}));
}

TEST(Permutation, NeverOutOfBounds) {
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  const auto ids = ids_of(DType::i64, {{kHuge, 4}, {-kHuge - 1, 1}, {2, (1LL << 32) + 1}});
  // Also with a map that is shorter than it should be and holds locals that are not there.
  for (const auto& map : {Table{}, Table{7, 0, -5}, Table{9}}) {
    const auto t = permuted(ids.view(), 4, map, 2);
    EXPECT_EQ(t.num_rows, map.size() == 1 ? 0 : 1);
    EXPECT_EQ(t.slot_to_row[0], -1);
    EXPECT_EQ(t.slot_to_row[5], -1);
  }
}

TEST(Permutation, FindsTheFirstBadId) {
  for (const DType dtype : {DType::i32, DType::i64}) {
    EXPECT_FALSE(routing::find_bad_id(ids_of(dtype, {{-1, 0}, {3, 3}}, 2).view(), 4));
    const auto high = routing::find_bad_id(ids_of(dtype, {{-1, 0}, {3, 4}, {-2, 0}}, 2).view(), 4);
    ASSERT_TRUE(high);
    EXPECT_EQ(high->token, 1);
    EXPECT_EQ(high->k, 1);
    EXPECT_EQ(high->id, 4);
    const auto low = routing::find_bad_id(ids_of(dtype, {{-1, 0}, {-2, 4}}, 2).view(), 4);
    ASSERT_TRUE(low);
    EXPECT_EQ(low->k, 0);
    EXPECT_EQ(low->id, -2);
  }
  EXPECT_FALSE(routing::find_bad_id(ConstMatrixView(nullptr, DType::i32, 0, 8), 4));
  const auto wide = routing::find_bad_id(ids_of(DType::i64, {{(1LL << 32)}}).view(), 4);
  ASSERT_TRUE(wide);
  EXPECT_EQ(wide->id, 1LL << 32);
}

}  // namespace
}  // namespace fusedmoe
