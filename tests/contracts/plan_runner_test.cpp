// Contract 5.4.3: a plan that lives on an engine's own threads. The runner in its options packs and
// applies, with the bits of the library's pool; that of a call wins over it. That no thread is
// started is tested in tests/isolated.
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "support/layer.h"
#include "support/runners.h"

namespace fusedmoe::test {
namespace {

using Kind = TestRunner::Kind;

PlanOptions on(const TestRunner& runner, int max_threads = 0) {
  PlanOptions options;
  options.runner = runner.view();
  options.max_threads = max_threads;
  return options;
}

// Work for 16 threads in 150 tokens.
MoeConfig wide_config() {
  MoeConfig config = odd_config();
  config.intermediate_size = 601;
  return config;
}

class ContractRunnerDtype : public testing::TestWithParam<DType> {};

TEST_P(ContractRunnerDtype, T3_PacksTheBytesAndAppliesWithTheBitsOfThePool) {
  const Layer layer(odd_config(GetParam()));
  RandomInput decode = layer.input(1), prefill = layer.input(70);
  for (const std::string& isa : isas()) {
    PlanOptions options;
    options.isa = isa;
    const std::int64_t bytes =
        FusedMoe::packed_weights_size(layer.config, layer.weights.view(), options).bytes;
    Scratch pools(bytes), runners(bytes);
    options.weight_storage = WeightStorage::caller;
    options.storage = pools.span();
    options.max_threads = 3;
    const FusedMoe of_pool = layer.plan(options);
    const Bytes expected_decode = run_exact(of_pool, decode);
    const Bytes expected_prefill = run_exact(of_pool, prefill);
    expect_oracle(layer.config, layer.weights.view(), prefill);
    options.storage = runners.span();
    options.max_threads = 0;
    for (const Kind kind : {Kind::sequential, Kind::threads, Kind::gang}) {
      for (const int threads : {1, 2, 5}) {
        for (const ExpertWeights& weights : {layer.weights.view(), layer.weights.as_source()}) {
          SCOPED_TRACE(isa + ", threads " + std::to_string(threads));
          TestRunner runner(kind, threads);
          options.runner = runner.view();
          runners.fill(std::byte{0x11});
          const FusedMoe plan = FusedMoe::create(layer.config, weights, options);
          EXPECT_TRUE(std::equal(pools.span().begin(), pools.span().end(), runners.span().begin()));
          EXPECT_EQ(runner.most_bodies(), threads == 1 ? 0 : threads) << "who packed?";
          EXPECT_EQ(run_exact(plan, decode), expected_decode);
          EXPECT_EQ(run_exact(plan, prefill), expected_prefill);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ContractRunnerDtype,
                         testing::Values(DType::f32, DType::f16, DType::bf16),
                         [](const auto& i) { return std::string(to_string(i.param)); });

TEST(ContractRunner, T3_WhateverReadsWeightsOrAppliesRunsOnIt) {
  const Layer layer;
  TestRunner runner(Kind::sequential, 3), of_call(Kind::sequential, 3);
  const auto runs = [&](const auto& f) {
    const int before = runner.runs();
    f();
    return runner.runs() - before;
  };
  std::atomic<std::uint64_t> version{1};
  ExpertWeights weights = layer.weights.view();
  weights.version = &version;
  PlanOptions options = on(runner);
  options.on_stale = StalePolicy::refresh;
  std::optional<FusedMoe> plan;
  EXPECT_EQ(runs([&] {
              EXPECT_TRUE(FusedMoe::supports(layer.config, weights, options).ok);
              (void)FusedMoe::packed_weights_size(layer.config, weights, options);
            }),
            0);
  EXPECT_GT(runs([&] { plan = FusedMoe::create(layer.config, weights, options); }), 0);
  EXPECT_GT(runs([&] { plan->refresh(weights); }), 0);
  const std::int64_t one[] = {4};
  ExpertWeights slice = layer.weights.as_source().source(4);
  EXPECT_GT(runs([&] { plan->refresh_experts(one, slice); }), 0);
  plan->release_weights();
  EXPECT_GT(runs([&] { plan->refresh(weights); }), 0);
  EXPECT_EQ(runner.most_bodies(), 3);

  RandomInput input = layer.input(40);
  Bytes expected;
  EXPECT_GT(runs([&] { expected = run_exact(*plan, input); }), 0);
  expect_oracle(layer.config, layer.weights.view(), input);
  ++version;  // the call brings threads to multiply; the plan's read the weights again
  EXPECT_GT(runs([&] { EXPECT_EQ(run_exact(*plan, input, {.runner = of_call.view()}), expected); }),
            0);
  EXPECT_EQ(plan->weights_version(), 5U);

  options.weight_storage = WeightStorage::borrowed;
  EXPECT_EQ(runs([&] { plan = FusedMoe::create(layer.config, weights, options); }), 0)
      << "nothing to pack";
  EXPECT_GT(runs([&] { EXPECT_EQ(run_exact(*plan, input), expected); }), 0);
}

TEST(ContractRunner, T3_TheRunnerOfTheCallWins) {
  const Layer layer;
  RandomInput input = layer.input(40);
  const Bytes expected = run_exact(layer.plan({.max_threads = 1}), input);
  for (const Kind kind : {Kind::sequential, Kind::gang}) {
    TestRunner of_plan(kind, 3), of_call(Kind::sequential, 2);
    const FusedMoe plan = layer.plan(on(of_plan));
    const int before = of_plan.runs();
    EXPECT_EQ(run_exact(plan, input, {.runner = of_call.view()}), expected);
    EXPECT_EQ(of_plan.runs(), before);
    EXPECT_EQ(of_call.runs(), 2);
    EXPECT_EQ(run_exact(plan, input), expected);
    EXPECT_EQ(of_plan.runs(), before + (kind == Kind::gang ? 1 : 2));
    EXPECT_EQ(of_call.runs(), 2);
  }
}

TEST(ContractRunner, T3_TheStructIsCopied) {
  const Layer layer;
  RandomInput input = layer.input(40);
  const Bytes expected = run_exact(layer.plan({.max_threads = 1}), input);
  TestRunner runner(Kind::sequential, 3), other(Kind::sequential, 2);
  auto view = std::make_unique<ThreadRunner>(*runner.view());
  PlanOptions options;
  options.runner = view.get();
  std::optional<FusedMoe> made = layer.plan(options);
  *view = *other.view();
  const int before = runner.runs();
  EXPECT_EQ(run_exact(*made, input), expected);
  made->refresh(layer.weights.view());
  EXPECT_GT(runner.runs(), before + 1);
  view.reset();
  FusedMoe plan = std::move(*made);  // the copy goes with the plan
  made.reset();
  plan.refresh(layer.weights.view());
  EXPECT_EQ(run_exact(plan, input), expected);
  EXPECT_EQ(other.runs(), 0);
}

TEST(ContractRunner, T3_ThreadsAreTheRunnersWhereverTheCallerIsPinned) {
  const Layer layer;
  std::thread pinned([&] {
    cpu_set_t all;
    ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
    int core = 0;
    while (!CPU_ISSET(core, &all)) ++core;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    TestRunner runner(Kind::sequential, 5);
    const FusedMoe plan = layer.plan(on(runner));
    EXPECT_EQ(plan.num_threads(), 5);
    EXPECT_EQ(runner.most_bodies(), 5);
    expect_contains(plan.describe(), {"threads 5 (options.runner)\n"});
    EXPECT_EQ(plan.workspace_formula().fixed,
              layer.plan({.max_threads = 5}).workspace_formula().fixed);
  });
  pinned.join();
}

TEST(ContractRunner, T3_MaxThreadsCapsTheRunner) {
  const Layer layer(wide_config());
  RandomInput input = layer.input(150);
  const Bytes expected = run_exact(layer.plan({.max_threads = 1}), input);
  for (const int many : {64, 5000}) {
    TestRunner runner(Kind::gang, many);
    FusedMoe plan = layer.plan(on(runner, 2));
    plan.refresh(layer.weights.view());
    EXPECT_EQ(run_exact(plan, input), expected);
    EXPECT_EQ(runner.most_bodies(), 2);
    EXPECT_EQ(plan.num_threads(), 2);
    expect_contains(plan.describe(), {"threads 2 (options.max_threads, on options.runner)"});
  }
  // A plan for more threads than its runner has: a call may bring them.
  TestRunner runner(Kind::sequential, 3), more(Kind::sequential, 8);
  const FusedMoe plan = layer.plan(on(runner, 8));
  EXPECT_EQ(plan.num_threads(), 8);
  EXPECT_EQ(run_exact(plan, input), expected);
  EXPECT_EQ(runner.most_bodies(), 3);
  EXPECT_EQ(run_exact(plan, input, {.runner = more.view()}), expected);
  EXPECT_EQ(more.most_bodies(), 8);
}

TEST(ContractRunner, T1_ThreadsThatShareThePlanShareItsRunner) {
  const Layer layer;
  TestRunner runner(Kind::threads, 2);
  const FusedMoe plan = layer.plan(on(runner));
  RandomInput input = layer.input(40);
  const Bytes expected = run_exact(plan, input);
  const int before = runner.runs();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      RandomInput own = layer.input(40);
      for (int round = 0; round < 20; ++round) wrong += run_exact(plan, own) != expected;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(runner.runs(), before + 4 * 20 * 2);
}

}  // namespace
}  // namespace fusedmoe::test
