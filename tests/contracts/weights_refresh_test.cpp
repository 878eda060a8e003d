// Section 4 and contract 5.3.7: weights written again in place. A refresh equals a fresh plan, a
// failed one leaves the plan stale, a refused one changes nothing, and applies that run meanwhile
// see the old or the new weights, never both.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "support/layer.h"
#include "support/runners.h"

namespace fusedmoe::test {
namespace {

class ContractRefresh : public testing::TestWithParam<WeightStorage> {
 protected:
  ContractRefresh() {
    options_.weight_storage = GetParam();
    if (GetParam() == WeightStorage::caller) {
      storage_.emplace_back(FusedMoe::packed_weights_size(old_.config, old_.weights.view()).bytes);
      options_.storage = storage_.back().span();
    }
  }
  FusedMoe plan() const { return old_.plan(options_); }
  static Bytes fresh(const Layer& layer, RandomInput& input) {
    return run_exact(layer.plan(), input);
  }

  Layer old_{odd_config(), 1};
  Layer new_{odd_config(), 2};
  RandomInput input_ = old_.input(20);
  Bytes old_bits_ = fresh(old_, input_);
  Bytes new_bits_ = fresh(new_, input_);
  std::vector<Scratch> storage_;
  PlanOptions options_;
};

TEST_P(ContractRefresh, W1_RefreshEqualsAFreshPlan) {
  ASSERT_NE(old_bits_, new_bits_);
  FusedMoe plan = this->plan();
  EXPECT_EQ(plan.weights_version(), 1U);
  EXPECT_EQ(run_exact(plan, input_), old_bits_);
  for (int round = 0; round < 2; ++round) {
    plan.refresh(new_.weights.view());
    EXPECT_EQ(run_exact(plan, input_), new_bits_);
    plan.refresh(old_.weights.view(), RefreshWait::no_wait);
    EXPECT_EQ(run_exact(plan, input_), old_bits_);
  }
  EXPECT_EQ(plan.weights_version(), 5U);
}

TEST_P(ContractRefresh, W2_ReleaseAndWake) {
  FusedMoe plan = this->plan();
  plan.release_weights();
  plan.release_weights();  // asleep already
  for (int i = 0; i < 2; ++i) {
    expect_contains(error_of(ErrorCode::stale_weights, [&] { run_exact(plan, input_); }),
                    {"weights", "released", "refresh(weights)"});
    EXPECT_TRUE(untouched(input_));
  }
  EXPECT_EQ(plan.weights_version(), 1U);
  if (GetParam() != WeightStorage::borrowed) {
    const std::int64_t one[] = {0};
    error_of(ErrorCode::stale_weights,
             [&] { plan.refresh_experts(one, slice(new_.weights.view(), 0)); });
    error_of(ErrorCode::stale_weights, [&] { plan.refresh_experts({}, new_.weights.view()); });
  }
  plan.refresh(new_.weights.view());
  EXPECT_EQ(run_exact(plan, input_), new_bits_);
  EXPECT_EQ(plan.weights_version(), 2U);
}

TEST_P(ContractRefresh, W3_ARefusedArgumentChangesNothing) {
  FusedMoe plan = this->plan();
  const auto refused = [&](const ExpertWeights& weights, const char* name) {
    expect_contains(error_of(ErrorCode::invalid_argument, [&] { plan.refresh(weights); }), {name});
    EXPECT_EQ(run_exact(plan, input_), old_bits_);
    EXPECT_EQ(plan.weights_version(), 1U);
  };
  MoeConfig other = odd_config();
  other.hidden_size = 130;
  refused(Layer(other).weights.view(), "weights.w13");
  refused(Layer(odd_config(DType::f16)).weights.view(), "weights.w13.format");
  refused(Layer(odd_config(), 1, -1, false).weights.view(), "weights.w13_bias");
  ExpertWeights weights = new_.weights.view();
  weights.w2_bias = {};
  refused(weights, "weights.w2_bias");
  weights = new_.weights.view();
  weights.w2.data = nullptr;
  refused(weights, "weights.w2");
  plan.refresh(new_.weights.view());
  EXPECT_EQ(run_exact(plan, input_), new_bits_);
}

TEST_P(ContractRefresh, W4_RunningAppliesAreWaitedForOrReportedBusy) {
  FusedMoe plan = old_.plan([&] {
    PlanOptions options = options_;
    options.max_threads = 2;
    return options;
  }());
  RandomInput input = old_.input(60);
  const Bytes expected = run_exact(plan, input);
  GateRunner gate;
  ApplyContext context;
  context.runner = gate.view();
  Bytes got;
  std::thread applying([&] { got = run(plan, input, {}, context); });
  gate.wait_until_running();
  expect_contains(
      error_of(ErrorCode::busy, [&] { plan.refresh(new_.weights.view(), RefreshWait::no_wait); }),
      {"refresh", "running apply", "RefreshWait::wait"});
  error_of(ErrorCode::busy, [&] { plan.release_weights(RefreshWait::no_wait); });
  EXPECT_EQ(plan.weights_version(), 1U);
  std::atomic<bool> refreshed{false};
  std::thread refreshing([&] {
    plan.refresh(new_.weights.view(), RefreshWait::wait);
    refreshed = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(refreshed) << "refresh did not wait for the apply that runs";
  gate.open();
  applying.join();
  refreshing.join();
  EXPECT_EQ(got, expected) << "the running call saw a mixture";
  EXPECT_EQ(run_exact(plan, input_), new_bits_);
}

TEST_P(ContractRefresh, W5_AppliesDuringRefreshSeeOldOrNewNeverAMixture) {
  FusedMoe plan = this->plan();
  std::atomic<bool> stop{false};
  std::atomic<int> olds{0}, news{0}, mixtures{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      RandomInput input = old_.input(20);
      Scratch scratch(plan.workspace_size(20).bytes);
      while (!stop) {
        const Bytes got = run(plan, input, scratch);
        ++(got == old_bits_ ? olds : got == new_bits_ ? news : mixtures);
      }
    });
  }
  int rounds = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while ((olds < 20 || news < 20 || rounds < 20) && std::chrono::steady_clock::now() < end) {
    plan.refresh(rounds++ % 2 == 0 ? new_.weights.view() : old_.weights.view());
    std::this_thread::yield();
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(mixtures, 0);
  EXPECT_GT(olds, 0);
  EXPECT_GT(news, 0);
  EXPECT_EQ(plan.weights_version(), static_cast<std::uint64_t>(1 + rounds));
}

std::string name_of(const testing::TestParamInfo<WeightStorage>& info) {
  constexpr const char* kNames[] = {"own", "borrowed", "caller"};
  return kNames[static_cast<int>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(All, ContractRefresh,
                         testing::Values(WeightStorage::own, WeightStorage::caller,
                                         WeightStorage::borrowed),
                         name_of);

// A source that throws `what` at expert `bad` (-1: never) and counts its calls.
ExpertWeights failing_source(const Layer& layer, std::int64_t bad, int* calls) {
  ExpertWeights weights = layer.weights.as_source();
  weights.source = [from = weights.source, bad, calls](std::int64_t expert) {
    EXPECT_EQ(expert, (*calls)++) << "each expert once, in ascending order";
    if (expert == bad) throw std::runtime_error("disk on fire");
    return from(expert);
  };
  return weights;
}

TEST(ContractWeights, W6_AFailedRefreshLeavesThePlanStaleUntilOneSucceeds) {
  const Layer before(odd_config(), 1), after(odd_config(), 2);
  FusedMoe plan = before.plan();
  RandomInput input = before.input(20);
  const Bytes expected = run_exact(after.plan(), input);
  int calls = 0;
  for (const std::int64_t bad : {0, 3, 6}) {
    calls = 0;
    EXPECT_THROW(plan.refresh(failing_source(after, bad, &calls)), std::runtime_error);
    EXPECT_EQ(calls, bad + 1);
    expect_contains(error_of(ErrorCode::stale_weights, [&] { run_exact(plan, input); }),
                    {"weights", "refresh failed", "until it succeeds"});
    EXPECT_TRUE(untouched(input));
    const std::int64_t one[] = {0};
    error_of(ErrorCode::stale_weights,
             [&] { plan.refresh_experts(one, slice(after.weights.view(), 0)); });
    EXPECT_EQ(plan.weights_version(), 1U);
  }
  calls = 0;
  plan.refresh(failing_source(after, -1, &calls));
  EXPECT_EQ(calls, 7);
  EXPECT_EQ(run_exact(plan, input), expected);
  EXPECT_EQ(plan.weights_version(), 2U);
  calls = 0;
  EXPECT_THROW((void)FusedMoe::create(before.config, failing_source(before, 2, &calls)),
               std::runtime_error);
}

TEST(ContractWeights, W7_RefreshOfSomeExperts) {
  const Layer before(odd_config(), 1), after(odd_config(), 2);
  FusedMoe plan = before.plan();
  RandomInput input = before.input(20);
  // In the order that is given: experts 5 and 2 of `after`.
  ExpertWeights two = after.weights.view();
  two.source = [&](std::int64_t expert) { return slice(after.weights.view(), expert); };
  for (WeightTensor* tensor : {&two.w13, &two.w2})
    *tensor = {.experts = 2, .outputs = tensor->outputs, .inputs = tensor->inputs};
  two.w13_bias.experts = two.w2_bias.experts = 2;
  const std::int64_t some[] = {5, 2};
  plan.refresh_experts(some, two);
  EXPECT_EQ(plan.weights_version(), 2U);
  // A fresh plan of the mixture.
  ExpertWeights mixed = before.weights.as_source();
  mixed.source = [&](std::int64_t expert) {
    return slice((expert == 5 || expert == 2 ? after : before).weights.view(), expert);
  };
  EXPECT_EQ(run_exact(plan, input), run_exact(FusedMoe::create(before.config, mixed), input));
  // As a stack of one.
  const std::int64_t third[] = {3};
  plan.refresh_experts(third, slice(after.weights.view(), 3));
  mixed.source = [&](std::int64_t expert) {
    const bool is_new = expert == 5 || expert == 2 || expert == 3;
    return slice((is_new ? after : before).weights.view(), expert);
  };
  const Bytes expected = run_exact(FusedMoe::create(before.config, mixed), input);
  EXPECT_EQ(run_exact(plan, input), expected);
  // Refused: ids that are not local, a stack of another length, a plan that borrows.
  for (const std::int64_t bad : {-1, 7}) {
    expect_contains(error_of(ErrorCode::invalid_argument,
                             [&] {
                               plan.refresh_experts({&bad, 1}, slice(after.weights.view(), 0));
                             }),
                    {"local_experts", "0 to 6", "got " + std::to_string(bad)});
  }
  error_of(ErrorCode::invalid_argument,
           [&] { plan.refresh_experts(some, slice(after.weights.view(), 0)); });
  FusedMoe borrowing = before.plan({.weight_storage = WeightStorage::borrowed});
  error_of(ErrorCode::unsupported,
           [&] { borrowing.refresh_experts(third, slice(after.weights.view(), 3)); });
  EXPECT_EQ(run_exact(plan, input), expected);
  EXPECT_EQ(plan.weights_version(), 3U);
}

}  // namespace
}  // namespace fusedmoe::test
