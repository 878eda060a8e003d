// Section 4: weights have a version and refuse to be stale, or are read again when a plan was made
// so, once for each change.
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>

#include "support/layer.h"

namespace fusedmoe::test {
namespace {

class ContractVersion : public testing::TestWithParam<WeightStorage> {
 protected:
  // Changes w2 behind the plan's back.
  void change_weights() {
    auto* w2 = static_cast<std::uint16_t*>(layer_.weights.w2_data());
    for (int i = 0; i < 131 * 77 * 7; ++i) w2[i] = static_cast<std::uint16_t>(w2[i] ^ 0x8000);
  }
  FusedMoe plan(StalePolicy policy) {
    weights_.version = &version_;
    return FusedMoe::create(layer_.config, weights_,
                            {.weight_storage = GetParam(), .on_stale = policy});
  }

  Layer layer_;
  ExpertWeights weights_ = layer_.weights.view();
  RandomInput input_ = layer_.input(11);
  std::atomic<std::uint64_t> version_{41};
};

TEST_P(ContractVersion, V1_AVersionNotSeenIsRefused) {
  FusedMoe plan = this->plan(StalePolicy::raise);
  const Bytes before = run_exact(plan, input_);
  change_weights();
  ++version_;
  for (int i = 0; i < 2; ++i) {
    expect_contains(error_of(ErrorCode::stale_weights, [&] { run_exact(plan, input_); }),
                    {"weights", "41", "got version 42", "refresh(weights)"});
    EXPECT_TRUE(untouched(input_));
  }
  plan.refresh(weights_);
  const Bytes after = run_exact(plan, input_);
  EXPECT_NE(after, before);
  expect_oracle(layer_.config, weights_, input_);
  --version_;  // any other value, not only a larger one
  error_of(ErrorCode::stale_weights, [&] { run_exact(plan, input_); });
  ++version_;
  EXPECT_EQ(run_exact(plan, input_), after);
}

TEST_P(ContractVersion, V2_OnStaleRefreshReadsThemAgain) {
  FusedMoe plan = this->plan(StalePolicy::refresh);
  run_exact(plan, input_);
  for (int round = 0; round < 3; ++round) {
    change_weights();
    ++version_;
    run_exact(plan, input_);
    expect_oracle(layer_.config, weights_, input_);
    EXPECT_EQ(plan.weights_version(), static_cast<std::uint64_t>(2 + round));
    run_exact(plan, input_);  // seen: not again
    EXPECT_EQ(plan.weights_version(), static_cast<std::uint64_t>(2 + round));
  }
  plan.release_weights();
  ++version_;
  error_of(ErrorCode::stale_weights, [&] { run_exact(plan, input_); });  // asleep is asleep
}

TEST_P(ContractVersion, V3_ManyThreadsRefreshOncePerChange) {
  FusedMoe plan = this->plan(StalePolicy::refresh);
  for (std::uint64_t round = 1; round <= 20; ++round) {
    change_weights();
    ++version_;
    std::vector<Bytes> got(6);
    std::vector<std::thread> threads;
    std::atomic<int> ready{0};
    for (Bytes& bits : got) {
      threads.emplace_back([&] {
        RandomInput input = layer_.input(11);
        ++ready;
        while (ready < 6) std::this_thread::yield();
        bits = run_exact(plan, input);
      });
    }
    for (std::thread& thread : threads) thread.join();
    const Bytes expected = run_exact(layer_.plan(), input_);
    for (const Bytes& bits : got) EXPECT_EQ(bits, expected);
    EXPECT_EQ(plan.weights_version(), 1 + round) << "weights_version counts refreshes";
  }
}

INSTANTIATE_TEST_SUITE_P(All, ContractVersion,
                         testing::Values(WeightStorage::own, WeightStorage::borrowed),
                         [](const auto& i) {
                           return i.param == WeightStorage::own ? "own" : "borrowed";
                         });

TEST(ContractWeights, V4_ABumpWhileTheyAreReadIsAVersionNotSeen) {
  const Layer layer;
  std::atomic<std::uint64_t> version{1};
  ExpertWeights weights = layer.weights.as_source();
  weights.version = &version;
  bool bump = false;
  weights.source = [from = weights.source, &version, &bump](std::int64_t expert) {
    if (bump && expert == 3) ++version;
    return from(expert);
  };
  FusedMoe plan = FusedMoe::create(layer.config, weights);
  RandomInput input = layer.input(4);
  const Bytes expected = run_exact(plan, input);
  bump = true;
  plan.refresh(weights);
  error_of(ErrorCode::stale_weights, [&] { run_exact(plan, input); });
  bump = false;
  plan.refresh(weights);
  EXPECT_EQ(run_exact(plan, input), expected);
}

TEST(ContractWeights, V5_AnAutomaticRefreshThatFailsLeavesThePlanStale) {
  const Layer layer;
  std::atomic<std::uint64_t> version{1};
  bool fail = false;
  ExpertWeights weights = layer.weights.as_source();
  weights.version = &version;
  weights.source = [from = weights.source, &fail](std::int64_t expert) {
    if (fail && expert == 3) throw std::runtime_error("gone");
    return from(expert);
  };
  FusedMoe plan = FusedMoe::create(layer.config, weights, {.on_stale = StalePolicy::refresh});
  RandomInput input = layer.input(4);
  const Bytes expected = run_exact(plan, input);
  fail = true;
  ++version;
  EXPECT_THROW(run_exact(plan, input), std::runtime_error);
  EXPECT_TRUE(untouched(input));
  fail = false;
  error_of(ErrorCode::stale_weights, [&] { run_exact(plan, input); });
  plan.refresh(weights);
  EXPECT_EQ(run_exact(plan, input), expected);
}

TEST(ContractWeights, V6_RefreshBringsItsOwnCounter) {
  const Layer layer;
  std::atomic<std::uint64_t> first{1}, second{1};
  ExpertWeights weights = layer.weights.view();
  weights.version = &first;
  FusedMoe plan = FusedMoe::create(layer.config, weights);
  RandomInput input = layer.input(4);
  weights.version = &second;
  plan.refresh(weights);
  ++first;  // no longer theirs
  EXPECT_NO_THROW(run_exact(plan, input));
  ++second;
  error_of(ErrorCode::stale_weights, [&] { run_exact(plan, input); });
  weights.version = nullptr;
  plan.refresh(weights);
  ++second;
  EXPECT_NO_THROW(run_exact(plan, input));
}

}  // namespace
}  // namespace fusedmoe::test
