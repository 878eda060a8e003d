// ExpertWeights::owner and version_owner: held for as long as the plan may read, and no longer.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>

#include "fusedmoe/fusedmoe.h"
#include "support/layer.h"

namespace fusedmoe {
namespace {

using test::Layer;

struct Owned {
  std::shared_ptr<int> tensors = std::make_shared<int>(1);
  std::shared_ptr<std::atomic<std::uint64_t>> version =
      std::make_shared<std::atomic<std::uint64_t>>(0);

  ExpertWeights of(const Layer& layer) const {
    ExpertWeights weights = layer.weights.view();
    weights.owner = tensors;
    weights.version = version.get();
    weights.version_owner = version;
    return weights;
  }
};

TEST(ContractWeightsOwner, HeldAsLongAsThePlanMayRead) {
  const Layer layer;
  for (const WeightStorage storage : {WeightStorage::own, WeightStorage::borrowed}) {
    for (const StalePolicy policy : {StalePolicy::raise, StalePolicy::refresh}) {
      const bool reads_again = storage == WeightStorage::borrowed || policy == StalePolicy::refresh;
      const Owned first, second;
      PlanOptions options;
      options.weight_storage = storage;
      options.on_stale = policy;
      {
        FusedMoe plan = FusedMoe::create(layer.config, first.of(layer), options);
        EXPECT_EQ(first.tensors.use_count() > 1, reads_again);
        EXPECT_GT(first.version.use_count(), 1);
        plan.refresh(second.of(layer));
        EXPECT_EQ(first.tensors.use_count(), 1);
        EXPECT_EQ(first.version.use_count(), 1);
        EXPECT_EQ(second.tensors.use_count() > 1, reads_again);
        plan.release_weights();
        EXPECT_EQ(second.tensors.use_count(), 1);
        EXPECT_EQ(second.version.use_count(), 1);
        plan.refresh(second.of(layer));
      }
      EXPECT_EQ(second.tensors.use_count(), 1);
      EXPECT_EQ(second.version.use_count(), 1);
    }
  }
}

// Every call asks the counter, also after a refresh that failed.
TEST(ContractWeightsOwner, ACounterOutlivesTheRefreshThatFailed) {
  const Layer layer;
  FusedMoe plan = layer.plan();
  std::weak_ptr<std::atomic<std::uint64_t>> counter;
  {
    const Owned owned;
    counter = owned.version;
    ExpertWeights weights = owned.of(layer);
    weights.source = [](std::int64_t) -> ExpertWeights { throw std::runtime_error("broken"); };
    EXPECT_THROW(plan.refresh(weights), std::runtime_error);
  }
  EXPECT_FALSE(counter.expired());
  RandomInput input = layer.input(3);
  try {
    test::run(plan, input);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::stale_weights);
  }
  plan.refresh(layer.weights.view());
  EXPECT_TRUE(counter.expired());
}

}  // namespace
}  // namespace fusedmoe
