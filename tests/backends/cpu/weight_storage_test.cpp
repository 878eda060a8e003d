// Packed weights in memory: offsets, what a plan writes at them, and the header.
#include "backends/cpu/weight_storage.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "backends/cpu/numa.h"
#include "backends/cpu/pack.h"
#include "core/validate.h"
#include "formats/format.h"
#include "fusedmoe/fused_moe.h"
#include "kernel_inputs.h"
#include "reference/random_layer.h"
#include "support/format_cases.h"

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

// The kernels of any instruction set: a layout is only arithmetic.
KernelChoice kernels_of(CpuIsa isa, const PlanSpec& spec, const ExpertWeights& weights) {
  const GemmKernel* gemm13 = find_gemm(isa, weights.w13.format, spec.config.dtype);
  const GemmKernel* gemm2 = find_gemm(isa, weights.w2.format, spec.config.dtype);
  return {isa, gemm13, gemm2, &inputs_of(*gemm13), &inputs_of(*gemm2), &row_kernels(isa)};
}

constexpr std::int64_t kNodePart = std::int64_t{2} << 20;
constexpr std::int64_t kExperts = 4;

void expect_sound(const PackedLayout& layout, int nodes, bool w13_bias, bool w2_bias) {
  ASSERT_EQ(layout.nodes(), nodes);
  std::vector<std::pair<std::int64_t, std::int64_t>> parts;  // begin and end of each
  for (const PackedLayout::Panels& panels : {layout.w13, layout.w2}) {
    EXPECT_EQ(layout.first_panel(panels, 0), 0);
    EXPECT_EQ(layout.first_panel(panels, nodes), panels.count);
    for (int node = 0; node < nodes; ++node) {
      const std::int64_t first = layout.first_panel(panels, node);
      const std::int64_t after = layout.first_panel(panels, node + 1);
      // Shares are even.
      EXPECT_GE(after - first, panels.count / nodes);
      EXPECT_LE(after - first, (panels.count + nodes - 1) / nodes);
      for (std::int64_t e = 0; e < kExperts; ++e) {
        for (std::int64_t p = first; p < after; ++p) {
          const std::int64_t at = layout.panel_offset(panels, e, p);
          EXPECT_GE(at, layout.node_start(node));
          EXPECT_LE(at + panels.bytes, layout.node_start(node + 1));
          // A thread's panels of an expert follow one another: it streams them.
          if (p > first) {
            EXPECT_EQ(at, layout.panel_offset(panels, e, p - 1) + panels.bytes);
          }
          parts.emplace_back(at, at + panels.bytes);
        }
      }
    }
    const bool has_bias = panels.is_w13 ? w13_bias : w2_bias;
    EXPECT_EQ(panels.bias_offset >= 0, has_bias);
    EXPECT_EQ(panels.scale_offset >= 0, panels.format.column_scales);
    for (const std::int64_t offset : {panels.bias_offset, panels.scale_offset}) {
      for (std::int64_t e = 0; offset >= 0 && e < kExperts; ++e) {
        for (std::int64_t p = 0; p < panels.count; ++p) {
          const std::int64_t at = layout.epilogue_offset(offset, e, p);
          EXPECT_GE(at, layout.node_start(nodes));
          parts.emplace_back(at, at + 128);
        }
      }
    }
  }
  std::sort(parts.begin(), parts.end());
  std::int64_t end = 256, bytes = 256;
  for (const auto& [begin, until] : parts) {
    EXPECT_EQ(begin % 64, 0);
    EXPECT_GE(begin, end);  // the header lies in front, nothing over another
    end = until;
    bytes += until - begin;
  }
  EXPECT_LE(end, layout.storage_bytes());
  // Nothing is wasted but what nodes are rounded up to.
  if (nodes == 1) {
    EXPECT_EQ(layout.node_start(0), 256);
    EXPECT_LT(layout.storage_bytes(), bytes + 256);
  } else {
    for (int node = 0; node <= nodes; ++node) {
      EXPECT_EQ(layout.node_start(node) % kNodePart, 0);
    }
    EXPECT_LT(layout.storage_bytes(), bytes + (nodes + 1) * kNodePart);
  }
}

