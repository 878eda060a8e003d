// Contract 5.3.4: output may be exactly hidden; any other overlap among output, hidden, topk_ids,
// topk_weights and workspace throws. Slices of one buffer that lie side by side do not overlap.
#include <gtest/gtest.h>

#include <array>
#include <memory>

#include "support/layer.h"

namespace fusedmoe::test {
namespace {

constexpr std::int64_t kTokens = 6;

// One arena; every tensor has a place of its own, or one that reaches into another's.
struct Places {
  enum { output, hidden, weights, ids, workspace13, workspace, kCount };
  static constexpr std::array<const char*, kCount> names = {
      "output", "hidden", "topk_weights", "topk_ids", "workspace13", "workspace"};
  std::array<std::int64_t, kCount> offset{}, bytes{};
};

class ContractOverlap : public testing::Test {
 protected:
  ContractOverlap() {
    const FusedMoe::TwoSpans two = plan_.workspace_sizes_13_2(kTokens);
    places_.bytes = {kTokens * 131 * 2, kTokens * 131 * 2,     kTokens * 3 * 4,
                     kTokens * 3 * 4,   two.workspace13.bytes, two.workspace2.bytes};
    // Room for the largest between any two, so that a displaced one meets one other at most.
    const std::int64_t step = 2 * *std::max_element(places_.bytes.begin(), places_.bytes.end());
    for (int i = 0; i < Places::kCount; ++i) places_.offset[i] = 1024 + i * step;
    arena_ = std::make_unique<Scratch>(1024 + Places::kCount * step);
  }

  void call(const Places& p) {
    std::byte* base = arena_->span().data();
    const RandomInput& in = input_;
    arena_->fill(kDirt);
    const auto put = [&](int place, const ConstMatrixView& view) {
      std::memcpy(base + p.offset[place], view.data, static_cast<std::size_t>(p.bytes[place]));
      return ConstMatrixView(base + p.offset[place], view.dtype, view.rows, view.columns);
    };
    const ConstMatrixView hidden = put(Places::hidden, in.hidden());
    const ConstMatrixView weights = put(Places::weights, in.topk_weights());
    const ConstMatrixView ids = put(Places::ids, in.topk_ids());
    before_ = checksum(base, static_cast<std::int64_t>(arena_->span().size()));
    const auto span = [&](int place) {
      return std::span(base + p.offset[place], static_cast<std::size_t>(p.bytes[place]));
    };
    plan_.apply({base + p.offset[Places::output], DType::bf16, kTokens, 131}, hidden, weights, ids,
                {span(Places::workspace13), span(Places::workspace)});
  }
  bool arena_unchanged() const {
    return checksum(arena_->span().data(), static_cast<std::int64_t>(arena_->span().size())) ==
           before_;
  }
  Bytes output(const Places& p) const {
    const auto from = arena_->span().subspan(p.offset[Places::output], p.bytes[Places::output]);
    return {from.begin(), from.end()};
  }

