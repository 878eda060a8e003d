// Contract 5.2.3: same plan, same input, same bits: for any number of threads and any runner, run
// after run, and whatever else is in the batch.
#include <gtest/gtest.h>

#include <algorithm>

#include "support/layer.h"
#include "support/runners.h"

namespace fusedmoe::test {
namespace {

class ContractNumbersDtype : public testing::TestWithParam<DType> {};

TEST_P(ContractNumbersDtype, N3_AnyThreadCountAndAnyRunner) {
  MoeConfig config = odd_config(GetParam());
  config.output_dtype = DType::f32;  // nothing is hidden by a rounding
  config.intermediate_size = 601;    // work for 16 threads
  const Layer layer(config);
  for (const std::int64_t num_tokens : {1, 6, 150}) {
    RandomInput input = layer.input(num_tokens);
    Bytes expected;
    int most = 0;
    for (int threads = 1; threads <= 16; ++threads) {
      const FusedMoe plan = layer.plan({.max_threads = threads});
      const Bytes got = run_exact(plan, input);
      if (threads == 1) {
        expected = got;
        expect_oracle(config, layer.weights.view(), input);
      }
      EXPECT_EQ(got, expected) << threads << " own threads";
      for (const auto kind :
           {TestRunner::Kind::sequential, TestRunner::Kind::threads, TestRunner::Kind::gang}) {
        TestRunner runner(kind, threads);
        ApplyContext context;
        context.runner = runner.view();
        EXPECT_EQ(run_exact(plan, input, context), expected)
            << threads << " threads of a runner, kind " << static_cast<int>(kind);
        EXPECT_LE(runner.most_bodies(), threads);
        EXPECT_LE(runner.runs(), kind == TestRunner::Kind::gang ? 1 : 2);
        most = std::max(most, runner.most_bodies());
      }
    }
    EXPECT_GE(most, num_tokens == 150 ? 16 : 2) << "the test does not use the threads it is about";
  }
}

INSTANTIATE_TEST_SUITE_P(All, ContractNumbersDtype,
                         testing::Values(DType::f32, DType::f16, DType::bf16),
                         [](const auto& i) { return std::string(to_string(i.param)); });

TEST(ContractNumbers, N3_ARunnerWithMoreThreadsThanThePlanIsCapped) {
  const Layer layer;
  const FusedMoe plan = layer.plan({.max_threads = 2});
  RandomInput input = layer.input(100);
  const Bytes expected = run_exact(plan, input);
  TestRunner runner(TestRunner::Kind::gang, 64);
  ApplyContext context;
  context.runner = runner.view();
  EXPECT_EQ(run_exact(plan, input, context), expected);
  EXPECT_EQ(runner.most_bodies(), 2);
}

// A batch: rows `tokens` of a large input, in that order.
Bytes run_rows(const FusedMoe& plan, const RandomInput& all,
               const std::vector<std::int64_t>& rows) {
  const auto count = static_cast<std::int64_t>(rows.size());
  const auto gather = [&](const ConstMatrixView& from, Bytes& to) {
    const std::int64_t bytes = bytes_per_element(from.dtype);
    to.resize(static_cast<std::size_t>(count * from.columns * bytes));
    for (std::int64_t i = 0; i < count; ++i) {
      std::memcpy(to.data() + i * from.columns * bytes,
                  static_cast<const std::byte*>(from.data) + rows[i] * from.row_stride * bytes,
                  static_cast<std::size_t>(from.columns * bytes));
    }
    return ConstMatrixView(to.data(), from.dtype, count, from.columns);
  };
  Bytes hidden, weights, ids;
  Bytes output(static_cast<std::size_t>(count * all.output().columns * 4), kDirt);
  plan.apply({output.data(), DType::f32, count, all.output().columns}, gather(all.hidden(), hidden),
             gather(all.topk_weights(), weights), gather(all.topk_ids(), ids));
  return output;
}

TEST(ContractNumbers, N3_ATokensBitsDoNotDependOnItsBatch) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    MoeConfig config = odd_config(dtype);
    config.output_dtype = DType::f32;
    const Layer layer(config);
    const FusedMoe plan = layer.plan({.max_threads = 3});
    const RandomInput all = layer.input(200);
    const std::size_t row_bytes = static_cast<std::size_t>(config.hidden_size) * 4;
    std::vector<Bytes> alone;
    for (std::int64_t t = 0; t < 200; ++t) alone.push_back(run_rows(plan, all, {t}));
    std::mt19937_64 random(7);
    for (std::int64_t size = 1; size <= 200; size += size < 20 ? 1 : 13) {
      std::vector<std::int64_t> rows;
      for (std::int64_t i = 0; i < size; ++i) {
        rows.push_back(static_cast<std::int64_t>(random() % 200));  // repeats are fine
      }
      const Bytes got = run_rows(plan, all, rows);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        ASSERT_EQ(std::memcmp(got.data() + i * row_bytes,
                              alone[static_cast<std::size_t>(rows[i])].data(), row_bytes),
                  0)
            << "token " << rows[i] << " in a batch of " << size;
      }
    }
  }
}

TEST(ContractNumbers, B121_AHundredRunsGiveTheSameBits) {
  MoeConfig config = odd_config();
  config.num_experts = config.top_k = 8;
  const Layer layer(config);
  const FusedMoe plan = layer.plan({.max_threads = 4});
  RandomInput input = layer.input(64);
  const Bytes expected = run_exact(plan, input);
  for (int i = 0; i < 100; ++i) ASSERT_EQ(run_exact(plan, input), expected) << "run " << i;
  EXPECT_EQ(run_exact(layer.plan({.max_threads = 1}), input), expected) << "another plan";
}

TEST(ContractNumbers, N8_EveryInstructionSetIsWithinToleranceOfTheOracle) {
  for (const std::string& isa : isas()) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      PlanOptions options;
      options.isa = isa;
      const Layer layer(odd_config(dtype));
      const FusedMoe plan = layer.plan(options);
      RandomInput input = layer.input(50);
      run_exact(plan, input);
      expect_oracle(layer.config, layer.weights.view(), input);
    }
  }
}

}  // namespace
}  // namespace fusedmoe::test
