// Section 4: where packed weights live. In memory of the plan's own, in the caller's (which a later
// plan adopts, or refuses), or nowhere: borrowed.
#include <gtest/gtest.h>

#include <optional>
#include <stdexcept>

#include "support/layer.h"

namespace fusedmoe::test {
namespace {

// How panels lie, and so how large they are, depends on the instruction set.
Scratch storage_for(const Layer& layer, const std::string& isa = "") {
  PlanOptions options;
  options.isa = isa;
  const WorkspaceSize size =
      FusedMoe::packed_weights_size(layer.config, layer.weights.view(), options);
  EXPECT_EQ(size.alignment, 64);
  return Scratch(size.bytes);
}

PlanOptions with_storage(WeightStorage kind, std::span<std::byte> storage) {
  PlanOptions options;
  options.weight_storage = kind;
  options.storage = storage;
  return options;
}

TEST(ContractStorage, B103_PackingTwiceGivesTheSameBytes) {
  const Layer layer;
  Scratch first = storage_for(layer), second = storage_for(layer);
  second.fill(std::byte{0x11});
  FusedMoe a = layer.plan(with_storage(WeightStorage::caller, first.span()));
  const FusedMoe b = layer.plan(with_storage(WeightStorage::caller, second.span()));
  const Bytes once(first.span().begin(), first.span().end());
  EXPECT_TRUE(std::equal(once.begin(), once.end(), second.span().begin()))
      << "what the memory held shines through";
  a.refresh(layer.weights.view());
  a.refresh(layer.weights.view());
  EXPECT_TRUE(std::equal(once.begin(), once.end(), first.span().begin()));
  // One expert at a time, by any number of threads.
  PlanOptions options = with_storage(WeightStorage::caller, second.span());
  options.max_threads = 5;
  (void)FusedMoe::create(layer.config, layer.weights.as_source(), options);
  EXPECT_TRUE(std::equal(once.begin(), once.end(), second.span().begin()));
  EXPECT_EQ(a.weight_bytes(), static_cast<std::int64_t>(once.size()));
}

TEST(ContractStorage, S1_EveryStorageGivesTheSameBits) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const std::string& isa : isas()) {
      const Layer layer(odd_config(dtype));
      Scratch memory = storage_for(layer, isa);
      PlanOptions caller = with_storage(WeightStorage::caller, memory.span());
      PlanOptions adopt = with_storage(WeightStorage::adopt, memory.span());
      PlanOptions own = with_storage(WeightStorage::own, {});
      PlanOptions borrowed = with_storage(WeightStorage::borrowed, {});
      for (PlanOptions* options : {&caller, &adopt, &own, &borrowed}) options->isa = isa;
      for (const std::int64_t num_tokens : {1, 70}) {
        RandomInput input = layer.input(num_tokens);
        const Bytes expected = run_exact(layer.plan(own), input);
        expect_oracle(layer.config, layer.weights.view(), input);
        EXPECT_EQ(run_exact(layer.plan(caller), input), expected);
        EXPECT_EQ(run_exact(layer.plan(adopt), input), expected);
        EXPECT_EQ(run_exact(layer.plan(borrowed), input), expected);
        EXPECT_EQ(run_exact(FusedMoe::create(layer.config, layer.weights.as_source(), own), input),
                  expected);
      }
    }
  }
}

TEST(ContractStorage, S2_BorrowedWeightsHaveNoCopyAndMayLieAnyhow) {
  const MoeConfig config = odd_config();
  for (const WeightLayout layout : {WeightLayout::nk, WeightLayout::kn}) {
    const RandomWeights weights(config, 7,
                                {.w13_layout = layout,
                                 .w2_layout = layout,
                                 .w13_bias = true,
                                 .row_padding = 5,
                                 .misalign = 2},
                                3);
    const FusedMoe packed = FusedMoe::create(config, weights.view());
    const FusedMoe borrowed =
        FusedMoe::create(config, weights.view(), {.weight_storage = WeightStorage::borrowed});
    EXPECT_EQ(borrowed.weight_bytes(), 0);
    RandomInput input(config, {.num_tokens = 23}, 4);
    const Bytes expected = run_exact(packed, input);
    expect_oracle(config, weights.view(), input);
    EXPECT_EQ(run_exact(borrowed, input), expected);
  }
}

TEST(ContractStorage, S3_AdoptNeitherReadsWeightsNorWritesStorage) {
  const Layer layer;
  Scratch memory = storage_for(layer);
  RandomInput input = layer.input(9);
  const Bytes expected =
      run_exact(layer.plan(with_storage(WeightStorage::caller, memory.span())), input);
  const std::uint64_t before =
      checksum(memory.span().data(), static_cast<std::int64_t>(memory.span().size()));
  ExpertWeights shapes = layer.weights.as_source();
  shapes.source = [](std::int64_t) -> ExpertWeights { throw std::logic_error("read"); };
  FusedMoe plan =
      FusedMoe::create(layer.config, shapes, with_storage(WeightStorage::adopt, memory.span()));
  EXPECT_EQ(run_exact(plan, input), expected);
  EXPECT_EQ(checksum(memory.span().data(), static_cast<std::int64_t>(memory.span().size())),
            before);
  shapes.source = nullptr;  // shapes alone are enough
  EXPECT_EQ(run_exact(FusedMoe::create(layer.config, shapes,
                                       with_storage(WeightStorage::adopt, memory.span())),
                      input),
            expected);
  plan.refresh(layer.weights.view());
  EXPECT_EQ(run_exact(plan, input), expected);
}

