// core/weights_state.*: the gate between applies and refreshes, and what makes weights stale.
#include "core/weights_state.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "fusedmoe/error.h"

namespace fusedmoe {
namespace {

const auto kNoWrite = [](const ExpertWeights&) { FAIL() << "nothing is to be read again"; };

ErrorCode code_of_lease(WeightsState& state) {
  try {
    const WeightsState::Lease lease(state, kNoWrite);
    return ErrorCode{};
  } catch (const Error& error) {
    return error.code();
  }
}

TEST(ApplyGate, ManyAppliesOrOneRefresh) {
  ApplyGate gate;
  gate.enter();
  gate.enter();
  EXPECT_FALSE(gate.close(RefreshWait::no_wait));
  gate.leave();
  EXPECT_FALSE(gate.close(RefreshWait::no_wait));
  gate.leave();
  EXPECT_TRUE(gate.close(RefreshWait::no_wait));
  EXPECT_FALSE(gate.close(RefreshWait::no_wait)) << "one refresh at a time";
  gate.open();
  EXPECT_TRUE(gate.close(RefreshWait::wait));
  gate.open();
  gate.enter();
  gate.leave();
}

TEST(ApplyGate, ExcludesUnderLoad) {
  ApplyGate gate;
  std::atomic<int> applying{0}, refreshing{0}, wrong{0}, refreshes{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 3000; ++round) {
        gate.enter();
        ++applying;
        wrong += refreshing != 0;
        --applying;
        gate.leave();
      }
    });
  }
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 300; ++round) {
        if (!gate.close(i == 0 ? RefreshWait::wait : RefreshWait::no_wait)) continue;
        wrong += refreshing++ != 0 || applying != 0;
        ++refreshes;
        --refreshing;
        gate.open();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GE(refreshes, 300) << "a refresh that waits gets its turn";
}

TEST(WeightsState, EmptyFreshFailedReleased) {
  WeightsState state(StalePolicy::raise);
  EXPECT_FALSE(state.usable());
  EXPECT_EQ(state.version(), 0U);
  EXPECT_EQ(code_of_lease(state), ErrorCode::stale_weights);
  const ExpertWeights weights;
  state.update(RefreshWait::wait, &weights, [] {});
  EXPECT_TRUE(state.usable());
  EXPECT_EQ(state.version(), 1U);
  EXPECT_EQ(code_of_lease(state), ErrorCode{});
  EXPECT_THROW(state.update(RefreshWait::wait, &weights, [] { throw std::runtime_error("x"); }),
               std::runtime_error);
  EXPECT_FALSE(state.usable());
  EXPECT_EQ(state.version(), 1U);
  EXPECT_EQ(code_of_lease(state), ErrorCode::stale_weights);
  state.update(RefreshWait::no_wait, &weights, [] {});  // the gate is open again after the throw
  EXPECT_EQ(state.version(), 2U);
  bool dropped = false;
  state.release(RefreshWait::wait, [&] { dropped = true; });
  EXPECT_TRUE(dropped);
  EXPECT_FALSE(state.usable());
  EXPECT_EQ(code_of_lease(state), ErrorCode::stale_weights);
  state.update(RefreshWait::wait, &weights, [] {});
  EXPECT_EQ(code_of_lease(state), ErrorCode{});
}

TEST(WeightsState, NotNeededMeansNothingHappens) {
  WeightsState state(StalePolicy::raise);
  const ExpertWeights weights;
  state.update(RefreshWait::wait, &weights, [] {});
  state.update(
      RefreshWait::wait, nullptr, [] { FAIL(); }, [] { return false; });
  EXPECT_EQ(state.version(), 1U);
  EXPECT_TRUE(state.usable());
  EXPECT_THROW(state.update(
                   RefreshWait::wait, nullptr, [] { FAIL(); },
                   []() -> bool { throw std::logic_error("no"); }),
               std::logic_error);
  EXPECT_EQ(code_of_lease(state), ErrorCode{}) << "open, and as fresh as before";
  // A released plan is not woken by an update of some of its experts.
  state.release(RefreshWait::wait, [] {});
  state.update(
      RefreshWait::wait, nullptr, [] { FAIL(); }, [&] { return state.usable(); });
  EXPECT_EQ(code_of_lease(state), ErrorCode::stale_weights);
}

TEST(WeightsState, TheOwnersVersion) {
  std::atomic<std::uint64_t> version{7};
  ExpertWeights weights;
  weights.version = &version;
  WeightsState state(StalePolicy::raise);
  state.update(RefreshWait::wait, &weights, [] {});
  EXPECT_EQ(code_of_lease(state), ErrorCode{});
  ++version;
  EXPECT_EQ(code_of_lease(state), ErrorCode::stale_weights);
  state.update(RefreshWait::wait, &weights, [&] { ++version; });  // bumped while it is read
  EXPECT_EQ(code_of_lease(state), ErrorCode::stale_weights);
  state.update(RefreshWait::wait, &weights, [] {});
  EXPECT_EQ(code_of_lease(state), ErrorCode{});
}

TEST(WeightsState, AutomaticRefreshReadsWhatWasGivenLast) {
  std::atomic<std::uint64_t> version{7};
  ExpertWeights weights;
  weights.version = &version;
  weights.w13.experts = 42;
  WeightsState state(StalePolicy::refresh);
  state.update(RefreshWait::wait, &weights, [] {});
  ++version;
  int writes = 0;
  for (int i = 0; i < 3; ++i) {
    const WeightsState::Lease lease(state, [&](const ExpertWeights& kept) {
      EXPECT_EQ(kept.w13.experts, 42);
      ++writes;
    });
  }
  EXPECT_EQ(writes, 1);
  EXPECT_EQ(state.version(), 2U);
}

TEST(WeightsState, UpdateWaitsForLeases) {
  WeightsState state(StalePolicy::raise);
  const ExpertWeights weights;
  state.update(RefreshWait::wait, &weights, [] {});
  std::optional<WeightsState::Lease> lease;
  lease.emplace(state, kNoWrite);
  const auto code = [&](const auto& f) {
    try {
      f();
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode{};
  };
  EXPECT_EQ(code([&] { state.update(RefreshWait::no_wait, &weights, [] { FAIL(); }); }),
            ErrorCode::busy);
  EXPECT_EQ(code([&] { state.release(RefreshWait::no_wait, [] { FAIL(); }); }), ErrorCode::busy);
  std::atomic<bool> written{false};
  std::thread other([&] { state.update(RefreshWait::wait, &weights, [&] { written = true; }); });
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_FALSE(written);
  lease.reset();
  other.join();
  EXPECT_TRUE(written);
}

}  // namespace
}  // namespace fusedmoe
