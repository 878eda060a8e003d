// Plans whose panels are shared by several memory nodes, on any machine: the nodes are made up, by
// FUSEDMOE_NUMA_NODES, before anything in this process asks for them. Their bits are those of a
// process with one node; a node's panels are multiplied by its own threads, which are as many as
// any other node's.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <set>

#include "backends/cpu/cpu_isa.h"
#include "backends/cpu/numa.h"
#include "support/layer.h"
#include "support/runners.h"

namespace fusedmoe::test {
namespace {

constexpr int kNodes = 3;

MoeConfig config_of(DType dtype) {
  MoeConfig config = odd_config(dtype);
  config.hidden_size = 331;  // 11 panels of w2, 13 of w13: no multiples of the nodes
  config.intermediate_size = 203;
  return config;
}

struct Case {
  DType dtype;
  std::string isa;
  std::int64_t tokens;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const cpu::CpuIsa isa : cpu::all_isas()) {
    if (!cpu::is_available(isa)) continue;
    for (const DType dtype : {DType::bf16, DType::f32}) {
      for (const std::int64_t tokens : {1, 90}) all.push_back({dtype, to_string(isa), tokens});
    }
  }
  return all;
}

FusedMoe plan_of(const Case& one, const Layer& layer, WeightStorage storage, int threads) {
  PlanOptions options;
  options.isa = one.isa;
  options.max_threads = threads;
  options.weight_storage = storage;
  return layer.plan(options);
}

// The results of all cases in a process with one node, by one thread.
std::vector<Bytes> results_with_one_node() {
  constexpr std::size_t kMost = std::size_t{64} << 20;
  void* shared = mmap(nullptr, kMost, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) throw std::bad_alloc();
  const pid_t child = fork();
  if (child == 0) {
    ::setenv("FUSEDMOE_NUMA_NODES", "1", 1);
    auto* to = static_cast<std::byte*>(shared);
    for (const Case& one : cases()) {
      const Layer layer(config_of(one.dtype));
      RandomInput input = layer.input(one.tokens);
      const Bytes bytes = run_exact(plan_of(one, layer, WeightStorage::own, 1), input);
      to = std::copy(bytes.begin(), bytes.end(), to);
    }
    _exit(cpu::numa_nodes().size() == 1 ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0) << "the child with one node";
  std::vector<Bytes> results;
  const auto* from = static_cast<const std::byte*>(shared);
  for (const Case& one : cases()) {
    const auto size = static_cast<std::size_t>(one.tokens * config_of(one.dtype).hidden_size *
                                               bytes_per_element(one.dtype));
    results.emplace_back(from, from + size);
    from += size;
  }
  munmap(shared, kMost);
  return results;
}

class NumaNodes : public testing::Test {
 protected:
  // Before any thread is there, and before the nodes are read.
  static void SetUpTestSuite() {
    expected_ = results_with_one_node();
    ::setenv("FUSEDMOE_NUMA_NODES", std::to_string(kNodes).c_str(), 1);
    ASSERT_EQ(cpu::numa_nodes().size(), static_cast<std::size_t>(kNodes));
  }
  inline static std::vector<Bytes> expected_;
};

TEST_F(NumaNodes, BitsAreThoseOfOneNodeForAnyNumberOfThreads) {
  const std::vector<Case> all = cases();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Layer layer(config_of(all[i].dtype));
    RandomInput input = layer.input(all[i].tokens);
    for (const WeightStorage storage : {WeightStorage::own, WeightStorage::borrowed}) {
      const FusedMoe plan = plan_of(all[i], layer, storage, 19);
      for (const int threads : {1, 2, 3, 4, 7, 19}) {
        SCOPED_TRACE(all[i].isa + ", " + to_string(all[i].dtype) + ", threads " +
                     std::to_string(threads));
        TestRunner in_order(TestRunner::Kind::sequential, threads);
        ApplyContext context;
        context.runner = in_order.view();
        ASSERT_EQ(run_exact(plan, input, context), expected_[i]);
        if (threads != 4) continue;
        TestRunner gang(TestRunner::Kind::gang, threads);
        context.runner = gang.view();
        ASSERT_EQ(run_exact(plan, input, context), expected_[i]);
        const FusedMoe alone = plan_of(all[i], layer, storage, threads);
        ASSERT_EQ(run_exact(alone, input), expected_[i]) << "own threads";
      }
    }
  }
}

TEST_F(NumaNodes, DescriptionAndSizesTellOfTheNodes) {
  const Layer layer(config_of(DType::bf16));
  const FusedMoe plan = layer.plan();
  EXPECT_NE(plan.describe().find("panels shared by 3 NUMA nodes"), std::string::npos);
  EXPECT_EQ(plan.weight_bytes(),
            FusedMoe::packed_weights_size(layer.config, layer.weights.view()).bytes);
}

// Packed for three nodes, adopted for three nodes.
TEST_F(NumaNodes, CallersMemoryAndRefresh) {
  const Layer layer(config_of(DType::bf16)), other(config_of(DType::bf16), 9);
  RandomInput input = layer.input(20);
  FusedMoe own = layer.plan({.max_threads = 4});
  const Bytes expected = run_exact(own, input);
  expect_oracle(layer.config, layer.weights.view(), input);
  Scratch memory(FusedMoe::packed_weights_size(layer.config, layer.weights.view()).bytes);
  PlanOptions options;
  options.storage = memory.span();
  options.weight_storage = WeightStorage::caller;
  EXPECT_EQ(run_exact(layer.plan(options), input), expected);
  options.weight_storage = WeightStorage::adopt;
  EXPECT_EQ(run_exact(layer.plan(options), input), expected);
  own.refresh(other.weights.view());
  const Bytes after = run_exact(own, input);
  expect_oracle(other.config, other.weights.view(), input);
  EXPECT_NE(after, expected);
}

// Runs the bodies one after another and notes, of the last run (gemm2), which columns of the output
// each wrote.
class Watch final : public TestRunner {
 public:
  explicit Watch(int threads) : TestRunner(Kind::sequential, threads) {}
  std::function<Bytes()> look;
  std::vector<std::set<std::size_t>> written;  // [thread] offsets in a row of the output

