// Contract 5.1.6: building a plan peaks at the packed weights plus one expert.
#include <gtest/gtest.h>

#include <cstdio>
#include <memory>
#include <optional>

#include "support/allocation_counter.h"
#include "support/layer.h"

namespace fusedmoe::test {
namespace {

constexpr std::int64_t kExperts = 24;

// A source that makes each expert when it is asked for, and drops the one before: as a reader of
// a checkpoint does.
struct Loader {
  MoeConfig config;
  std::int64_t bytes = 2 * 3 * config.hidden_size * config.intermediate_size;
  std::unique_ptr<std::byte[]> memory = {};

  ExpertWeights shapes(std::int64_t experts) const {
    ExpertWeights weights;
    weights.w13 = {
        .experts = experts, .outputs = 2 * config.intermediate_size, .inputs = config.hidden_size};
    weights.w2 = {
        .experts = experts, .outputs = config.hidden_size, .inputs = config.intermediate_size};
    return weights;
  }
  ExpertWeights load(std::int64_t expert) {
    memory.reset();
    memory = std::make_unique<std::byte[]>(static_cast<std::size_t>(bytes));
    std::fill_n(memory.get(), bytes, static_cast<std::byte>(expert));
    ExpertWeights one = shapes(1);
    one.w13.data = memory.get();
    one.w2.data = memory.get() + bytes / 3 * 2;
    return one;
  }
};

TEST(ContractMemory, M6_CreatePeaksAtPackedWeightsPlusOneExpert) {
  Loader loader{
      .config = {
          .hidden_size = 512, .intermediate_size = 352, .num_experts = kExperts, .top_k = 2}};
  ExpertWeights weights = loader.shapes(kExperts);
  weights.source = [&](std::int64_t expert) { return loader.load(expert); };
  const std::int64_t packed = FusedMoe::packed_weights_size(loader.config, weights).bytes;
  EXPECT_GE(packed, kExperts * loader.bytes);
  EXPECT_LT(packed, kExperts * loader.bytes * 102 / 100) << "packing pads too much";
  FusedMoe warm = FusedMoe::create(loader.config, weights);  // threads and tables of the process
  loader.memory.reset();
  constexpr std::int64_t kSmall = 64 << 10;  // the plan's own tables
  for (const bool refresh : {false, true}) {
    const long heap = allocation::live_bytes;
    [[maybe_unused]] const long mapped = allocation::mapped_bytes;
    allocation::peak_bytes = heap;
    std::optional<FusedMoe> plan;
    if (refresh) {
      warm.refresh(weights);
    } else {
      plan = FusedMoe::create(loader.config, weights);
    }
    EXPECT_LE(allocation::peak_bytes - heap, loader.bytes + kSmall);
    EXPECT_GE(allocation::peak_bytes - heap, loader.bytes) << "this test does not see the expert";
    EXPECT_EQ(allocation::mapped_bytes - mapped, refresh ? 0 : packed);
    loader.memory.reset();
    EXPECT_LE(allocation::live_bytes - heap, kSmall) << "create keeps more than the packed weights";
  }
  // In the caller's memory, or borrowed, nothing large is allocated at all.
  Scratch storage(packed);
  const Layer borrowed(loader.config, 1, kExperts, false);
  for (const WeightStorage kind : {WeightStorage::caller, WeightStorage::borrowed}) {
    PlanOptions options;
    options.weight_storage = kind;
    if (kind == WeightStorage::caller) options.storage = storage.span();
    const long heap = allocation::live_bytes, mapped = allocation::mapped_bytes;
    allocation::peak_bytes = heap;
    const FusedMoe plan = borrowed.plan(options);
    EXPECT_LE(allocation::peak_bytes - heap, kSmall);
    EXPECT_EQ(allocation::mapped_bytes, mapped);
  }
}

long resident_bytes() {
  long total = 0, resident = 0;
  FILE* file = std::fopen("/proc/self/statm", "r");
  EXPECT_EQ(std::fscanf(file, "%ld %ld", &total, &resident), 2);
  std::fclose(file);
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(ContractMemory, M6_SleepGivesTheMemoryBackAndWakeKeepsTheAddress) {
  const Layer layer({.hidden_size = 700, .intermediate_size = 300, .num_experts = 8, .top_k = 2}, 1,
                    -1, false);
  const long before = allocation::mapped_bytes;
  FusedMoe plan = layer.plan();
  EXPECT_EQ(allocation::mapped_bytes - before, plan.weight_bytes());
  RandomInput input = layer.input(9);
  const Bytes expected = run_exact(plan, input);
  const auto maps = allocation::count([&] {
    plan.release_weights();
    plan.refresh(layer.weights.view());
  });
  EXPECT_EQ(maps.maps, 0) << "the addresses are given up";
  EXPECT_EQ(run_exact(plan, input), expected);
  const long awake = resident_bytes();
  plan.release_weights();
  EXPECT_LT(resident_bytes(), awake - plan.weight_bytes() / 10 * 9) << "the pages are not back";
  EXPECT_EQ(allocation::mapped_bytes - before, plan.weight_bytes()) << "addresses are kept";
  plan.refresh(layer.weights.view());
  EXPECT_EQ(run_exact(plan, input), expected);
}

}  // namespace
}  // namespace fusedmoe::test