  Layer layer_;
  FusedMoe plan_ = layer_.plan({.max_threads = 1});
  RandomInput input_{layer_.config, {.num_tokens = kTokens}, 3};
  Bytes expected_ = run_exact(plan_, input_);
  Places places_;
  std::unique_ptr<Scratch> arena_;
  std::uint64_t before_ = 0;
};

TEST_F(ContractOverlap, I4_EveryPairIsRefused) {
  call(places_);
  EXPECT_EQ(output(places_), expected_);
  for (int a = 0; a < Places::kCount; ++a) {
    for (int b = 0; b < Places::kCount; ++b) {
      if (a == b) continue;
      // Inputs are only read: they may lie in one another.
      const auto is_input = [](int i) {
        return i == Places::hidden || i == Places::weights || i == Places::ids;
      };
      if (is_input(a) && is_input(b)) continue;
      const bool exact_in_place = a + b == Places::output + Places::hidden;
      for (const bool tail : {false, true}) {
        Places p = places_;  // a begins in the first or the last 64 bytes of b
        p.offset[a] = p.offset[b] + (tail ? (p.bytes[b] - 1) / 64 * 64 : 0);
        if (exact_in_place && !tail) continue;
        SCOPED_TRACE(std::string(Places::names[a]) + (tail ? " on the tail of " : " on ") +
                     Places::names[b]);
        expect_contains(error_of(ErrorCode::invalid_argument, [&] { call(p); }),
                        {Places::names[a], Places::names[b], "expected memory apart"});
        EXPECT_TRUE(arena_unchanged());
      }
    }
  }
  call(places_);
  EXPECT_EQ(output(places_), expected_);
}

TEST_F(ContractOverlap, I4_TouchingIsNotOverlapping) {
  Places p = places_;
  p.offset[Places::output] = p.offset[Places::hidden] + p.bytes[Places::hidden];
  call(p);
  EXPECT_EQ(output(p), expected_);
  p.offset[Places::output] = p.offset[Places::hidden] - p.bytes[Places::output];
  call(p);
  EXPECT_EQ(output(p), expected_);
  p = places_;
  p.offset[Places::workspace] = p.offset[Places::workspace13] + p.bytes[Places::workspace13];
  call(p);
  EXPECT_EQ(output(p), expected_);
}

TEST_F(ContractOverlap, I4_InPlaceEqualsOutOfPlace) {
  Places p = places_;
  p.offset[Places::output] = p.offset[Places::hidden];
  call(p);
  EXPECT_EQ(output(p), expected_);
  for (const std::int64_t shift : {-262, -2, 2, 262}) {  // rows or elements beside: not exactly
    p.offset[Places::output] = p.offset[Places::hidden] + shift;
    error_of(ErrorCode::invalid_argument, [&] { call(p); });
    EXPECT_TRUE(arena_unchanged());
  }
}

TEST(ContractInput, I4_InPlaceForEveryDtypeThreadCountAndChunk) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const Layer layer(odd_config(dtype));
    for (const int threads : {1, 3}) {
      const FusedMoe plan = layer.plan({.max_threads = threads});
      RandomInput input = layer.input(37);
      const Bytes expected = run_exact(plan, input);
      for (const std::int64_t chunk : {1, 10, 37}) {
        RandomInput copy = layer.input(37);
        const ConstMatrixView hidden = copy.hidden();
        const MatrixView in_place(const_cast<void*>(hidden.data), dtype, 37, 131,
                                  hidden.row_stride);
        Scratch scratch(plan.workspace_size(chunk).bytes);
        plan.apply(in_place, hidden, copy.topk_weights(), copy.topk_ids(), scratch);
        Bytes got;
        for (std::int64_t t = 0; t < 37; ++t) {
          const auto* row = static_cast<const std::byte*>(hidden.data) +
                            t * hidden.row_stride * bytes_per_element(dtype);
          got.insert(got.end(), row, row + 131 * bytes_per_element(dtype));
        }
        EXPECT_EQ(got, expected);
      }
    }
  }
}

TEST(ContractInput, I4_ColumnSlicesOfOneBufferAreAllowed) {
  // [token][hidden | output | free]: rows of both interleave, and no byte is in both.
  const Layer layer;
  const FusedMoe plan = layer.plan({.max_threads = 2});
  RandomInput input = layer.input(15);
  const Bytes expected = run_exact(plan, input);
  constexpr std::int64_t kStride = 300;
  std::vector<std::uint16_t> both(15 * kStride, 0xffff);
  for (std::int64_t t = 0; t < 15; ++t) {
    std::memcpy(
        &both[static_cast<std::size_t>(t * kStride)],
        static_cast<const std::byte*>(input.hidden().data) + t * input.hidden().row_stride * 2,
        131 * 2);
  }
  const ConstMatrixView hidden(both.data(), DType::bf16, 15, 131, kStride);
  const auto apply_at = [&](std::int64_t column) {
    plan.apply({both.data() + column, DType::bf16, 15, 131, kStride}, hidden, input.topk_weights(),
               input.topk_ids());
  };
  apply_at(131);
  for (std::size_t t = 0; t < 15; ++t) {
    EXPECT_EQ(std::memcmp(&both[t * kStride + 131], expected.data() + t * 262, 262), 0);
    EXPECT_EQ(both[t * kStride + 262], 0xffff);
  }
  error_of(ErrorCode::invalid_argument, [&] { apply_at(130); });            // one column in common
  error_of(ErrorCode::invalid_argument, [&] { apply_at(kStride - 130); });  // wraps into hidden
}

}  // namespace
}  // namespace fusedmoe::test
