// core/workspace_use.*: an address range belongs to one running call at a time, in the process.
#include "core/workspace_use.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "fusedmoe/error.h"

namespace fusedmoe {
namespace {

// Ranges of addresses that are never touched.
std::span<const std::byte> range(std::uintptr_t begin, std::size_t bytes) {
  return {reinterpret_cast<const std::byte*>(begin), bytes};
}

bool is_busy(std::uintptr_t begin, std::size_t bytes) {
  try {
    const WorkspaceUse use(range(begin, bytes));
    return false;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::busy);
    EXPECT_NE(std::string(error.what()).find("workspace: expected"), std::string::npos);
    return true;
  }
}

TEST(WorkspaceUse, OverlapIsRefusedNeighboursAreNot) {
  {
    const WorkspaceUse use(range(0x10000, 0x1000));
    EXPECT_TRUE(is_busy(0x10000, 0x1000));
    EXPECT_TRUE(is_busy(0x10fff, 1));
    EXPECT_TRUE(is_busy(0x10000, 1));
    EXPECT_TRUE(is_busy(0xffff, 2));
    EXPECT_TRUE(is_busy(0x10800, 0x10000));
    EXPECT_TRUE(is_busy(0x1000, 0x100000));
    EXPECT_FALSE(is_busy(0xf000, 0x1000));
    EXPECT_FALSE(is_busy(0x11000, 0x1000));
    EXPECT_FALSE(is_busy(0x10800, 0));  // nothing is used
  }
  EXPECT_FALSE(is_busy(0x10000, 0x1000));
}

TEST(WorkspaceUse, RefusalsAndEmptyRangesLeaveNothingBehind) {
  const WorkspaceUse use(range(0x20000, 64));
  for (int i = 0; i < 3000; ++i) EXPECT_TRUE(is_busy(0x20000, 64));
  std::vector<std::unique_ptr<WorkspaceUse>> empty;
  for (int i = 0; i < 3000; ++i) {
    empty.push_back(std::make_unique<WorkspaceUse>(range(0x20000, 0)));
  }
  EXPECT_FALSE(is_busy(0x30000, 64));
}

TEST(WorkspaceUse, AThousandRangesAtOnceThenBusy) {
  std::vector<std::unique_ptr<WorkspaceUse>> uses;
  for (std::uintptr_t i = 0; i < 1024; ++i) {
    uses.push_back(std::make_unique<WorkspaceUse>(range(0x1000000 + i * 64, 64)));
  }
  EXPECT_TRUE(is_busy(0x9000000, 64)) << "no room for a record: refused, not unguarded";
  uses[500].reset();
  EXPECT_FALSE(is_busy(0x9000000, 64));
  EXPECT_TRUE(is_busy(0x1000000 + 501 * 64, 64));
  EXPECT_FALSE(is_busy(0x1000000 + 500 * 64, 64));
}

TEST(WorkspaceUse, NeverTwoHoldersOfOneAddress) {
  // Threads fight for ranges [i, i + 3) of 16 blocks; a holder marks its blocks.
  std::atomic<int> holders[16] = {};
  std::atomic<int> collisions{0}, successes{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      unsigned state = t * 7919 + 1;
      for (int i = 0; i < 20000; ++i) {
        state = state * 1664525U + 1013904223U;
        const unsigned first = (state >> 16) % 14;
        try {
          const WorkspaceUse use(range(0x40000 + first * 64, 3 * 64));
          for (unsigned b = first; b < first + 3; ++b) collisions += holders[b]++ != 0;
          ++successes;
          for (unsigned b = first; b < first + 3; ++b) --holders[b];
        } catch (const Error&) {
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(collisions, 0);
  EXPECT_GT(successes, 1000);
}

TEST(WorkspaceUse, ForgetAll) {
  std::optional<WorkspaceUse> use;
  use.emplace(range(0x50000, 64));
  EXPECT_TRUE(is_busy(0x50000, 64));
  WorkspaceUse::forget_all();  // as in the child of a fork
  EXPECT_FALSE(is_busy(0x50000, 64));
}

}  // namespace
}  // namespace fusedmoe
