// Contract 5.4.3: a plan with a runner in its options starts no thread, neither in create nor
// later. A process of its own: once started, the library's threads stay.
#include <gtest/gtest.h>

#include <filesystem>
#include <iterator>
#include <optional>

#include "support/layer.h"
#include "support/runners.h"

namespace fusedmoe::test {
namespace {

long tasks() {
  return static_cast<long>(std::distance(std::filesystem::directory_iterator("/proc/self/task"),
                                         std::filesystem::directory_iterator()));
}

TEST(ContractRunner, T3_APlanWithARunnerStartsNoThread) {
  const Layer layer;
  RandomInput input = layer.input(40);
  TestRunner runner(TestRunner::Kind::sequential, 3);
  PlanOptions options;
  options.runner = runner.view();
  const long before = tasks();
  std::optional<FusedMoe> plan;
  const auto expect_none = [&](const char* what, const auto& f) {
    const int runs = runner.runs();
    f();
    EXPECT_EQ(tasks(), before) << what;
    EXPECT_GT(runner.runs(), runs) << what << " did not come to its threads";
  };
  expect_none("create", [&] { plan = layer.plan(options); });
  expect_none("refresh", [&] { plan->refresh(layer.weights.view()); });
  Bytes expected;
  expect_none("apply", [&] { expected = run_exact(*plan, input); });
  expect_none("max_threads", [&] {
    options.max_threads = 2;
    EXPECT_EQ(run_exact(layer.plan(options), input), expected);
  });
  expect_none("borrowed weights", [&] {
    options.weight_storage = WeightStorage::borrowed;
    EXPECT_EQ(run_exact(layer.plan(options), input), expected);
  });
  (void)layer.plan({.max_threads = 3});
  // Two, and one more where a sanitizer brings its own.
  EXPECT_GE(tasks(), before + 2) << "the test does not see threads";
  EXPECT_EQ(run_exact(*plan, input), expected);
}

}  // namespace
}  // namespace fusedmoe::test
