// Contract 5.3: every field of the tensors of a call, wrong in turn; ids, zero tokens, zero local
// experts, alignment. After a refusal nothing was written and the plan is usable.
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "support/layer.h"
#include "support/runners.h"

namespace fusedmoe::test {
namespace {

struct Call {
  MatrixView output;
  ConstMatrixView hidden, topk_weights, topk_ids;
  ApplyContext context = {};
};

Call call_of(const RandomInput& input) {
  return {input.output(), input.hidden(), input.topk_weights(), input.topk_ids()};
}

class ContractInputCall : public testing::Test {
 protected:
  // The call is refused with all of `parts`, writes nothing, and a sound one works afterwards.
  void refuse(const std::function<void(Call&)>& spoil, std::initializer_list<std::string> parts) {
    Call call = call_of(input_);
    spoil(call);
    input_.dirty_output();
    expect_contains(error_of(ErrorCode::invalid_argument,
                             [&] {
                               plan_.apply(call.output, call.hidden, call.topk_weights,
                                           call.topk_ids, scratch_, call.context);
                             }),
                    parts);
    EXPECT_TRUE(untouched(input_));
    EXPECT_EQ(run(plan_, input_, scratch_), expected_);
  }

  Layer layer_;
  FusedMoe plan_ = layer_.plan();
  RandomInput input_ = layer_.input(17);
  Scratch scratch_{plan_.workspace_size(17).bytes};
  Bytes expected_ = run(plan_, input_, scratch_);
};

TEST_F(ContractInputCall, I6_EveryFieldOfEveryTensor) {
  const auto each = [&](const std::string& name, auto member, const std::string& wanted,
                        DType wrong, const std::string& wrong_name, std::int64_t columns) {
    const std::string got = std::to_string(columns);
    refuse([&](Call& c) { (c.*member).dtype = wrong; },
           {name + ": expected " + wanted + " [num_tokens=17, ", "=" + got + "]",
            "got " + wrong_name + " [17, " + got + "]", "; cast it"});
    refuse([&](Call& c) { (c.*member).dtype = static_cast<DType>(77); },
           {name + ": expected " + wanted, "got unknown [17, " + got + "]"});
    refuse([&](Call& c) { (c.*member).columns -= 1; },
           {name + ": expected " + wanted, "[17, " + std::to_string(columns - 1) + "]"});
    refuse([&](Call& c) { (c.*member).columns = -columns; }, {name, "[17, -" + got + "]"});
    refuse([&](Call& c) { (c.*member).data = nullptr; }, {name, "got a null pointer"});
    refuse([&](Call& c) { (c.*member).row_stride = columns - 1; },
           {name + ".row_stride", "at least " + got, "got " + std::to_string(columns - 1)});
    refuse([&](Call& c) { (c.*member).row_stride = 0; }, {name + ".row_stride", "got 0"});
    refuse([&](Call& c) { (c.*member).row_stride = -500; }, {name + ".row_stride", "got -500"});
    // Rows beyond any memory: refused, not wrapped around.
    refuse([&](Call& c) { (c.*member).row_stride = std::numeric_limits<std::int64_t>::max(); },
           {name + ".row_stride", "got 9223372036854775807"});
  };
  each("output", &Call::output, "bfloat16", DType::f32, "float32", 131);
  each("hidden", &Call::hidden, "bfloat16", DType::f16, "float16", 131);
  each("topk_weights", &Call::topk_weights, "float32, float16 or bfloat16", DType::f64, "float64",
       3);
  each("topk_ids", &Call::topk_ids, "int32 or int64", DType::i16, "int16", 3);

  refuse([](Call& c) { c.output.rows = 16; }, {"output", "num_tokens=17", "[16, 131]"});
  refuse([](Call& c) { c.topk_weights.rows = 18; }, {"topk_weights", "num_tokens=17", "[18, 3]"});
  refuse([](Call& c) { c.topk_ids.rows = 0; }, {"topk_ids", "num_tokens=17", "[0, 3]"});
  refuse([](Call& c) { c.hidden.rows = 16; }, {"num_tokens=16", "[17, "});
  refuse([](Call& c) { c.hidden.rows = -1; }, {"hidden", "-1"});
  refuse([](Call& c) { c.hidden.rows = 0; }, {"num_tokens=0"});
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  refuse(
      [](Call& c) {
        c.hidden.rows = c.output.rows = c.topk_ids.rows = c.topk_weights.rows = kHuge;
      },
      {"hidden", std::to_string(kHuge)});
}

TEST_F(ContractInputCall, I6_TheExampleOfTheDesign) {
  // topk_ids: expected int32 or int64 [num_tokens=17, top_k=3], got int16 [17, 3]; cast it
  Call call = call_of(input_);
  call.topk_ids.dtype = DType::i16;
  EXPECT_EQ(
      error_of(ErrorCode::invalid_argument,
               [&] { plan_.apply(call.output, call.hidden, call.topk_weights, call.topk_ids); }),
      "topk_ids: expected int32 or int64 [num_tokens=17, top_k=3], got int16 [17, 3]; "
      "cast it");
}

TEST_F(ContractInputCall, I6_ContextOfTheCall) {
  int anything = 0;
  refuse([&](Call& c) { c.context.queue = &anything; }, {"context.queue", "expected null"});
  ThreadRunner runner;
  refuse([&](Call& c) { c.context.runner = &runner; }, {"context.runner", "a null function"});
  const TestRunner sound(TestRunner::Kind::threads, 2);
  runner = *sound.view();
  runner.num_threads = 0;
  refuse([&](Call& c) { c.context.runner = &runner; }, {"context.runner", "got 0"});
  const auto map = [&](std::vector<std::int32_t> entries, const std::string& got) {
    refuse([&](Call& c) { c.context.expert_map = entries; },
           {"context.expert_map", "num_experts=7", "got " + got});
  };
  map({0, 1, 2, 3, 4, 5}, "6 entries");
  map({0, 1, 2, 3, 4, 5, -1}, "6 local experts");
  map({0, 1, 2, 3, 4, 5, 7}, "expert_map[6] = 7");
  map({0, 1, 2, 3, 4, 5, -2}, "expert_map[6] = -2");
  map({0, 1, 2, 3, 4, 5, 3}, "expert_map[6] = 3");
}

TEST(ContractInput, I2_B023_IdsOutOfRangeNameRowAndValue) {
  MoeConfig config = odd_config();
  config.num_experts = 4;
  config.top_k = 2;
  for (const bool mapped : {false, true}) {
    for (const DType ids : {DType::i32, DType::i64}) {
      const Layer layer(config, 1, mapped ? 2 : 4);
      const FusedMoe plan = layer.plan(with_map(mapped ? ExpertMap::linear(1, 2) : ExpertMap()));
      const std::int64_t huge = ids == DType::i64 ? std::int64_t{1} << 40 : 1073741824;
      for (const auto& [row, k, id] : {std::tuple<int, int, std::int64_t>{1, 0, huge},
                                       {2, 0, 4},
                                       {3, 0, -7},
                                       {3, 1, -2},
                                       {0, 1, std::numeric_limits<std::int32_t>::min()}}) {
        RandomInput input(config, {.num_tokens = 4, .ids_dtype = ids}, 7);
        input.set_id(row, k, id);
        expect_contains(error_of(ErrorCode::invalid_argument, [&] { run_exact(plan, input); }),
                        {"topk_ids", "num_experts=4", "got " + std::to_string(id),
                         "[" + std::to_string(row) + ", " + std::to_string(k) + "]"});
        EXPECT_TRUE(untouched(input));
        input.set_id(row, k, -1);
        EXPECT_NO_THROW(run_exact(plan, input));
        EXPECT_NO_THROW(plan.check_faults());
      }
    }
  }
}

TEST(ContractInput, I1_ZeroTokensReadNothing) {
  const Layer layer;
  FusedMoe plan = layer.plan({.counters = true});
  const DType bf16 = DType::bf16;
  const std::int64_t h_size = layer.config.hidden_size;
  plan.apply({nullptr, bf16, 0, h_size}, {nullptr, bf16, 0, h_size}, {nullptr, DType::f32, 0, 3},
             {nullptr, DType::i32, 0, 3});
  plan.apply({}, {}, {}, {}, Workspace(nullptr, 0));
  EXPECT_EQ(plan.workspace_size(0).bytes, plan.workspace_formula().fixed);
  RandomInput input = layer.input(3);
  run_exact(plan, input);
  expect_oracle(layer.config, layer.weights.view(), input);
  EXPECT_EQ(plan.counters().tokens, 3U);
}

TEST(ContractInput, I1_ZeroLocalExpertsGiveZeros) {
  const MoeConfig config = odd_config();
  const auto none = ExpertMap::explicit_map(std::vector<std::int32_t>(7, -1));
  for (const WeightFormat format : {WeightFormat::bf16, WeightFormat::int4}) {
    ExpertWeights weights;  // whatever they say, nothing of them is read
    weights.w13.format = weights.w2.format = format;
    PlanOptions options = with_map(none);
    options.counters = true;
    FusedMoe plan = FusedMoe::create(config, weights, options);
    EXPECT_EQ(plan.num_local_experts(), 0);
    EXPECT_FALSE(plan.describe().empty());
    RandomInput input(config, {.num_tokens = 29, .output_padding = 2}, 3);
    run_exact(plan, input);
    for (std::int64_t t = 0; t < 29; ++t) {
      for (std::int64_t h = 0; h < config.hidden_size; ++h) {
        ASSERT_EQ(element(input.output(), t, h), 0.0);
      }
    }
    EXPECT_TRUE(plan.counters().rows_per_expert.empty());
    plan.refresh(weights);
    EXPECT_EQ(plan.weights_version(), 2U);
    input.set_id(0, 0, 7);  // ids are global: checked all the same
    error_of(ErrorCode::invalid_argument, [&] { run_exact(plan, input); });
  }
}

TEST(ContractInput, B116_OneElementOffAnyBoundaryIsFineOneByteIsNot) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    const Layer layer(odd_config(dtype));
    const FusedMoe plan = layer.plan();
    for (const DType ids : {DType::i32, DType::i64}) {
      RandomInput input(layer.config,
                        {.num_tokens = 11, .ids_dtype = ids, .topk_weights_dtype = dtype}, 5);
      const Bytes expected = run_exact(plan, input);
      const auto dense = [](const ConstMatrixView& v, Scratch& to) {
        const auto bytes =
            static_cast<std::size_t>(v.rows * v.columns * bytes_per_element(v.dtype));
        std::memcpy(to.span().data(), v.data, bytes);
        return ConstMatrixView(to.span().data(), v.dtype, v.rows, v.columns);
      };
      for (int which = 0; which < 4; ++which) {
        for (const bool by_byte : {false, true}) {
          const auto beyond = [&](int tensor, DType type) {
            return tensor != which ? 0 : by_byte ? 1 : bytes_per_element(type);
          };
          Scratch hidden(11 * 131 * 4, kDirt, beyond(0, dtype));
          Scratch output(11 * 131 * 4, kDirt, beyond(1, dtype));
          Scratch weights(11 * 3 * 4, kDirt, beyond(2, dtype));
          Scratch id_room(11 * 3 * 8, kDirt, beyond(3, ids));
          const auto call = [&] {
            plan.apply({output.span().data(), dtype, 11, 131}, dense(input.hidden(), hidden),
                       dense(input.topk_weights(), weights), dense(input.topk_ids(), id_room));
          };
          if (by_byte) {
            const char* names[] = {"hidden", "output", "topk_weights", "topk_ids"};
            expect_contains(error_of(ErrorCode::invalid_argument, call),
                            {names[which], "multiple of", "align it"});
            EXPECT_EQ(output.span()[0], kDirt);
          } else {
            call();
            EXPECT_EQ(std::memcmp(output.span().data(), expected.data(), expected.size()), 0);
          }
        }
      }
    }
  }
}

TEST(ContractInput, I3_AnySizesWork) {
  // No multiples, no list: small primes, ones, and more choices than a vector is wide.
  for (const auto& [h, i, e, k] : {std::tuple<int, int, int, int>{1, 1, 1, 1},
                                   {1, 2, 3, 3},
                                   {2, 1, 5, 1},
                                   {17, 31, 19, 19},
                                   {97, 3, 2, 1},
                                   {3, 97, 13, 7},
                                   {129, 65, 33, 11}}) {
    MoeConfig config;
    config.hidden_size = h;
    config.intermediate_size = i;
    config.num_experts = e;
    config.top_k = k;
    const Layer layer(config);
    const FusedMoe plan = layer.plan();
    for (const std::int64_t num_tokens : {1, 13}) {
      RandomInput input = layer.input(num_tokens);
      run_exact(plan, input);
      expect_oracle(config, layer.weights.view(), input);
    }
  }
}

}  // namespace
}  // namespace fusedmoe::test
