// Barrier and ThreadPool under stress: many counts, many thousands of runs.
#include "backends/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <thread>
#include <vector>

#include "backends/cpu/team.h"

namespace fusedmoe::cpu {
namespace {

constexpr int kMostThreads = 8;

// Between two barriers each thread counts up its own number; none may be behind or ahead.
TEST(BarrierTest, NobodyPassesBeforeAllHaveArrived) {
  for (int count = 1; count <= kMostThreads; ++count) {
    const int rounds = count <= 2 ? 10000 : 1500;
    Barrier barrier(count);
    std::array<std::atomic<int>, kMostThreads> round{};
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < count; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 1; i <= rounds; ++i) {
          round[t].store(i, std::memory_order_relaxed);
          barrier.wait();
          for (int other = 0; other < count; ++other) {
            if (round[other].load(std::memory_order_relaxed) != i) wrong.fetch_add(1);
          }
          barrier.wait();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong.load(), 0) << count << " threads";
  }
}

// What one thread wrote before the barrier, plainly, another reads after it.
TEST(BarrierTest, PublishesWrites) {
  constexpr int kRounds = 3000;
  Barrier barrier(2);
  int first = 0, second = 0, wrong = 0;
  std::thread other([&] {
    for (int i = 1; i <= kRounds; ++i) {
      first = i;
      barrier.wait();
      barrier.wait();
      if (second != i) ++wrong;
      barrier.wait();
    }
  });
  int wrong_here = 0;
  for (int i = 1; i <= kRounds; ++i) {
    barrier.wait();
    if (first != i) ++wrong_here;
    second = i;
    barrier.wait();
    barrier.wait();
  }
  other.join();
  EXPECT_EQ(wrong + wrong_here, 0);
}

class ThreadPoolTest : public testing::Test {
 protected:
  ThreadPoolTest() : pool_(ThreadPool::instance()) {
    pool_.ensure(kMostThreads);
    EXPECT_TRUE(pool_.try_acquire());
  }
  ~ThreadPoolTest() override { pool_.release(); }
  ThreadPool& pool_;
};

struct Job {
  std::array<std::atomic<int>, kMostThreads> calls{};
  int written = 0;  // plainly, before run
  std::atomic<int> wrong{0};
  int expected = 0;
};

TEST_F(ThreadPoolTest, EveryIndexOnceInEveryRun) {
  ASSERT_GE(pool_.size(), kMostThreads);
  for (int run = 0; run < 10000; ++run) {
    const int count = 1 + run * 5 % kMostThreads;
    Job job;  // on the stack: nobody may touch it when run has returned
    job.written = run;
    job.expected = run;
    pool_.run(
        count,
        [](void* argument, int index) {
          auto& mine = *static_cast<Job*>(argument);
          if (mine.written != mine.expected) mine.wrong.fetch_add(1);
          mine.calls[index].fetch_add(1);
        },
        &job);
    ASSERT_EQ(job.wrong.load(), 0);
    for (int i = 0; i < kMostThreads; ++i) {
      ASSERT_EQ(job.calls[i].load(), i < count ? 1 : 0) << "run " << run << ", index " << i;
    }
  }
}

TEST_F(ThreadPoolTest, BodiesOfARunAreAllAtTheSameTime) {
  for (int run = 0; run < 300; ++run) {
    const int count = 2 + run % (kMostThreads - 1);
    struct Meeting {
      Barrier barrier;
      std::atomic<int> passed{0};
    } meeting{Barrier(count), {}};
    pool_.run(
        count,
        [](void* argument, int) {
          auto& mine = *static_cast<Meeting*>(argument);
          mine.barrier.wait();  // would never end if the bodies ran one after the other
          mine.barrier.wait();
          mine.passed.fetch_add(1);
        },
        &meeting);
    ASSERT_EQ(meeting.passed.load(), count);
  }
}

TEST_F(ThreadPoolTest, TheCallerIsIndexZero) {
  std::thread::id ids[2];
  pool_.run(
      2,
      [](void* argument, int index) {
        static_cast<std::thread::id*>(argument)[index] = std::this_thread::get_id();
      },
      ids);
  EXPECT_EQ(ids[0], std::this_thread::get_id());
  EXPECT_NE(ids[1], ids[0]);
}

TEST_F(ThreadPoolTest, ATakenTeamIsRefusedAndTheCallRunsAlone) {
  EXPECT_FALSE(pool_.try_acquire());
  const Team team(nullptr, kMostThreads);
  EXPECT_EQ(team.size(), 1);
  int calls = 0;
  team.run(team.size(), [&calls](int index) { calls += 1 + index; });
  EXPECT_EQ(calls, 1);
}

// Several threads grow the pool while another runs on it.
TEST(ThreadPoolGrowth, EnsureFromManyThreadsWhileRunning) {
  ThreadPool& pool = ThreadPool::instance();
  std::atomic<bool> done{false};
  std::thread runner([&] {
    while (!done.load()) {
      const Team team(nullptr, 64);
      std::atomic<int> calls{0};
      team.run(team.size(), [&calls](int) { calls.fetch_add(1); });
      if (calls.load() != team.size()) ADD_FAILURE() << calls.load() << " of " << team.size();
    }
  });
  std::vector<std::thread> growers;
  for (int t = 0; t < 4; ++t) {
    growers.emplace_back([&pool, t] {
      for (int threads = 2; threads <= 12; ++threads) pool.ensure(threads + t % 2);
    });
  }
  for (std::thread& thread : growers) thread.join();
  done.store(true);
  runner.join();
  EXPECT_GE(pool.size(), 13);
  EXPECT_LE(pool.size(), 16);
}

}  // namespace
}  // namespace fusedmoe::cpu