 private:
  void run(int count, void (*body)(void*, int), void* argument) override {
    written.assign(static_cast<std::size_t>(count), {});
    for (int i = 0; i < count; ++i) {
      const Bytes before = look();
      body(argument, i);
      const Bytes after = look();
      for (std::size_t at = 0; at < after.size(); ++at) {
        if (before[at] != after[at]) written[static_cast<std::size_t>(i)].insert(at);
      }
    }
  }
};

// A case of another library: threads spread unevenly over nodes. From 40 to 48 threads, and fewer.
TEST_F(NumaNodes, B146_ThreadsPerNodeDifferByAtMostOne) {
  MoeConfig config = odd_config(DType::f32);  // fp32 sums: a written column is never as it was
  config.hidden_size = 1700;
  config.intermediate_size = 600;
  config.num_experts = config.top_k = 1;
  const std::int64_t panels = (config.hidden_size + 31) / 32;
  const Layer layer(config);
  RandomInput input = layer.input(1);
  input.set_id(0, 0, 0);
  for (const int threads : {3, 4, 5, 40, 41, 42, 43, 44, 45, 46, 47, 48}) {
    const FusedMoe plan = layer.plan({.max_threads = threads});
    Watch watch(threads);
    watch.look = [&] { return input.output_bytes(); };
    ApplyContext context;
    context.runner = watch.view();
    run_exact(plan, input, context);
    ASSERT_EQ(watch.written.size(), static_cast<std::size_t>(threads)) << "all have work";
    std::vector<int> per_node(kNodes, 0);
    for (int thread = 0; thread < threads; ++thread) {
      const auto& written = watch.written[static_cast<std::size_t>(thread)];
      ASSERT_FALSE(written.empty()) << "thread " << thread << " of " << threads;
      // All of its columns lie in panels of one node: its own.
      const int node = thread % kNodes;
      const std::int64_t first = static_cast<std::int64_t>(*written.begin()) / 4 / 32;
      const std::int64_t last = static_cast<std::int64_t>(*written.rbegin()) / 4 / 32;
      EXPECT_GE(first, panels * node / kNodes) << "thread " << thread << " of " << threads;
      EXPECT_LT(last, panels * (node + 1) / kNodes) << "thread " << thread << " of " << threads;
      ++per_node[static_cast<std::size_t>(node)];
    }
    const auto [least, most] = std::minmax_element(per_node.begin(), per_node.end());
    EXPECT_LE(*most - *least, 1) << threads;
    EXPECT_EQ(per_node[0] + per_node[1] + per_node[2], threads);
  }
  // Fewer threads than nodes: everybody's panels are done all the same (bits: above).
}

}  // namespace
}  // namespace fusedmoe::test
