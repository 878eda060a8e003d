// core/workspace_layout.*: spans that are alive together never overlap, whatever the number of
// tokens; sizes are affine, and as small as sharing by lifetime makes them.
#include "core/workspace_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace fusedmoe {
namespace {

constexpr std::int64_t kAlign = 64;

std::int64_t round_up(std::int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

std::int64_t bytes_of(const ScratchRequest& r, std::int64_t n) { return r.fixed + r.per_token * n; }

// Places all requests for n tokens and checks what must hold.
void expect_sound(const std::vector<ScratchRequest>& requests, std::int64_t n) {
  const WorkspaceLayout layout(requests, kAlign);
  ASSERT_EQ(layout.num_spans(), requests.size());
  const WorkspaceFormula whole = layout.formula();
  const WorkspaceFormula arenas[] = {layout.formula13(), layout.formula2()};
  EXPECT_EQ(arenas[0].fixed + arenas[1].fixed, whole.fixed);
  EXPECT_EQ(arenas[0].per_token + arenas[1].per_token, whole.per_token);
  // Far apart, so that a span in the wrong arena is seen.
  auto* const base13 = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40);
  auto* const base2 = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 41);
  std::vector<std::byte*> at(requests.size());
  layout.place(base13, base2, n, at);
  std::int64_t alive_most[2] = {0, 0};
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const ScratchRequest& a = requests[i];
    const int arena = a.in_workspace13 ? 0 : 1;
    std::byte* const base = arena == 0 ? base13 : base2;
    EXPECT_EQ((at[i] - base) % kAlign, 0);
    EXPECT_GE(at[i] - base, 0);
    EXPECT_LE(at[i] - base + bytes_of(a, n), arenas[arena].size(n).bytes) << a.name;
    std::int64_t alive = 0;
    for (std::size_t j = 0; j < requests.size(); ++j) {
      const ScratchRequest& b = requests[j];
      if (b.first > a.first || b.last < a.first) continue;  // alive when a begins
      if (b.in_workspace13 == a.in_workspace13) alive += bytes_of(b, n);
      if (i == j) continue;
      EXPECT_TRUE(at[i] + bytes_of(a, n) <= at[j] || at[j] + bytes_of(b, n) <= at[i])
          << "requests " << i << " and " << j << " are alive together at n = " << n;
    }
    alive_most[arena] = std::max(alive_most[arena], alive);
  }
  for (const int arena : {0, 1}) EXPECT_GE(arenas[arena].size(n).bytes, alive_most[arena]);
}

TEST(WorkspaceLayout, RandomRequestsNeverOverlapWhileAlive) {
  std::mt19937_64 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<ScratchRequest> requests(1 + random() % 12);
    for (ScratchRequest& r : requests) {
      const auto size = static_cast<std::int64_t>(random() % 5000);
      (random() % 2 == 0 ? r.fixed : r.per_token) = size;
      const auto a = static_cast<Stage>(random() % 5), b = static_cast<Stage>(random() % 5);
      r.first = std::min(a, b);
      r.last = std::max(a, b);
      r.in_workspace13 = random() % 3 == 0;
    }
    for (const std::int64_t n : {0, 1, 2, 3, 64, 1000003}) expect_sound(requests, n);
  }
}

ScratchRequest scaling(std::int64_t per_token, Stage first, Stage last, bool in13 = false) {
  return {.per_token = per_token, .first = first, .last = last, .in_workspace13 = in13};
}

std::int64_t per_token_of(const std::vector<ScratchRequest>& requests) {
  return WorkspaceLayout(requests, kAlign).formula().per_token;
}

TEST(WorkspaceLayout, MinimalInSimpleCases) {
  using enum Stage;
  // Alive one after the other: the larger of the two.
  EXPECT_EQ(per_token_of({scaling(640, permute, gemm1), scaling(1280, gemm2, combine)}), 1280);
  // Alive at the same stage, if only at one: their sum.
  EXPECT_EQ(per_token_of({scaling(640, permute, gemm2), scaling(1280, gemm2, combine)}), 1920);
  // A chain: each overlaps its neighbours alone.
  EXPECT_EQ(per_token_of({scaling(640, permute, gemm1), scaling(1280, gemm1, activation),
                          scaling(640, activation, gemm2), scaling(1280, gemm2, combine)}),
            1920);
  // Two small ones fit under one large one that comes later.
  EXPECT_EQ(per_token_of({scaling(128, permute, permute), scaling(192, permute, permute),
                          scaling(320, gemm1, combine)}),
            320);
  // One in a gap between two that stay.
  EXPECT_EQ(per_token_of({scaling(640, permute, combine), scaling(320, permute, gemm1),
                          scaling(320, gemm2, combine)}),
            960);
  EXPECT_EQ(per_token_of({}), 0);
}

TEST(WorkspaceLayout, SizesAreRoundedPerSpan) {
  using enum Stage;
  const std::vector<ScratchRequest> requests = {scaling(1, permute, combine),
                                                scaling(65, permute, combine),
                                                {.fixed = 100, .last = combine},
                                                {.fixed = 4, .first = gemm1, .last = gemm1}};
  const WorkspaceFormula formula = WorkspaceLayout(requests, kAlign).formula();
  EXPECT_EQ(formula.per_token, 64 + 128);
  EXPECT_EQ(formula.fixed, 128 + 64);
  EXPECT_EQ(formula.alignment, kAlign);
  EXPECT_EQ(formula.size(10).bytes, 192 + 10 * 192);
}

TEST(WorkspaceLayout, ArenasAreApartAndFixedAndScalingDoNotShare) {
  using enum Stage;
  const std::vector<ScratchRequest> requests = {
      scaling(640, permute, gemm1, true),
      scaling(640, gemm2, combine),
      {.fixed = 6400, .first = activation, .last = activation}};
  const WorkspaceLayout layout(requests, kAlign);
  EXPECT_EQ(layout.formula13().per_token, 640);
  EXPECT_EQ(layout.formula13().fixed, 0);
  EXPECT_EQ(layout.formula2().per_token, 640);
  EXPECT_EQ(layout.formula2().fixed, 6400);  // else the size would be max(a, b * n): not affine
  for (const std::int64_t n : {0, 1, 9, 10, 11, 12345}) expect_sound(requests, n);
}

TEST(WorkspaceLayout, HugeNumbersOfTokens) {
  using enum Stage;
  const std::vector<ScratchRequest> requests = {scaling(15000000, permute, combine),
                                                scaling(28672, gemm2, combine, true)};
  const WorkspaceLayout layout(requests, kAlign);
  std::vector<std::byte*> at(2);
  layout.place(nullptr, nullptr, std::int64_t{1} << 20, at);
  EXPECT_EQ(layout.formula().size(std::int64_t{1} << 20).bytes,
            (round_up(15000000) + 28672) * (std::int64_t{1} << 20));
}

}  // namespace
}  // namespace fusedmoe
