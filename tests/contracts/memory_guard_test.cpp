// Contract 5.1: with an unmapped page directly in front of or behind every buffer of exactly the
// size that was asked for, a call neither reads nor writes a byte beyond.
#include <gtest/gtest.h>

#include <deque>
#include <ostream>
#include <string>
#include <tuple>

#include "formats/format.h"
#include "formats/scales.h"
#include "support/guarded_buffer.h"
#include "support/layer.h"

namespace fusedmoe::test {
namespace {

// Copies of a layer's weights and of a call's tensors, each between guards.
class Guarded {
 public:
  explicit Guarded(Side side) : side_(side) {}

  std::byte* copy(const void* data, std::int64_t bytes) {
    return buffers_.emplace_back(data, bytes, side_).data();
  }
  std::span<std::byte> fresh(std::int64_t bytes) {
    return buffers_.emplace_back(bytes, side_).span();
  }
  ConstMatrixView copy(const ConstMatrixView& view) {
    ConstMatrixView result = view;
    result.data = copy(view.data, ((view.rows - 1) * view.row_stride + view.columns) *
                                      bytes_per_element(view.dtype));
    return result;
  }
  WeightTensor copy(const WeightTensor& tensor) {
    if (tensor.empty()) return tensor;
    WeightTensor result = tensor;
    const std::int64_t experts = tensor.experts;
    result.data =
        copy(tensor.data, format_info(tensor.format).bytes(experts * expert_stride_of(tensor)));
    WeightScales& scales = result.scales;
    const std::int64_t count = experts * scale_shape(tensor).count();
    if (scales.data != nullptr) {
      scales.data = copy(scales.data, count * bytes_per_scale(scales.type));
    }
    if (scales.zero_points != nullptr) scales.zero_points = copy(scales.zero_points, count);
    if (scales.global != nullptr) {
      scales.global = reinterpret_cast<const float*>(
          copy(scales.global, experts * globals_per_expert(tensor) * 4));
    }
    return result;
  }
  BiasTensor copy(const BiasTensor& bias) {
    BiasTensor result = bias;
    result.data = copy(bias.data, bias.experts * bias.size * bytes_per_element(bias.dtype));
    return result;
  }
  ExpertWeights copy(const ExpertWeights& weights) {
    ExpertWeights result = weights;
    result.w13 = copy(weights.w13);
    result.w13_up = copy(weights.w13_up);
    result.w2 = copy(weights.w2);
    result.w13_bias = copy(weights.w13_bias);
    result.w2_bias = copy(weights.w2_bias);
    return result;
  }

 private:
  Side side_;
  std::deque<GuardedBuffer> buffers_;
};

struct Case {
  DType dtype;
  std::string isa;
  WeightStorage storage;
  Side side;
};

// For messages; bytes would be printed otherwise, those of padding as well.
void PrintTo(const Case& c, std::ostream* out) { *out << to_string(c.dtype) << " " << c.isa; }

class ContractMemoryGuard : public testing::TestWithParam<Case> {};

TEST_P(ContractMemoryGuard, M2_NoByteOutsideOfAnyBuffer) {
  const Case& p = GetParam();
  MoeConfig config = odd_config(p.dtype);
  const RandomWeights weights(config, config.num_experts,
                              {.w13_format = format_of(p.dtype),
                               .w2_format = format_of(p.dtype),
                               .w2_layout = WeightLayout::kn,
                               .gate_up_apart = p.side == Side::back,
                               .w13_bias = true,
                               .w2_bias = true,
                               .bias_dtype = p.dtype},
                              3);
  Guarded memory(p.side);
  const ExpertWeights guarded = memory.copy(weights.view());
  PlanOptions options;
  options.isa = p.isa;
  options.max_threads = 2;
  options.weight_storage = p.storage;
  if (p.storage == WeightStorage::caller) {
    options.storage = memory.fresh(FusedMoe::packed_weights_size(config, guarded, options).bytes);
  }
  FusedMoe plan = FusedMoe::create(config, guarded, options);
  plan.refresh(guarded);
  for (const std::int64_t num_tokens : {1, 2, 5, 61}) {
    RandomInput input(config,
                      {.num_tokens = num_tokens,
                       .topk_weights_dtype = p.dtype,
                       .hidden_padding = 3,
                       .output_padding = 1,
                       .topk_padding = 2,
                       .skip_share = 0.1,
                       .hot_share = 0.4},
                      static_cast<std::uint64_t>(num_tokens));
    const Bytes expected = run_exact(plan, input);
    expect_oracle(config, weights.view(), input);

    Guarded call(p.side);
    const ConstMatrixView hidden = call.copy(input.hidden());
    const ConstMatrixView topk_weights = call.copy(input.topk_weights());
    const ConstMatrixView topk_ids = call.copy(input.topk_ids());
    MatrixView output = input.output();
    const std::int64_t bytes =
        ((num_tokens - 1) * output.row_stride + output.columns) * bytes_per_element(output.dtype);
    const auto result = call.fresh(bytes);
    const auto matches = [&] {
      const std::size_t row_bytes = static_cast<std::size_t>(output.columns) *
                                    static_cast<std::size_t>(bytes_per_element(output.dtype));
      for (std::int64_t t = 0; t < num_tokens; ++t) {
        const auto* row = result.data() + t * output.row_stride * bytes_per_element(output.dtype);
        if (std::memcmp(row, expected.data() + static_cast<std::size_t>(t) * row_bytes,
                        row_bytes) != 0) {
          return false;
        }
      }
      std::fill(result.begin(), result.end(), kDirt);
      return true;
    };
    output.data = result.data();

    plan.apply(output, hidden, topk_weights, topk_ids,
               Workspace(call.fresh(plan.workspace_size(num_tokens).bytes)));
    EXPECT_TRUE(matches()) << "one span";
    const FusedMoe::TwoSpans two = plan.workspace_sizes_13_2(num_tokens);
    plan.apply(output, hidden, topk_weights, topk_ids,
               {call.fresh(two.workspace13.bytes), call.fresh(two.workspace2.bytes)});
    EXPECT_TRUE(matches()) << "two spans";
    plan.apply(output, hidden, topk_weights, topk_ids,
               Workspace(call.fresh(plan.min_workspace_size().bytes)));
    EXPECT_TRUE(matches()) << "token by token";
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const std::string& isa : isas()) {
      for (const WeightStorage storage : {WeightStorage::caller, WeightStorage::borrowed}) {
        for (const Side side : {Side::front, Side::back}) {
          all.push_back({dtype, isa, storage, side});
        }
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, ContractMemoryGuard, testing::ValuesIn(cases()), [](const auto& i) {
  const Case& p = i.param;
  return std::string(to_string(p.dtype)) + "_" + p.isa +
         (p.storage == WeightStorage::caller ? "_packed" : "_borrowed") +
         (p.side == Side::front ? "_front" : "_back");
});

TEST(ContractMemory, M2_TheGuardItselfWorks) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const GuardedBuffer back(std::int64_t{100}, Side::back);
  const GuardedBuffer front(std::int64_t{100}, Side::front);
  EXPECT_DEATH(*const_cast<volatile std::byte*>(back.data() + 100) = std::byte{1}, "");
  EXPECT_DEATH(*const_cast<volatile std::byte*>(front.data() - 1) = std::byte{1}, "");
}

}  // namespace
}  // namespace fusedmoe::test