TEST(ContractStorage, S4_ForeignMemoryIsRefused) {
  const Layer layer;
  Scratch memory = storage_for(layer);
  const PlanOptions adopt = with_storage(WeightStorage::adopt, memory.span());
  const auto refused = [&](const Layer& by, std::initializer_list<std::string> parts) {
    expect_contains(error_of(ErrorCode::invalid_argument, [&] { (void)by.plan(adopt); }), parts);
  };
  for (const std::byte fill : {std::byte{0}, std::byte{0xff}, std::byte{0x5a}}) {
    memory.fill(fill);
    refused(layer, {"options.storage", "weights that a CPU plan of this version packed",
                    "other memory", "weight_storage = caller"});
  }
  (void)layer.plan(with_storage(WeightStorage::caller, memory.span()));
  EXPECT_NO_THROW((void)layer.plan(adopt));
  const auto other = [](auto change) {
    MoeConfig config = odd_config();
    change(config);
    return Layer(config);
  };
  refused(other([](MoeConfig& c) { c.hidden_size = 129; }), {"hidden_size = 129", "131"});
  refused(other([](MoeConfig& c) { c.intermediate_size = 76; }), {"intermediate_size = 76", "77"});
  refused(other([](MoeConfig& c) { c.num_experts = 6; }), {"local experts = 6", "7"});
  refused(other([](MoeConfig& c) { c.activation.kind = Activation::relu2; }), {"gated = 0", "1"});
  refused(other([](MoeConfig& c) { c.dtype = DType::f16; }), {"format of w13"});
  refused(Layer(odd_config(), 1, -1, false), {"w13 bias = 0", "1"});
  EXPECT_NO_THROW((void)layer.plan(adopt)) << "refusing changed the memory";
  // Another k or another order of rows packs to the same panels.
  EXPECT_NO_THROW((void)other([](MoeConfig& c) { c.top_k = 1; }).plan(adopt));
}

TEST(ContractStorage, S5_PackingThatWasBrokenOffIsRefused) {
  const Layer layer;
  Scratch memory = storage_for(layer);
  const PlanOptions caller = with_storage(WeightStorage::caller, memory.span());
  const PlanOptions adopt = with_storage(WeightStorage::adopt, memory.span());
  ExpertWeights broken = layer.weights.as_source();
  broken.source = [from = broken.source](std::int64_t expert) {
    if (expert == 6) throw std::runtime_error("killed");
    return from(expert);
  };
  const auto expect_incomplete = [&] {
    expect_contains(error_of(ErrorCode::invalid_argument, [&] { (void)layer.plan(adopt); }),
                    {"options.storage", "complete weights", "broken off"});
  };
  EXPECT_THROW((void)FusedMoe::create(layer.config, broken, caller), std::runtime_error);
  expect_incomplete();
  FusedMoe plan = layer.plan(caller);
  EXPECT_NO_THROW((void)layer.plan(adopt));
  EXPECT_THROW(plan.refresh(broken), std::runtime_error);
  expect_incomplete();
  const std::int64_t last[] = {6};
  plan.refresh(layer.weights.view());
  ExpertWeights one = slice(layer.weights.as_source(), 6);
  one.source = broken.source;
  EXPECT_THROW(plan.refresh_experts(last, one), std::runtime_error);
  expect_incomplete();
  plan.refresh(layer.weights.view());
  EXPECT_NO_THROW((void)layer.plan(adopt));
}

TEST(ContractStorage, S6_AddressesStayOverRefreshReleaseAndMove) {
  const Layer layer;
  Scratch memory = storage_for(layer);
  std::optional<FusedMoe> plan = layer.plan(with_storage(WeightStorage::caller, memory.span()));
  const Bytes packed(memory.span().begin(), memory.span().end());
  plan->release_weights();
  memory.fill(std::byte{0});  // asleep, the memory is the caller's
  plan->refresh(layer.weights.view());
  EXPECT_TRUE(std::equal(packed.begin(), packed.end(), memory.span().begin()));
  FusedMoe moved = std::move(*plan);
  plan.reset();  // a moved-from plan is destroyed
  RandomInput input = layer.input(5);
  run_exact(moved, input);
  expect_oracle(layer.config, layer.weights.view(), input);
  FusedMoe other = Layer(odd_config(), 9).plan();
  other = std::move(moved);  // over a live plan
  run_exact(other, input);
  expect_oracle(layer.config, layer.weights.view(), input);
  moved = layer.plan();  // into a moved-from plan
  run_exact(moved, input);
  expect_oracle(layer.config, layer.weights.view(), input);
}

}  // namespace
}  // namespace fusedmoe::test
