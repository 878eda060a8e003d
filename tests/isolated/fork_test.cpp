// Contract 5.4.3: after a fork the child's calls work, or throw with the remedy; they never hang,
// whatever other threads were in the middle of. The parent goes on.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "support/layer.h"
#include "support/runners.h"

#if defined(FUSEDMOE_TEST_THREAD_SANITIZER)
// The child of a process with threads starts threads of its own here: that is the point.
extern "C" const char* __tsan_default_options();
extern "C" const char* __tsan_default_options() { return "die_after_fork=0"; }
#endif

namespace fusedmoe::test {
namespace {

enum Exit { kWorked = 0, kWrongBits = 1, kNoRemedy = 2, kOther = 3, kRemedy = 10 };

// Runs f in a forked child: its result, or -1 when it was not done within 30 seconds.
int in_child(const std::function<int()>& f) {
  const pid_t child = fork();
  if (child == 0) {
    int result = kOther;
    try {
      result = f();
    } catch (const Error& error) {
      const bool remedy = std::string(error.what()).find("; ") != std::string::npos &&
                          error.code() != ErrorCode::internal;
      result = remedy ? kRemedy : kNoRemedy;
    } catch (...) {
    }
    _exit(result);
  }
  for (int i = 0; i < 3000; ++i) {
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child) {
      return WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return -1;
}

class ContractFork : public testing::Test {
 protected:
  // What a child tries: to apply what it inherited, to create, to refresh, to allocate.
  int everything() {
    if (run_exact(plan_, input_) != expected_) return kWrongBits;
    FusedMoe made = layer_.plan({.max_threads = 3});
    if (run_exact(made, input_) != expected_) return kWrongBits;
    made.refresh(layer_.weights.view(), RefreshWait::no_wait);
    plan_.refresh(layer_.weights.view());
    if (run_exact(plan_, input_) != expected_) return kWrongBits;
    plan_.release_weights();
    plan_.refresh(layer_.weights.view());
    if (run(plan_, input_) != expected_) return kWrongBits;
    return run_exact(made, input_) == expected_ ? kWorked : kWrongBits;
  }
  // clang 14's address sanitizer takes no lock of its own allocator over a fork: a child of a
  // process that was allocating may wait for it for ever. The other builds test what these tests
  // are for.
  static bool can_fork_while_allocating() {
#if defined(FUSEDMOE_TEST_ADDRESS_SANITIZER)
    return false;
#else
    return true;
#endif
  }
  // `busy` on three threads of the parent while children come and go.
  void fork_while(const std::function<void()>& busy, int forks) {
    std::atomic<bool> stop{false};
    std::atomic<int> rounds{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        while (!stop) {
          busy();
          ++rounds;
        }
      });
    }
    while (rounds < 3) std::this_thread::yield();
    for (int i = 0; i < forks; ++i) {
      EXPECT_EQ(in_child([&] { return everything(); }), kWorked) << "child " << i;
    }
    stop = true;
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(everything(), kWorked) << "the parent";
  }

  Layer layer_;
  FusedMoe plan_ = layer_.plan({.max_threads = 3});
  RandomInput input_ = layer_.input(60);
  Bytes expected_ = run_exact(plan_, input_);
#if defined(FUSEDMOE_TEST_THREAD_SANITIZER)
  static constexpr int kForks = 3;
#else
  static constexpr int kForks = 15;
#endif
};

TEST_F(ContractFork, T3_Idle) {
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(in_child([&] { return everything(); }), kWorked);
    EXPECT_EQ(everything(), kWorked);
  }
}

TEST_F(ContractFork, T3_ChildOfAChild) {
  EXPECT_EQ(in_child([&] {
              const int first = everything();
              if (first != kWorked) return first;
              const int grandchild = in_child([&] { return everything(); });
              return grandchild != kWorked ? grandchild : everything();
            }),
            kWorked);
}

TEST_F(ContractFork, T3_WhileOthersApply) {
  if (!can_fork_while_allocating()) GTEST_SKIP() << "the sanitizer's allocator does not survive it";
  const FusedMoe shared = layer_.plan({.max_threads = 3});
  fork_while(
      [&] {
        RandomInput input = layer_.input(60);
        EXPECT_EQ(run_exact(shared, input), expected_);
      },
      kForks);
}

TEST_F(ContractFork, T3_WhileOthersCreate) {
  if (!can_fork_while_allocating()) GTEST_SKIP() << "the sanitizer's allocator does not survive it";
  std::atomic<int> threads{1};
  fork_while(
      [&] {
        RandomInput input = layer_.input(60);
        EXPECT_EQ(run_exact(layer_.plan({.max_threads = 1 + ++threads % 12}), input), expected_);
      },
      kForks);
}

TEST_F(ContractFork, T3_WhileAnotherRefreshesThePlan) {
  if (!can_fork_while_allocating()) GTEST_SKIP() << "the sanitizer's allocator does not survive it";
  // The child's copy may be half-written: then it says so, and a refresh there mends it.
  FusedMoe shared = layer_.plan({.max_threads = 2});
  std::atomic<bool> stop{false};
  std::thread refreshing([&] {
    while (!stop) shared.refresh(layer_.weights.view());
  });
  for (int i = 0; i < kForks; ++i) {
    const int result = in_child([&] {
      int worked = kWorked;
      try {
        if (run_exact(shared, input_) != expected_) return static_cast<int>(kWrongBits);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::stale_weights) throw;
        worked = kRemedy;
      }
      shared.refresh(layer_.weights.view());
      return run_exact(shared, input_) == expected_ ? worked : kWrongBits;
    });
    EXPECT_TRUE(result == kWorked || result == kRemedy) << result;
  }
  stop = true;
  refreshing.join();
  EXPECT_EQ(run_exact(shared, input_), expected_);
}

TEST_F(ContractFork, T3_InTheMiddleOfACall) {
  // The parent's call holds a workspace and the weights. In the child nobody does.
  Scratch scratch(plan_.workspace_size(60).bytes);
  GateRunner gate;
  ApplyContext context;
  context.runner = gate.view();
  Bytes got;
  std::thread applying([&] {
    RandomInput input = layer_.input(60);
    got = run(plan_, input, scratch, context);
  });
  gate.wait_until_running();
  EXPECT_EQ(in_child([&] {
              if (run(plan_, input_, scratch) != expected_) return static_cast<int>(kWrongBits);
              plan_.refresh(layer_.weights.view(), RefreshWait::no_wait);
              return everything();
            }),
            kWorked);
  error_of(ErrorCode::busy, [&] { run(plan_, input_, scratch); });
  error_of(ErrorCode::busy, [&] { plan_.refresh(layer_.weights.view(), RefreshWait::no_wait); });
  gate.open();
  applying.join();
  EXPECT_EQ(got, expected_);
  EXPECT_EQ(everything(), kWorked);
}

TEST_F(ContractFork, T3_TheTestSeesAHang) {
  EXPECT_EQ(in_child([] { return static_cast<int>(kWrongBits); }), kWrongBits);
  EXPECT_EQ(in_child([]() -> int { throw Error(ErrorCode::busy, "no remedy"); }), kNoRemedy);
}

}  // namespace
}  // namespace fusedmoe::test
