// Contract 5.3.7: every single allocation of every function that may allocate fails once: an Error
// with out_of_memory (or success), no leak, and a plan that works afterwards.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <array>
#include <cstring>
#include <functional>
#include <optional>

#include "support/allocation_counter.h"
#include "support/layer.h"
#include "support/runners.h"

namespace fusedmoe::test {
namespace {

// f with its first, second, ... allocation failing, until it has no more. `after` looks at what
// each failure left. Returns how many failures there were.
int fail_each(const std::function<void()>& f, const std::function<void(bool)>& after) {
  for (long n = 0; n < 2000; ++n) {
    const long heap = allocation::live_bytes;
    const long mapped = allocation::mapped_bytes;
    std::array<char, 512> text{};  // of the exception, which is gone when leaks are counted
    bool threw = false, fired = true, is_out_of_memory = false;
    try {
      fired = allocation::fail_nth(n, f);
    } catch (const std::exception& exception) {
      threw = true;
      const auto* error = dynamic_cast<const Error*>(&exception);
      is_out_of_memory = error != nullptr && error->code() == ErrorCode::out_of_memory;
      std::strncpy(text.data(), exception.what(), text.size() - 1);
    }
    if (threw) {
      EXPECT_EQ(allocation::live_bytes, heap) << "leak after failure " << n;
      EXPECT_EQ(allocation::mapped_bytes, mapped) << "leak of pages after failure " << n;
      EXPECT_TRUE(is_out_of_memory) << "failure " << n << " gave: " << text.data();
      EXPECT_NE(std::string(text.data()).find("; "), std::string::npos) << text.data();
    }
    after(threw);
    if (!fired) return static_cast<int>(n);
  }
  ADD_FAILURE() << "no end";
  return -1;
}

class ContractFailure : public testing::Test {
 protected:
  ContractFailure() { run_exact(layer_.plan({.max_threads = 3}), input_); }  // starts the threads

