// Packed weights in memory: offsets, what a plan writes at them, and the header.
#include "backends/cpu/weight_storage.h"

#include <numeric>

#include "backends/cpu/pack.h"
#include "core/validate.h"
#include "formats/format.h"
#include "fusedmoe/fused_moe.h"
#include "kernel_inputs.h"
#include "reference/random_layer.h"

namespace fusedmoe::cpu {
namespace {

// Memory at a multiple of 64 and no more, filled with 0xFF.
class Memory {
 public:
  explicit Memory(std::int64_t bytes) : bytes_(bytes + 128, std::byte{0xff}), size_(bytes) {}
  std::span<std::byte> span() {
    const auto base = reinterpret_cast<std::uintptr_t>(bytes_.data());
    return {bytes_.data() + (64 - base % 64) % 64, static_cast<std::size_t>(size_)};
  }

 private:
  std::vector<std::byte> bytes_;
  std::int64_t size_;
};

MoeConfig config_of(std::int64_t hidden, std::int64_t inter, Activation kind) {
  return {.hidden_size = hidden,
          .intermediate_size = inter,
          .num_experts = 4,
          .top_k = 2,
          .activation = {kind}};
}

// Parts follow one another at multiples of 64, without overlap and without waste.
TEST(PackedLayoutTest, OffsetsOfManyShapes) {
  for (const std::int64_t hidden : {1, 5, 31, 32, 33, 64, 100}) {
    for (const std::int64_t inter : {1, 15, 16, 17, 32, 33, 70}) {
      for (const Activation kind : {Activation::silu, Activation::relu2}) {
        for (const WeightFormat format : {WeightFormat::f32, WeightFormat::bf16}) {
          for (int biases = 0; biases < 4; ++biases) {
            const RandomWeights weights(config_of(hidden, inter, kind), 4,
                                        {.w13_format = format,
                                         .w2_format = WeightFormat::f16,
                                         .w13_bias = (biases & 1) != 0,
                                         .w2_bias = (biases & 2) != 0},
                                        1);
            const PackedLayout layout(make_spec(config_of(hidden, inter, kind), {}),
                                      weights.view());
            const std::int64_t outputs = kind == Activation::silu ? 16 : 32;
            EXPECT_EQ(layout.num_experts, 4);
            EXPECT_EQ(layout.w13_panels, (inter + outputs - 1) / outputs);
            EXPECT_EQ(layout.w2_panels, (hidden + 31) / 32);
            EXPECT_EQ(layout.w13_panel_bytes, hidden * 32 * (format == WeightFormat::f32 ? 4 : 2));
            EXPECT_EQ(layout.w2_panel_bytes, inter * 32 * 2);
            std::int64_t end = 0;
            const auto expect_part = [&end](std::int64_t offset, std::int64_t bytes) {
              EXPECT_EQ(offset % 64, 0);
              EXPECT_GE(offset, end);
              EXPECT_LT(offset, end + 64);
              end = offset + bytes;
            };
            expect_part(0, layout.w13_panels * layout.w13_panel_bytes);
            expect_part(layout.w2_offset, layout.w2_panels * layout.w2_panel_bytes);
            EXPECT_EQ(layout.w13_bias_offset < 0, (biases & 1) == 0);
            EXPECT_EQ(layout.w2_bias_offset < 0, (biases & 2) == 0);
            if ((biases & 1) != 0) expect_part(layout.w13_bias_offset, layout.w13_panels * 128);
            if ((biases & 2) != 0) expect_part(layout.w2_bias_offset, layout.w2_panels * 128);
            expect_part(layout.expert_bytes, 0);
            EXPECT_EQ(layout.storage_bytes(), 256 + 4 * layout.expert_bytes);
          }
        }
      }
    }
  }
}

// What a plan writes, with any number of threads, whole or from a source: each panel and bias of
// each expert at its offset.
TEST(WeightStorageTest, PlansWritePanelsAtTheirOffsets) {
  const MoeConfig config = config_of(75, 43, Activation::silu);
  const RandomWeights weights(
      config, 4,
      {.w13_layout = WeightLayout::kn, .w13_bias = true, .w2_bias = true, .row_padding = 3}, 8);
  const PlanSpec spec = make_spec(config, {});
  const PackedLayout layout(spec, weights.view());
  for (const int threads : {1, 2, 7}) {
    for (const bool whole : {true, false}) {
      Memory memory(layout.storage_bytes());
      PlanOptions options;
      options.max_threads = threads;
      options.weight_storage = fusedmoe::WeightStorage::caller;
      options.storage = memory.span();
      const FusedMoe plan =
          FusedMoe::create(config, whole ? weights.view() : weights.as_source(), options);
      EXPECT_EQ(plan.weight_bytes(), layout.storage_bytes());
      const WeightStorage storage(spec, weights.view(), memory.span());
      EXPECT_NO_THROW(storage.check_adoptable());
      for (std::int64_t e = 0; e < 4; ++e) {
        ASSERT_EQ(storage.expert(e), memory.span().data() + 256 + e * layout.expert_bytes);
        const auto expect_at = [&](std::int64_t offset, const auto& panel) {
          ASSERT_EQ(std::memcmp(storage.expert(e) + offset, panel.data(),
                                panel.size() * sizeof(panel[0])),
                    0)
              << "expert " << e << " at " << offset << ", " << threads << " threads";
        };
        std::vector<float> bias(kPanelOutputs);
        for (std::int64_t p = 0; p < layout.w13_panels; ++p) {
          std::vector<std::byte> panel(layout.w13_panel_bytes);
          copy_panel(w13_panel(spec, weights.view(), e, p), 0, 75, panel.data());
          expect_at(p * layout.w13_panel_bytes, panel);
          w13_bias_panel(spec, weights.view(), e, p, bias.data());
          expect_at(layout.w13_bias_offset + p * 128, bias);
        }
        for (std::int64_t p = 0; p < layout.w2_panels; ++p) {
          std::vector<std::byte> panel(layout.w2_panel_bytes);
          copy_panel(w2_panel(spec, weights.view(), e, p), 0, 43, panel.data());
          expect_at(layout.w2_offset + p * layout.w2_panel_bytes, panel);
          w2_bias_panel(spec, weights.view(), e, p, bias.data());
          expect_at(layout.w2_bias_offset + p * 128, bias);
        }
      }
    }
  }
}

std::string refusal_of(const WeightStorage& storage) {
  try {
    storage.check_adoptable();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
  return "accepted";
}

TEST(WeightStorageTest, HeaderTellsForeignAndUnfinishedMemory) {
  const MoeConfig config = config_of(40, 24, Activation::silu);
  const RandomWeights weights(config, 4, {}, 2);
  const PlanSpec spec = make_spec(config, {});
  Memory memory(PackedLayout(spec, weights.view()).storage_bytes());
  WeightStorage storage(spec, weights.view(), memory.span());
  EXPECT_NE(refusal_of(storage).find("other memory"), std::string::npos);
  storage.begin_write();
  EXPECT_NE(refusal_of(storage).find("broken off"), std::string::npos);
  storage.end_write();
  EXPECT_EQ(refusal_of(storage), "accepted");
  storage.begin_write();
  EXPECT_NE(refusal_of(storage).find("broken off"), std::string::npos);
  storage.end_write();

  // One fact of the layer changed at a time: refused by its name.
  struct Other {
    const char* fact;
    MoeConfig config;
    RandomWeightsOptions options;
  };
  MoeConfig hidden = config, inter = config, kind = config;
  hidden.hidden_size = 41;
  inter.intermediate_size = 25;
  kind.activation.kind = Activation::relu2;
  for (const Other& other :
       {Other{"hidden_size", hidden, {}}, Other{"intermediate_size", inter, {}},
        Other{"gated", kind, {}}, Other{"format of w13", config, {.w13_format = WeightFormat::f16}},
        Other{"format of w2", config, {.w2_format = WeightFormat::f16}},
        Other{"w13 bias", config, {.w13_bias = true}},
        Other{"w2 bias", config, {.w2_bias = true}}}) {
    const RandomWeights changed(other.config, 4, other.options, 2);
    const WeightStorage adopted(make_spec(other.config, {}), changed.view(), memory.span());
    EXPECT_NE(refusal_of(adopted).find(other.fact), std::string::npos) << other.fact;
  }
}

TEST(WeightStorageTest, ReleaseGivesOwnPagesBackAndKeepsAddresses) {
  const MoeConfig config = config_of(40, 24, Activation::silu);
  const RandomWeights weights(config, 4, {}, 2);
  const PlanSpec spec = make_spec(config, {});
  WeightStorage own(spec, weights.view(), {});
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(own.expert(0)) % 64, 0U);
  own.begin_write();
  own.end_write();
  std::byte* const at = own.expert(3);
  *at = std::byte{5};
  own.release();
  EXPECT_EQ(own.expert(3), at);
  EXPECT_EQ(*at, std::byte{0});
  EXPECT_NE(refusal_of(own), "accepted");

  Memory memory(own.bytes());
  WeightStorage lent(spec, weights.view(), memory.span());
  lent.begin_write();
  lent.end_write();
  lent.release();  // the caller's memory is the caller's
  EXPECT_EQ(refusal_of(lent), "accepted");
}

}  // namespace
}  // namespace fusedmoe::cpu