TEST(PackedLayoutTest, EveryPanelAndBiasHasItsOwnPlace) {
  for (const std::int64_t hidden : {1, 33, 64, 330}) {
    for (const std::int64_t inter : {1, 17, 32, 163}) {
      for (const Activation kind : {Activation::silu, Activation::relu2}) {
        // One set for each layout of panels.
        for (const CpuIsa isa : {CpuIsa::scalar, CpuIsa::avx512_bf16, CpuIsa::amx_bf16}) {
          for (int biases = 0; biases < 4; ++biases) {
            const MoeConfig config = config_of(hidden, inter, kind);
            const WeightFormat w13 = biases == 1   ? WeightFormat::f32
                                     : biases == 2 ? WeightFormat::int8
                                                   : WeightFormat::bf16;
            const WeightFormat w2 = biases == 2   ? WeightFormat::f16
                                    : biases == 3 ? WeightFormat::nvfp4
                                                  : WeightFormat::bf16;
            const RandomWeights weights(config, kExperts,
                                        {.w13_format = w13,
                                         .w2_format = w2,
                                         .w13_bias = (biases & 1) != 0,
                                         .w2_bias = (biases & 2) != 0},
                                        1);
            const PlanSpec spec = make_spec(config, {});
            const KernelChoice kernels = kernels_of(isa, spec, weights.view());
            for (const int nodes : {1, 2, 3, 5}) {
              SCOPED_TRACE(std::to_string(hidden) + " x " + std::to_string(inter) + ", " +
                           to_string(isa) + ", nodes " + std::to_string(nodes));
              const PackedLayout layout(spec, weights.view(), kernels, nodes);
              const std::int64_t outputs = kind == Activation::silu ? 16 : 32;
              EXPECT_TRUE(layout.w13.is_w13);
              EXPECT_FALSE(layout.w2.is_w13);
              EXPECT_EQ(layout.w13.count, (inter + outputs - 1) / outputs);
              EXPECT_EQ(layout.w2.count, (hidden + 31) / 32);
              EXPECT_EQ(layout.w13.format.layout, kernels.inputs13->panel);
              EXPECT_EQ(layout.w2.format.layout, kernels.inputs2->panel);
              EXPECT_EQ(layout.w13.bytes, layout.w13.format.bytes(hidden));
              EXPECT_EQ(layout.w2.bytes, layout.w2.format.bytes(inter));
              EXPECT_EQ(layout.w13.format.column_scales, w13 == WeightFormat::int8);
              EXPECT_EQ(layout.w2.format.column_scales, w2 == WeightFormat::nvfp4);
              expect_sound(layout, nodes, (biases & 1) != 0, (biases & 2) != 0);
              if (HasFailure()) return;
            }
          }
        }
      }
    }
  }
}

class StoredFormats : public testing::TestWithParam<test::FormatCase> {};

