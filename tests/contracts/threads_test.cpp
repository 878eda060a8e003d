// Contract 5.4: any number of threads may share a plan, create plans at once and hand them on, with
// more threads than cores or with one core alone.
#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <optional>
#include <thread>

#include "support/layer.h"

namespace fusedmoe::test {
namespace {

#if defined(FUSEDMOE_TEST_THREAD_SANITIZER) || defined(FUSEDMOE_TEST_ADDRESS_SANITIZER)
constexpr int kApplies = 60;
#else
constexpr int kApplies = 500;
#endif

TEST(ContractThreads, B106_EightThreadsShareOnePlan) {
  MoeConfig config = odd_config();
  config.hidden_size = 67;
  config.intermediate_size = 35;
  const Layer layer(config);
  const FusedMoe plan = layer.plan({.max_threads = 2});
  std::vector<std::optional<RandomInput>> inputs(65);
  std::vector<Bytes> expected(65);
  for (std::int64_t n = 1; n <= 64; ++n) {
    inputs[n].emplace(layer.input(n, static_cast<std::uint64_t>(n)));
    expected[n] = run_exact(plan, *inputs[n]);
    expect_oracle(config, layer.weights.view(), *inputs[n]);
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (std::uint64_t i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937_64 random(i);
      Scratch scratch(plan.workspace_size(64).bytes);
      Bytes output(64 * 67 * 2);
      for (int round = 0; round < kApplies; ++round) {
        const auto n = static_cast<std::int64_t>(1 + random() % 64);
        const RandomInput& in = *inputs[n];
        std::fill(output.begin(), output.end(), kDirt);
        plan.apply({output.data(), DType::bf16, n, 67}, in.hidden(), in.topk_weights(),
                   in.topk_ids(), scratch);
        wrong += !std::equal(expected[n].begin(), expected[n].end(), output.begin());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(ContractThreads, T2_EightThreadsCreateAtOnce) {
  const Layer layer;
  RandomInput input = layer.input(30);
  const Bytes expected = run_exact(layer.plan(), input);
  std::atomic<int> ready{0}, wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      RandomInput own = layer.input(30);
      ++ready;
      while (ready < 8) std::this_thread::yield();
      for (int round = 0; round < 3; ++round) {
        PlanOptions options;
        options.max_threads = 1 + (i + round) % 6;  // the pool grows meanwhile
        wrong += run_exact(layer.plan(options), own) != expected;
        wrong += !FusedMoe::supports(layer.config, layer.weights.view(), options).ok;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(ContractThreads, T3_MoreThreadsThanCores) {
  const Layer layer;
  const FusedMoe one = layer.plan({.max_threads = 1});
  const FusedMoe many = layer.plan({.max_threads = 16});
  EXPECT_EQ(many.num_threads(), 16);
  for (const std::int64_t num_tokens : {1, 150}) {
    RandomInput input = layer.input(num_tokens);
    const Bytes expected = run_exact(one, input);
    for (int i = 0; i < 5; ++i) EXPECT_EQ(run_exact(many, input), expected);
  }
}

TEST(ContractThreads, T3_ThreadsAreTheAffinityMaskAtCreation) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  const Layer layer;
  RandomInput input = layer.input(40);
  const Bytes expected = run_exact(layer.plan({.max_threads = 2}), input);
  std::thread pinned([&] {  // of this thread alone
    int core = 0;
    while (!CPU_ISSET(core, &before)) ++core;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    const FusedMoe alone = layer.plan();
    EXPECT_EQ(alone.num_threads(), 1);
    EXPECT_NE(alone.describe().find("affinity mask of 1 CPUs"), std::string::npos);
    EXPECT_EQ(run_exact(alone, input), expected);
    // Two threads that share the one core: slower, not stuck.
    EXPECT_EQ(run_exact(layer.plan({.max_threads = 2}), input), expected);
  });
  pinned.join();
  const FusedMoe all = layer.plan();
  EXPECT_GE(all.num_threads(), 1);
  EXPECT_LE(all.num_threads(), CPU_COUNT(&before));
}

TEST(ContractThreads, T1_APlanGoesFromThreadToThread) {
  const Layer layer;
  RandomInput input = layer.input(10);
  std::optional<FusedMoe> plan;
  std::thread([&] { plan = layer.plan(); }).join();
  const Bytes expected = run_exact(*plan, input);
  expect_oracle(layer.config, layer.weights.view(), input);
  std::thread([&] {
    FusedMoe mine = std::move(*plan);
    EXPECT_EQ(run_exact(mine, input), expected);
    mine.refresh(layer.weights.view());
    plan = std::move(mine);
  }).join();
  EXPECT_EQ(run_exact(*plan, input), expected);
  std::thread([&] { plan.reset(); }).join();
}

TEST(ContractThreads, T4_TheInstructionSetIsChosenAtRunTime) {
  const Layer layer;
  RandomInput input = layer.input(10);
  PlanOptions scalar;
  scalar.isa = "scalar";
  const Bytes expected = run_exact(layer.plan(scalar), input);
  const std::string best = layer.plan().describe();
  const char* before = std::getenv("FUSEDMOE_ISA");  // the whole suite may run under a limit
  const std::string saved = before == nullptr ? "" : before;
  ASSERT_EQ(setenv("FUSEDMOE_ISA", "scalar", 1), 0);
  const FusedMoe limited = layer.plan();
  ASSERT_EQ(setenv("FUSEDMOE_ISA", "abacus", 1), 0);
  expect_contains(error_of(ErrorCode::invalid_argument, [&] { (void)layer.plan(); }),
                  {"FUSEDMOE_ISA", "scalar", "got 'abacus'"});
  ASSERT_EQ(setenv("FUSEDMOE_ISA", saved.c_str(), 1), 0);  // empty is as if unset
  expect_contains(limited.describe(), {"instruction set scalar"});
  EXPECT_EQ(run_exact(limited, input), expected);
  EXPECT_EQ(layer.plan().describe(), best);
}

TEST(ContractThreads, T1_LanesOfAPoolServeCallsAtOnce) {
  const Layer layer;
  const FusedMoe plan = layer.plan({.max_threads = 2});
  WorkspacePool pool(Device::cpu(), 4);
  pool.register_plan(plan, 25);
  EXPECT_EQ(pool.bytes_per_lane(), plan.workspace_size(25).bytes);
  pool.lock();
  error_of(ErrorCode::workspace_too_small, [&] { pool.register_plan(plan, 26); });
  for (const int bad : {-1, 4}) error_of(ErrorCode::invalid_argument, [&] { pool.lane(bad); });
  error_of(ErrorCode::invalid_argument, [] { WorkspacePool(Device::cpu(), 0); });
  RandomInput input = layer.input(25);
  const Bytes expected = run_exact(plan, input);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      RandomInput own = layer.input(25);
      for (int round = 0; round < 20; ++round) wrong += run(plan, own, pool.lane(i)) != expected;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(ContractThreads, T3_NothingIsPrinted) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  {
    const Layer layer;
    FusedMoe plan = layer.plan();
    RandomInput input = layer.input(10);
    run_exact(plan, input);
    input.set_id(0, 0, 99);
    EXPECT_THROW(run_exact(plan, input), Error);
    plan.release_weights();
    EXPECT_THROW(run_exact(plan, input), Error);
    plan.refresh(layer.weights.view());
    (void)plan.describe();
  }
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace fusedmoe::test