  Layer layer_;
  Layer other_{odd_config(), 2};
  RandomInput input_ = layer_.input(8);
  Bytes expected_ = run_exact(layer_.plan(), input_);
  Bytes expected_other_ = run_exact(other_.plan(), input_);
};

TEST_F(ContractFailure, F1_Create) {
  Scratch storage(FusedMoe::packed_weights_size(layer_.config, layer_.weights.view()).bytes);
  Bytes expected = expected_;
  const auto check = [&](const ExpertWeights& weights, const PlanOptions& options) {
    const int failures = fail_each([&] { (void)FusedMoe::create(layer_.config, weights, options); },
                                   [&](bool) {
                                     FusedMoe plan =
                                         FusedMoe::create(layer_.config, weights, options);
                                     EXPECT_EQ(run_exact(plan, input_), expected);
                                   });
    EXPECT_GT(failures, 2) << "this test sees no allocations";
  };
  PlanOptions options;
  options.max_threads = 3;
  options.counters = true;
  check(layer_.weights.view(), options);
  check(layer_.weights.as_source(), options);
  options.expert_map = ExpertMap::explicit_map({0, 1, 2, 3, 4, 5, 6});
  options.isa = "avx2";  // other kernels, other bits
  expected = run_exact(layer_.plan({.isa = "avx2"}), input_);
  options.weight_storage = WeightStorage::borrowed;
  check(layer_.weights.view(), options);
  options.weight_storage = WeightStorage::caller;
  options.storage = storage.span();
  check(layer_.weights.view(), options);
  options.weight_storage = WeightStorage::adopt;
  check(layer_.weights.view(), options);
}

TEST_F(ContractFailure, F1_SupportsAndSizes) {
  fail_each([&] { EXPECT_TRUE(FusedMoe::supports(layer_.config, layer_.weights.view()).ok); },
            [](bool) {});
  fail_each([&] { (void)FusedMoe::packed_weights_size(layer_.config, layer_.weights.view()); },
            [](bool) {});
}

TEST_F(ContractFailure, F2_Refresh) {
  for (const WeightStorage storage : {WeightStorage::own, WeightStorage::borrowed}) {
    for (const bool source : {false, true}) {
      if (source && storage == WeightStorage::borrowed) continue;
      FusedMoe plan = layer_.plan({.weight_storage = storage});
      const ExpertWeights old = source ? layer_.weights.as_source() : layer_.weights.view();
      const ExpertWeights next = source ? other_.weights.as_source() : other_.weights.view();
      plan.refresh(old);
      fail_each([&] { plan.refresh(next); },
                [&](bool threw) {
                  // Stale and said so, or as before: never half of both.
                  try {
                    const Bytes got = run_exact(plan, input_);
                    EXPECT_EQ(got, threw ? expected_ : expected_other_);
                  } catch (const Error& error) {
                    EXPECT_EQ(error.code(), ErrorCode::stale_weights);
                    EXPECT_TRUE(threw);
                    EXPECT_TRUE(untouched(input_));
                  }
                  plan.refresh(next);
                  EXPECT_EQ(run_exact(plan, input_), expected_other_);
                  plan.refresh(old);
                  EXPECT_EQ(run_exact(plan, input_), expected_);
                });
    }
  }
}

TEST_F(ContractFailure, F2_RefreshOfSomeExperts) {
  FusedMoe plan = layer_.plan();
  const std::int64_t some[] = {3};
  const ExpertWeights one = slice(layer_.weights.view(), 3);
  fail_each([&] { plan.refresh_experts(some, one); },
            [&](bool) {
              plan.refresh(layer_.weights.view());
              EXPECT_EQ(run_exact(plan, input_), expected_);
            });
}

TEST_F(ContractFailure, F3_ApplyThatAllocates) {
  const FusedMoe plan = layer_.plan();
  input_.dirty_output();
  const int failures = fail_each(
      [&] {
        plan.apply(input_.output(), input_.hidden(), input_.topk_weights(), input_.topk_ids());
      },
      [&](bool threw) {
        EXPECT_TRUE(!threw || untouched(input_));
        EXPECT_EQ(run(plan, input_), expected_);
        input_.dirty_output();
      });
  EXPECT_EQ(failures, 1) << "one allocation per call, the workspace";
}

TEST_F(ContractFailure, F4_WorkspaceBuffer) {
  std::optional<WorkspaceBuffer> made;
  EXPECT_GE(fail_each(
                [&] {
                  made.emplace(Device::cpu(), WorkspaceSize{1000, 64});
                },
                [&](bool) { made.reset(); }),
            2);
  WorkspaceBuffer buffer(Device::cpu(), {1000, 64});
  EXPECT_GE(fail_each(
                [&] {
                  buffer.reserve({buffer.bytes() + 1000, 64});
                },
                [&, have = buffer.bytes()](bool threw) mutable {
                  EXPECT_EQ(buffer.bytes(), threw ? have : have + 1000);
                  EXPECT_EQ(buffer.span().size(), static_cast<std::size_t>(buffer.bytes()));
                  std::fill(buffer.span().begin(), buffer.span().end(), std::byte{1});
                  have = buffer.bytes();
                }),
            1);
}

TEST_F(ContractFailure, F5_WorkspacePool) {
  const FusedMoe plan = layer_.plan();
  EXPECT_GE(fail_each([] { WorkspacePool(Device::cpu(), 3); }, [](bool) {}), 4);
  for (const bool locks : {false, true}) {
    std::optional<WorkspacePool> pool;
    pool.emplace(Device::cpu(), 2);
    pool->register_plan(plan, 8);
    bool done = false;
    for (long n = 0; !done; ++n) {  // what a failure has reserved stays with the pool
      try {
        done = !allocation::fail_nth(n, [&] {
          if (locks) {
            pool->lock();
          } else {
            (void)pool->lane(1);
          }
        });
      } catch (const Error& error) {
        EXPECT_STREQ(to_string(error.code()), "out_of_memory");
      }
      ASSERT_LT(n, 100);
    }
    EXPECT_EQ(run(plan, input_, pool->lane(1)), expected_);
    EXPECT_EQ(run(plan, input_, pool->lane(0)), expected_);
  }
}

// f in a child that may use `more` bytes of addresses beyond what it has; its exit status.
int run_limited(long more, const std::function<bool()>& f) {
  const pid_t child = fork();
  if (child == 0) {
    long pages = 0;
    FILE* file = std::fopen("/proc/self/statm", "r");
    const bool read = std::fscanf(file, "%ld", &pages) == 1;
    std::fclose(file);
    const auto limit = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE) + more);
    const rlimit limits{limit, limit};
    if (!read || setrlimit(RLIMIT_AS, &limits) != 0) _exit(3);
    alarm(20);
    try {
      _exit(f() ? 0 : 1);
    } catch (...) {
      _exit(2);
    }
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

// True when f throws out_of_memory and its text has `part`.
bool runs_out(const std::function<void()>& f, const char* part) {
  try {
    f();
  } catch (const Error& error) {
    return error.code() == ErrorCode::out_of_memory &&
           std::string(error.what()).find(part) != std::string::npos;
  }
  return false;
}

TEST_F(ContractFailure, F6_TheSystemHasNoPages) {
  constexpr long kMiB = 1 << 20;
  MoeConfig large = layer_.config;
  large.hidden_size = 4096;
  large.intermediate_size = 4096;  // 7 * 96 MiB packed
  const std::vector<std::byte> zeros(3 * 2 * 4096 * 4096);
  ExpertWeights weights;
  weights.w13 = {.experts = 7, .outputs = 8192, .inputs = 4096};
  weights.w2 = {.experts = 7, .outputs = 4096, .inputs = 4096};
  weights.source = [&zeros, shapes = weights](std::int64_t) {
    ExpertWeights one = shapes;
    one.w13.experts = one.w2.experts = 1;
    one.w13.data = one.w2.data = zeros.data();
    return one;
  };
  const FusedMoe plan = layer_.plan({.max_threads = 1});
  const std::int64_t many = (120 * kMiB) / plan.workspace_formula().per_token;
  RandomInput long_input(layer_.config, {.num_tokens = many}, 1);
  const auto works = [&] {  // in what is left, without more
    input_.dirty_output();
    plan.apply(input_.output(), input_.hidden(), input_.topk_weights(), input_.topk_ids());
    return input_.output_bytes() == expected_;
  };
  EXPECT_EQ(run_limited(30 * kMiB,
                        [&] {
                          return runs_out([&] { (void)FusedMoe::create(large, weights); },
                                          "packed weights") &&
                                 works();
                        }),
            0);
  EXPECT_EQ(run_limited(30 * kMiB,
                        [&] {
                          return runs_out(
                                     [&] {
                                       plan.apply(long_input.output(), long_input.hidden(),
                                                  long_input.topk_weights(), long_input.topk_ids());
                                     },
                                     "workspace") &&
                                 untouched(long_input) && works();
                        }),
            0);
  EXPECT_EQ(run_limited(30 * kMiB,
                        [&] {
                          return runs_out([&] { (void)layer_.plan({.max_threads = 600}); },
                                          "max_threads") &&
                                 works();
                        }),
            0);
}

}  // namespace
}  // namespace fusedmoe::test
