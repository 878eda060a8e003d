// Contract 5.1.1: apply and the routing functions allocate nothing, free nothing and start no
// thread. Counted, not read: operator new, malloc and its kin, mmap and pthread_create.
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <functional>
#include <thread>

#include "support/allocation_counter.h"
#include "support/layer.h"
#include "support/runners.h"

namespace fusedmoe::test {
namespace {

long tasks() {
  long count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    count += task.path().empty() ? 0 : 1;
  }
  return count;
}

// Allocations of f, and threads that are there after it but were not before.
void expect_none(const char* what, const std::function<void()>& f) {
  const long before = tasks();
  const allocation::Counts counts = allocation::count(f);
  EXPECT_EQ(tasks(), before) << what;
  EXPECT_EQ(counts.all(), 0) << what << ": new " << counts.news << ", delete " << counts.deletes
                             << ", malloc " << counts.mallocs << ", free " << counts.frees
                             << ", mmap " << counts.maps << ", threads " << counts.threads;
}

void keep(void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

TEST(ContractMemory, M1_TheCounterCounts) {
  const auto news = [](const auto& f) { return allocation::count(f).news; };
  EXPECT_EQ(news([] {
              auto* p = new int;
              keep(p);
              delete p;
            }),
            1);
  EXPECT_EQ(news([] {
              auto* p = new char[100];
              keep(p);
              delete[] p;
            }),
            1);
  EXPECT_EQ(news([] {
              auto* p = new (std::nothrow) int;
              keep(p);
              delete p;
            }),
            1);
  struct alignas(128) Wide {
    char bytes[128];
  };
  EXPECT_EQ(news([] {
              auto* p = new Wide;
              keep(p);
              delete p;
            }),
            1);
  EXPECT_EQ(news([] {
              auto* p = new (std::nothrow) Wide[3];
              keep(p);
              delete[] p;
            }),
            1);
  const allocation::Counts pair = allocation::count([] {
    std::vector<int> v(100);
    keep(v.data());
  });
  EXPECT_EQ(pair.news, 1);
  EXPECT_EQ(pair.deletes, 1);
  const allocation::Counts kin = allocation::count([] {
    void* a = std::malloc(10);
    keep(a);
    void* b = std::calloc(10, 10);
    keep(b);
    a = std::realloc(a, 1000);
    keep(a);
    void* c = nullptr;
    ASSERT_EQ(posix_memalign(&c, 64, 64), 0);
    void* d = std::aligned_alloc(64, 64);
    keep(d);
    for (void* p : {a, b, c, d}) std::free(p);
  });
  EXPECT_EQ(kin.mallocs, 5);
  EXPECT_EQ(kin.frees, 4);
  const allocation::Counts pages = allocation::count([] {
    void* p = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(p, 4096);
  });
  EXPECT_EQ(pages.maps, 2);
  EXPECT_EQ(allocation::count([] { std::thread([] {}).join(); }).threads, 1);
  // Those of other threads as well.
  std::atomic<int> step{0};
  std::thread other([&] {
    while (step != 1) std::this_thread::yield();
    auto* p = new int;
    keep(p);
    delete p;
    step = 2;
  });
  EXPECT_EQ(news([&] {
              step = 1;
              while (step != 2) std::this_thread::yield();
            }),
            1);
  other.join();
}

// A gang of three that is there already.
class StandingGang {
 public:
  StandingGang() {
    view_.run = [](void* self, int count, void (*body)(void*, int), void* argument) {
      auto& gang = *static_cast<StandingGang*>(self);
      gang.body_ = body;
      gang.argument_ = argument;
      gang.left_ = count - 1;
      gang.count_ = count;
      ++gang.job_;
      body(argument, 0);
      while (gang.left_ > 0) std::this_thread::yield();
    };
    view_.self = this;
    view_.num_threads = 3;
    view_.gang = true;
    for (int i = 1; i < 3; ++i)
      threads_[static_cast<std::size_t>(i - 1)] = std::thread([this, i] {
        for (int seen = 0;; ++seen) {
          while (job_ == seen) std::this_thread::yield();
          if (stop_) return;
          if (i >= count_) continue;
          body_(argument_, i);
          --left_;
        }
      });
  }
  ~StandingGang() {
    stop_ = true;
    ++job_;
    for (std::thread& thread : threads_) thread.join();
  }
  const ThreadRunner* view() const { return &view_; }

 private:
  ThreadRunner view_;
  std::array<std::thread, 2> threads_;
  std::atomic<int> job_{0}, left_{0}, count_{0};
  std::atomic<bool> stop_{false};
  void (*body_)(void*, int) = nullptr;
  void* argument_ = nullptr;
};

void expect_apply_allocates_nothing(const Layer& layer, const PlanOptions& options) {
  const FusedMoe plan = layer.plan(options);
  RandomInput decode = layer.input(1);
  RandomInput prefill = layer.input(150);
  Scratch whole(plan.workspace_size(150).bytes);
  Scratch small(plan.workspace_size(7).bytes);
  const FusedMoe::TwoSpans two = plan.workspace_sizes_13_2(150);
  Scratch first(two.workspace13.bytes), second(two.workspace2.bytes);
  std::vector<std::int32_t> map = {3, 4, 5, 6, 0, 1, 2};
  ApplyContext mapped;
  mapped.expert_map = map;
  const auto apply = [&](RandomInput& in, Workspace workspace, const ApplyContext& context = {}) {
    plan.apply(in.output(), in.hidden(), in.topk_weights(), in.topk_ids(), workspace, context);
  };
  // The very first call of the plan is counted, too: nothing is set up lazily.
  expect_none("decode", [&] { apply(decode, whole); });
  expect_none("prefill", [&] { apply(prefill, whole); });
  expect_none("chunked", [&] { apply(prefill, small); });
  expect_none("two spans", [&] { apply(prefill, {first.span(), second.span()}); });
  expect_none("map of the call", [&] { apply(prefill, whole, mapped); });
  expect_none("zero tokens", [&] { plan.apply({}, {}, {}, {}, whole); });
  TestRunner sequential(TestRunner::Kind::sequential, 4);
  ApplyContext fork_join;
  fork_join.runner = sequential.view();
  expect_none("fork-join runner", [&] { apply(prefill, whole, fork_join); });
  StandingGang gang;
  ApplyContext with_gang;
  with_gang.runner = gang.view();
  with_gang.expert_map = map;
  expect_none("gang and map", [&] { apply(prefill, whole, with_gang); });
  expect_none("sizes", [&] {
    (void)plan.workspace_size(100);
    (void)plan.min_workspace_size();
    (void)plan.workspace_sizes_13_2(100);
    (void)plan.workspace_formula();
    (void)plan.weights_version();
  });
  EXPECT_GT(allocation::count([&] { apply(prefill, {}); }).news, 0) << "allocate mode allocates";
}

TEST(ContractMemory, M1_ApplyAllocatesNothing) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const int threads : {1, 3}) {
      for (const WeightStorage storage : {WeightStorage::own, WeightStorage::borrowed}) {
        for (const std::string& isa : isas()) {
          SCOPED_TRACE(isa + ", " + to_string(dtype) + ", threads " + std::to_string(threads));
          PlanOptions options;
          options.isa = isa;
          options.max_threads = threads;
          options.weight_storage = storage;
          options.counters = threads == 3;
          expect_apply_allocates_nothing(Layer(odd_config(dtype)), options);
        }
      }
    }
  }
}

