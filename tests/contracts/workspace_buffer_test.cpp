// Section 4: scratch that the library owns for the caller. WorkspaceBuffer grows until it is
// locked; WorkspacePool holds one buffer per lane, as large as the largest plan that registered.
#include <gtest/gtest.h>

#include <utility>

#include "support/layer.h"

namespace fusedmoe::test {
namespace {

bool aligned(const WorkspaceBuffer& buffer, std::uintptr_t alignment) {
  return reinterpret_cast<std::uintptr_t>(buffer.span().data()) % alignment == 0;
}

TEST(ContractBuffer, GrowsNeverShrinksAndServesCalls) {
  const Layer layer;
  const FusedMoe plan = layer.plan();
  RandomInput input = layer.input(20);
  const Bytes expected = run_exact(plan, input);
  WorkspaceBuffer buffer;
  EXPECT_EQ(buffer.bytes(), 0);
  EXPECT_TRUE(buffer.device() == Device::cpu());
  error_of(ErrorCode::workspace_too_small, [&] { run(plan, input, buffer); });
  buffer.reserve(plan.workspace_size(5));
  EXPECT_EQ(buffer.bytes(), plan.workspace_size(5).bytes);
  EXPECT_EQ(run(plan, input, buffer), expected) << "in chunks";
  buffer.reserve(plan.workspace_size(20));
  const auto* data = buffer.span().data();
  buffer.reserve(plan.workspace_size(3));
  EXPECT_EQ(buffer.bytes(), plan.workspace_size(20).bytes);
  EXPECT_EQ(buffer.span().data(), data);
  EXPECT_EQ(run(plan, input, buffer), expected);
  buffer.reserve({1, 4096});
  EXPECT_TRUE(aligned(buffer, 4096));
  EXPECT_EQ(buffer.bytes(), plan.workspace_size(20).bytes);
  WorkspaceBuffer moved = std::move(buffer);
  EXPECT_EQ(run(plan, input, moved), expected);
  buffer = WorkspaceBuffer(Device::cpu(), plan.workspace_size(1));
  EXPECT_TRUE(aligned(buffer, 64));
  EXPECT_EQ(run(plan, input, buffer), expected);
}

TEST(ContractBuffer, GrowthAfterLockThrowsNeedAndHave) {
  WorkspaceBuffer buffer(Device::cpu(), {1000, 64});
  EXPECT_FALSE(buffer.locked());
  buffer.lock();
  EXPECT_TRUE(buffer.locked());
  buffer.reserve({1000, 64});
  buffer.reserve({10, 1});
  const auto* data = buffer.span().data();
  expect_contains(error_of(ErrorCode::workspace_too_small,
                           [&] {
                             buffer.reserve({1001, 64});
                           }),
                  {"workspace", "at least 1001 bytes", "got 1000", "locked"});
  EXPECT_EQ(buffer.span().data(), data);
  EXPECT_EQ(buffer.bytes(), 1000);
}

TEST(ContractBuffer, SizesThatAreNoneAreRefused) {
  WorkspaceBuffer buffer;
  for (const WorkspaceSize size : {WorkspaceSize{-1, 64}, {10, 0}, {10, -64}, {10, 48}, {10, 3}}) {
    expect_contains(error_of(ErrorCode::invalid_argument, [&] { buffer.reserve(size); }),
                    {"size", "power of two", std::to_string(size.alignment)});
  }
  EXPECT_EQ(buffer.bytes(), 0);
#if !defined(FUSEDMOE_TEST_ADDRESS_SANITIZER) && !defined(FUSEDMOE_TEST_THREAD_SANITIZER)
  expect_contains(error_of(ErrorCode::out_of_memory,
                           [&] {
                             buffer.reserve({std::int64_t{1} << 60, 64});
                           }),
                  {"workspace", std::to_string(std::int64_t{1} << 60)});
#endif  // those end the process at such a size
  for (const Device& device : {Device::cuda(), Device::xpu()}) {
    error_of(ErrorCode::unsupported, [&] { WorkspaceBuffer on_device(device); });
    error_of(ErrorCode::unsupported, [&] { WorkspacePool on_device(device, 1); });
  }
}

TEST(ContractBuffer, APoolIsAsLargeAsItsLargestPlan) {
  const Layer small;
  MoeConfig large_config = odd_config();  // the same dtype: scratch of threads differs by kernel
  large_config.hidden_size = 300;
  const Layer large(large_config);
  const FusedMoe small_plan = small.plan(), large_plan = large.plan();
  WorkspacePool pool(Device::cpu(), 2);
  EXPECT_EQ(pool.num_lanes(), 2);
  EXPECT_EQ(pool.bytes_per_lane(), 0);
  pool.register_plan(small_plan, 10);
  EXPECT_EQ(pool.bytes_per_lane(), small_plan.workspace_size(10).bytes);
  pool.register_plan(large_plan, 500);
  pool.register_plan(small_plan, 10);
  EXPECT_EQ(pool.bytes_per_lane(), large_plan.workspace_size(500).bytes);
  pool.lock();
  RandomInput input = small.input(10), large_input = large.input(12);
  const Bytes expected = run_exact(small_plan, input);
  const Bytes large_expected = run_exact(large_plan, large_input);
  for (const int lane : {0, 1, 0}) {
    EXPECT_EQ(run(small_plan, input, pool.lane(lane)), expected);
    EXPECT_EQ(run(large_plan, large_input, pool.lane(lane)), large_expected);
  }
  expect_contains(
      error_of(ErrorCode::workspace_too_small, [&] { pool.register_plan(large_plan, 501); }),
      {"pool", std::to_string(large_plan.workspace_size(501).bytes),
       "got " + std::to_string(large_plan.workspace_size(500).bytes), "locked"});
  EXPECT_EQ(run(small_plan, input, pool.lane(1)), expected);
}

}  // namespace
}  // namespace fusedmoe::test