// What a plan writes, with any number of threads, whole or from a source: each panel, bias and
// scale of each expert at its offset, in the layout of its kernels.
TEST_P(StoredFormats, PlansWritePanelsAtTheirOffsets) {
  const test::FormatCase& c = GetParam();
  const MoeConfig config = config_of(c.k(75), c.k(43), Activation::silu);
  RandomWeightsOptions random = c.options();
  if (c.info().scales.any_order) random.w13_layout = WeightLayout::kn;
  random.w13_bias = random.w2_bias = true;
  random.row_padding = 3;
  const RandomWeights weights(config, kExperts, random, 8);
  for (const CpuIsa isa : all_isas()) {
    if (!is_available(isa)) continue;
    PlanOptions options;
    options.isa = to_string(isa);
    const PlanSpec spec = make_spec(config, options);
    const PackedLayout layout(spec, weights.view(), choose_kernels(spec, weights.view()),
                              static_cast<int>(numa_nodes().size()));
    for (const int threads : {1, 2, 7}) {
      for (const bool whole : {true, false}) {
        Memory memory(layout.storage_bytes());
        options.max_threads = threads;
        options.weight_storage = fusedmoe::WeightStorage::caller;
        options.storage = memory.span();
        const FusedMoe plan =
            FusedMoe::create(config, whole ? weights.view() : weights.as_source(), options);
        EXPECT_EQ(plan.weight_bytes(), layout.storage_bytes());
        const WeightStorage storage(spec, weights.view(), layout, memory.span());
        EXPECT_NO_THROW(storage.check_adoptable());
        for (const PackedLayout::Panels& panels : {layout.w13, layout.w2}) {
          for (std::int64_t e = 0; e < kExperts; ++e) {
            for (std::int64_t p = 0; p < panels.count; ++p) {
              const std::byte* at = storage.panel(panels, e, p);
              ASSERT_EQ(at, memory.span().data() + layout.panel_offset(panels, e, p));
              std::vector<std::byte> panel(static_cast<std::size_t>(panels.bytes));
              std::vector<float> bias(kPanelOutputs), scales(kPanelOutputs);
              const PanelOutputs outputs = panels.is_w13 ? w13_panel(spec, weights.view(), e, p)
                                                         : w2_panel(spec, weights.view(), e, p);
              pack_panel(outputs, panels.format, 0, panels.inputs, panel.data());
              if (panels.is_w13) {
                w13_bias_panel(spec, weights.view(), e, p, bias.data());
              } else {
                w2_bias_panel(spec, weights.view(), e, p, bias.data());
              }
              const float* stored = storage.scales(panels, e, p);
              ASSERT_EQ(column_scales(outputs, panels.format, scales.data()), stored != nullptr);
              if (stored != nullptr) {
                ASSERT_EQ(std::memcmp(stored, scales.data(), 128), 0)
                    << "scales of expert " << e << ", panel " << p;
              }
              ASSERT_EQ(std::memcmp(at, panel.data(), panel.size()), 0)
                  << to_string(isa) << ", expert " << e << ", panel " << p << ", " << threads
                  << " threads";
              ASSERT_EQ(std::memcmp(storage.bias(panels, e, p), bias.data(), 128), 0)
                  << "bias of expert " << e << ", panel " << p;
            }
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, StoredFormats, testing::ValuesIn(test::format_cases()),
                         test::format_case_name);

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
  const KernelChoice scalar = kernels_of(CpuIsa::scalar, spec, weights.view());
  const PackedLayout layout(spec, weights.view(), scalar, 1);
  Memory memory(layout.storage_bytes());
  WeightStorage storage(spec, weights.view(), layout, memory.span());
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
    SCOPED_TRACE(other.fact);
    const RandomWeights changed(other.config, 4, other.options, 2);
    const PlanSpec changed_spec = make_spec(other.config, {});
    const PackedLayout changed_layout(changed_spec, changed.view(),
                                      kernels_of(CpuIsa::scalar, changed_spec, changed.view()), 1);
    const WeightStorage adopted(changed_spec, changed.view(), changed_layout, memory.span());
    EXPECT_NE(refusal_of(adopted).find(other.fact), std::string::npos) << other.fact;
  }
  // The same layer for other kernels, or on other nodes.
  const auto refusal_with = [&](const KernelChoice& kernels, int nodes) {
    const PackedLayout other(spec, weights.view(), kernels, nodes);
    return refusal_of(WeightStorage(spec, weights.view(), other, memory.span()));
  };
  const KernelChoice pairs = kernels_of(CpuIsa::avx512_bf16, spec, weights.view());
  KernelChoice second = scalar;
  second.gemm2 = pairs.gemm2;
  second.inputs2 = pairs.inputs2;
  EXPECT_EQ(refusal_with(scalar, 1), "accepted");
  EXPECT_NE(refusal_with(kernels_of(CpuIsa::avx2_fma, spec, weights.view()), 1).find("layout"),
            std::string::npos);
  EXPECT_NE(refusal_with(pairs, 1).find("w13 layout"), std::string::npos);
  EXPECT_NE(refusal_with(second, 1).find("w2 layout"), std::string::npos);
  EXPECT_NE(refusal_with(scalar, 2).find("NUMA nodes"), std::string::npos);
  // Tiles' panels differ from those of pairs by their padding.
  storage.begin_write();
  const PackedLayout of_pairs(spec, weights.view(), pairs, 1);
  WeightStorage rewritten(spec, weights.view(), of_pairs, memory.span());
  rewritten.begin_write();
  rewritten.end_write();
  EXPECT_EQ(refusal_with(pairs, 1), "accepted");
  const KernelChoice tiles = kernels_of(CpuIsa::amx_bf16, spec, weights.view());
  EXPECT_NE(refusal_with(tiles, 1).find("w13 layout"), std::string::npos);
}

// The same layer whose scales lie otherwise is another layer; kernels that read panels alike share
// them.
TEST(WeightStorageTest, HeaderTellsScales) {
  const MoeConfig config = config_of(128, 64, Activation::silu);
  const PlanSpec spec = make_spec(config, {});
  Memory memory(std::int64_t{1} << 18);
  const auto storage_of = [&](const RandomWeights& weights, CpuIsa isa) {
    const PackedLayout layout(spec, weights.view(), kernels_of(isa, spec, weights.view()), 1);
    EXPECT_LE(layout.storage_bytes(), static_cast<std::int64_t>(memory.span().size()));
    return std::make_unique<WeightStorage>(
        spec, weights.view(), layout,
        memory.span().first(static_cast<std::size_t>(layout.storage_bytes())));
  };
  const auto weights_of = [&](std::int64_t group_size, ScaleType type, bool zero_points) {
    RandomWeightsOptions options;
    options.w13_format = options.w2_format = WeightFormat::int4;
    options.w13_scales = options.w2_scales =
        WeightScales{.type = type, .layout = ScaleLayout::group, .group_size = group_size};
    options.zero_points = zero_points;
    return RandomWeights(config, 4, options, 2);
  };
  const RandomWeights plain = weights_of(32, ScaleType::f16, false);
  const auto storage = storage_of(plain, CpuIsa::avx2_fma);
  storage->begin_write();
  storage->end_write();
  EXPECT_EQ(refusal_of(*storage), "accepted");
  EXPECT_EQ(refusal_of(*storage_of(plain, CpuIsa::avx512)), "accepted");
  for (const auto& other :
       {weights_of(16, ScaleType::f16, false), weights_of(32, ScaleType::bf16, false),
        weights_of(32, ScaleType::f32, false), weights_of(32, ScaleType::f16, true)}) {
    EXPECT_NE(refusal_of(*storage_of(other, CpuIsa::avx2_fma)).find("w13 scales"),
              std::string::npos);
  }
}

// Bytes that no panel uses do not show what the memory held: equal weights are equal files.
TEST(WeightStorageTest, WhatIsNotUsedIsZero) {
  const MoeConfig config = config_of(97, 53, Activation::silu);
  const RandomWeights weights(
      config, kExperts,
      {.w13_format = WeightFormat::int8, .w2_format = WeightFormat::nvfp4, .w13_bias = true}, 2);
  const PlanSpec spec = make_spec(config, {});
  for (const int nodes : {1, 2, 3}) {
    const PackedLayout layout(spec, weights.view(),
                              kernels_of(CpuIsa::avx512_bf16, spec, weights.view()), nodes);
    Memory memory(layout.storage_bytes());
    WeightStorage storage(spec, weights.view(), layout, memory.span());
    storage.begin_write();
    storage.end_write();
    for (std::int64_t e = 0; e < kExperts; ++e) {
      for (const PackedLayout::Panels& panels : {layout.w13, layout.w2}) {
        for (std::int64_t p = 0; p < panels.count; ++p) {
          std::memset(storage.panel(panels, e, p), 0, static_cast<std::size_t>(panels.bytes));
          for (float* of_epilogue : {storage.bias(panels, e, p), storage.scales(panels, e, p)}) {
            if (of_epilogue != nullptr) std::memset(of_epilogue, 0, 128);
          }
        }
      }
    }
    const auto rest = memory.span().subspan(256);
    EXPECT_TRUE(
        std::all_of(rest.begin(), rest.end(), [](std::byte b) { return b == std::byte{0}; }))
        << nodes << " nodes";
  }
}

TEST(WeightStorageTest, ReleaseGivesOwnPagesBackAndKeepsAddresses) {
  const MoeConfig config = config_of(40, 24, Activation::silu);
  const RandomWeights weights(config, 4, {}, 2);
  const PlanSpec spec = make_spec(config, {});
  const PackedLayout layout(spec, weights.view(), kernels_of(CpuIsa::scalar, spec, weights.view()),
                            1);
  WeightStorage own(spec, weights.view(), layout, {});
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(own.panel(layout.w13, 0, 0)) % 64, 0U);
  own.begin_write();
  own.end_write();
  std::byte* const at = own.panel(layout.w2, 3, 1);
  *at = std::byte{5};
  own.release();
  EXPECT_EQ(own.panel(layout.w2, 3, 1), at);
  EXPECT_EQ(*at, std::byte{0});
  EXPECT_NE(refusal_of(own), "accepted");

  Memory memory(own.bytes());
  WeightStorage lent(spec, weights.view(), layout, memory.span());
  lent.begin_write();
  lent.end_write();
  lent.release();  // the caller's memory is the caller's
  EXPECT_EQ(refusal_of(lent), "accepted");
}

}  // namespace
}  // namespace fusedmoe::cpu