TEST(ContractMemory, M1_NeitherDoesAPlanWithVersionMapOrZeroExperts) {
  std::atomic<std::uint64_t> version{1};
  const Layer layer;
  RandomInput input = layer.input(40);
  ExpertWeights weights = layer.weights.view();
  weights.version = &version;
  for (const int local : {7, 3, 0}) {
    std::vector<std::int32_t> map(7, -1);
    for (int i = 0; i < local; ++i) map[static_cast<std::size_t>(6 - i)] = i;
    PlanOptions options;
    options.expert_map = ExpertMap::explicit_map(map);
    options.on_stale = StalePolicy::refresh;
    for (auto* experts : {&weights.w13.experts, &weights.w2.experts, &weights.w13_bias.experts,
                          &weights.w2_bias.experts}) {
      *experts = local;
    }
    const FusedMoe plan = FusedMoe::create(layer.config, weights, options);
    Scratch scratch(plan.workspace_size(40).bytes);
    expect_none("with a version", [&] {
      plan.apply(input.output(), input.hidden(), input.topk_weights(), input.topk_ids(), scratch);
    });
  }
}

TEST(ContractMemory, M1_NeitherDoesAPlanWithARunnerOfItsOwn) {
  StandingGang gang;
  PlanOptions options;
  options.runner = gang.view();
  expect_apply_allocates_nothing(Layer(), options);
}

TEST(ContractMemory, M1_RoutingAllocatesNothing) {
  constexpr std::int64_t kTokens = 9;
  for (const std::int64_t experts : {64, 1536}) {  // 1536: more than any table on the stack
    std::vector<float> logits(static_cast<std::size_t>(kTokens * experts));
    std::vector<float> bias(static_cast<std::size_t>(experts), 0.25F);
    std::mt19937_64 random(1);
    for (float& x : logits) x = std::normal_distribution<float>()(random);
    std::array<float, kTokens * 8> weights{};
    std::array<std::int64_t, kTokens * 8> ids{};
    const ConstMatrixView in(logits.data(), DType::f32, kTokens, experts);
    const MatrixView out(weights.data(), DType::f32, kTokens, 8);
    const MatrixView out_ids(ids.data(), DType::i64, kTokens, 8);
    RoutingConfig config;
    config.top_k = 8;
    config.renormalise = Renormalise::sum_epsilon;
    config.selection_bias = {bias.data(), DType::f32, 1, experts};
    RoutingConfig grouped = config;
    grouped.num_groups = 8;
    grouped.topk_group = 4;
    RoutingConfig general = grouped;
    general.score_function = ScoreFunction::softmax;
    expect_none("topk_softmax", [&] { topk_softmax(config, in, out, out_ids); });
    expect_none("topk_sigmoid", [&] { topk_sigmoid(config, in, out, out_ids); });
    expect_none("topk_softplus_sqrt", [&] { topk_softplus_sqrt(config, in, out, out_ids); });
    expect_none("grouped_topk", [&] { grouped_topk(grouped, in, out, out_ids); });
    expect_none("route", [&] { route(general, in, out, out_ids); });
  }
}

}  // namespace
}  // namespace fusedmoe::test
