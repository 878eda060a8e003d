// Packing: every layout that weights may come in, element by element against the formats' decode.
#include "backends/cpu/pack.h"

#include <functional>

#include "core/validate.h"
#include "formats/format.h"
#include "kernel_inputs.h"
#include "reference/random_layer.h"
#include "support/guarded_buffer.h"

namespace fusedmoe::cpu {
namespace {

constexpr std::int64_t kExperts = 3;
constexpr WeightFormat kFormats[] = {WeightFormat::f32, WeightFormat::f16, WeightFormat::bf16};
constexpr WeightLayout kLayouts[] = {WeightLayout::nk, WeightLayout::kn};
constexpr PanelLayout kPanelLayouts[] = {{1, 1}, {2, 2}, {2, 32}};

// K beyond two of the blocks that are copied at once, with a tail; the last panels have 6 channels
// and 11 columns.
constexpr std::int64_t kHidden = 75;
constexpr std::int64_t kInter = 70;
MoeConfig config_of(Activation kind) {
  return {.hidden_size = kHidden,
          .intermediate_size = kInter,
          .num_experts = kExperts,
          .top_k = 1,
          .activation = {kind}};
}

// The row of the fused w13 that holds gate (part 0) or up (part 1) of a channel, as the public
// header says it.
std::int64_t fused_row(const MoeConfig& config, std::int64_t channel, int part) {
  const bool gate_first = config.gate_up_order == GateUpOrder::gate_up;
  const std::int64_t place = (part == 0) == gate_first ? 0 : 1;
  if (config.gate_up_layout == GateUpLayout::interleaved) return 2 * channel + place;
  return place * config.intermediate_size + channel;
}

using Expected = std::function<double(std::int64_t column, std::int64_t k)>;

// Copies a panel whole and in pieces, in every layout of panels, and compares each element; what is
// no output, and what lies behind the last k up to the layout's multiple, is +0.
void expect_panel(const PanelOutputs& panel, DType dtype, std::int64_t k, std::int64_t outputs,
                  const Expected& expected) {
  std::vector<float> want(static_cast<std::size_t>(k * kPanelOutputs));
  for (std::int64_t i = 0; i < k; ++i) {
    for (std::int64_t column = 0; column < std::min<std::int64_t>(outputs, kPanelOutputs);
         ++column) {
      want[static_cast<std::size_t>(i * kPanelOutputs + column)] =
          static_cast<float>(expected(column, i));
    }
  }
  for (const PanelLayout& layout : kPanelLayouts) {
    if (dtype == DType::f32 && layout.k_group != 1) continue;  // pairs are of two bytes each
    for (const std::int64_t about : {k, std::int64_t{1}, std::int64_t{7}, std::int64_t{33}}) {
      const std::int64_t step = about == k ? k : layout.padded(about);
      const std::int64_t padded = layout.padded(k);
      std::vector<std::byte> packed(
          static_cast<std::size_t>(padded * kPanelOutputs * bytes_of(dtype)), std::byte{0xff});
      for (std::int64_t k0 = 0; k0 < k; k0 += step) {
        copy_panel(panel, k0, std::min(step, k - k0), layout,
                   packed.data() + k0 * kPanelOutputs * bytes_of(dtype));
      }
      for (std::int64_t i = 0; i < padded; ++i) {
        for (std::int64_t column = 0; column < kPanelOutputs; ++column) {
          const std::int64_t at =
              (i / layout.k_group * kPanelOutputs + column) * layout.k_group + i % layout.k_group;
          const float value =
              i < k ? want[static_cast<std::size_t>(i * kPanelOutputs + column)] : 0.0F;
          ASSERT_EQ(bits(load(packed.data(), dtype, at)), bits(value))
              << "k " << i << ", column " << column << ", step " << step << ", groups of "
              << layout.k_group << ", multiple of " << layout.k_multiple;
        }
      }
    }
  }
}

void expect_w2(const PlanSpec& spec, const ExpertWeights& weights) {
  const MoeConfig& config = spec.config;
  for (const std::int64_t expert : {0, 2}) {
    for (std::int64_t p = 0; p * kPanelOutputs < config.hidden_size; ++p) {
      expect_panel(w2_panel(spec, weights, expert, p), dtype_of(weights.w2.format),
                   config.intermediate_size, config.hidden_size - p * kPanelOutputs,
                   [&](std::int64_t column, std::int64_t k) {
                     return format_info(weights.w2.format)
                         .decode(weights.w2, expert, p * kPanelOutputs + column, k);
                   });
    }
  }
}

// Panels of 16 gate and 16 up rows, or of 32 rows without a gate.
void expect_w13(const PlanSpec& spec, const ExpertWeights& weights) {
  const MoeConfig& config = spec.config;
  const bool gated = is_gated(config.activation.kind);
  const std::int64_t channels = gated ? kGatedOutputs : kPanelOutputs;
  for (const std::int64_t expert : {0, 2}) {
    for (std::int64_t p = 0; p * channels < config.intermediate_size; ++p) {
      const std::int64_t valid = config.intermediate_size - p * channels;
      const auto expected = [&](std::int64_t column, std::int64_t k) {
        const std::int64_t channel = p * channels + column % channels;
        const int part = column < channels ? 0 : 1;
        if (column % channels >= valid) return 0.0;
        const bool up = gated && part == 1 && !weights.w13_up.empty();
        const WeightTensor& tensor = up ? weights.w13_up : weights.w13;
        const std::int64_t row =
            !gated || !weights.w13_up.empty() ? channel : fused_row(config, channel, part);
        return format_info(tensor.format).decode(tensor, expert, row, k);
      };
      expect_panel(w13_panel(spec, weights, expert, p), dtype_of(weights.w13.format),
                   config.hidden_size, kPanelOutputs, expected);
    }
  }
}

TEST(Pack, EveryFormatLayoutStrideAndAddress) {
  for (const WeightFormat format : kFormats) {
    for (const WeightLayout layout : kLayouts) {
      for (const Activation kind : {Activation::silu, Activation::relu2}) {
        for (const std::int64_t padding : {0, 5}) {
          for (const std::int64_t misalign : {0, 1, 2, 33}) {
            const MoeConfig config = config_of(kind);
            const RandomWeights weights(config, kExperts,
                                        {.w13_format = format,
                                         .w2_format = format,
                                         .w13_layout = layout,
                                         .w2_layout = layout,
                                         .row_padding = padding,
                                         .expert_padding = 3 * padding,
                                         .misalign = misalign},
                                        17);
            const PlanSpec spec = make_spec(config, {});
            SCOPED_TRACE(std::string(to_string(format)) + " " + to_string(layout) + " " +
                         to_string(kind) + " padding " + std::to_string(padding) + " misalign " +
                         std::to_string(misalign));
            expect_w13(spec, weights.view());
            expect_w2(spec, weights.view());
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Pack, EveryOrderOfGateAndUp) {
  for (const GateUpLayout gate_up : {GateUpLayout::halves, GateUpLayout::interleaved}) {
    for (const GateUpOrder order : {GateUpOrder::gate_up, GateUpOrder::up_gate}) {
      for (const WeightLayout layout : kLayouts) {
        MoeConfig config = config_of(Activation::silu);
        config.gate_up_layout = gate_up;
        config.gate_up_order = order;
        const RandomWeights weights(config, kExperts, {.w13_layout = layout, .row_padding = 2}, 3);
        SCOPED_TRACE(std::string(to_string(gate_up)) + " " + to_string(order));
        expect_w13(make_spec(config, {}), weights.view());
      }
    }
  }
}

// Gate and up in tensors of their own: the layout and order of rows do not matter then, and each
// has its own strides.
TEST(Pack, GateAndUpApart) {
  for (const GateUpLayout gate_up : {GateUpLayout::halves, GateUpLayout::interleaved}) {
    for (const GateUpOrder order : {GateUpOrder::gate_up, GateUpOrder::up_gate}) {
      for (const WeightLayout gate_layout : kLayouts) {
        for (const WeightLayout up_layout : kLayouts) {
          MoeConfig config = config_of(Activation::silu);
          config.gate_up_layout = gate_up;
          config.gate_up_order = order;
          const RandomWeights gate(config, kExperts,
                                   {.w13_layout = gate_layout, .gate_up_apart = true}, 3);
          const RandomWeights up(
              config, kExperts,
              {.w13_layout = up_layout, .gate_up_apart = true, .row_padding = 4, .misalign = 1}, 4);
          ExpertWeights weights = gate.view();
          weights.w13_up = up.view().w13_up;
          SCOPED_TRACE(std::string("gate ") + to_string(gate_layout) + ", up " +
                       to_string(up_layout));
          expect_w13(make_spec(config, {}), weights);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// The last expert's tensors end where their memory ends, with k or the outputs side by side, or
// neither: nothing behind them is read.
TEST(Pack, NothingBehindTheWeightsIsRead) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const std::int64_t bytes = bytes_of(dtype);
    for (std::int64_t k = 1; k <= 80; ++k) {
      for (const std::int64_t columns : {32, 13}) {
        struct Strides {
          std::int64_t k, output;
        };
        for (const Strides& stride : {Strides{1, k}, Strides{columns, 1}, Strides{3, 3 * k}}) {
          const std::int64_t size = (k - 1) * stride.k + (columns - 1) * stride.output + 1;
          const std::vector<std::byte> values = encode(numbers(size, 9, dtype), dtype);
          const test::GuardedBuffer memory(values.data(), size * bytes, test::Side::back);
          PanelOutputs panel{{}, {}, static_cast<int>(bytes)};
          for (std::int64_t c = 0; c < columns; ++c) {
            panel.output[static_cast<std::size_t>(c)] = memory.data() + c * stride.output * bytes;
            panel.k_stride[static_cast<std::size_t>(c)] = stride.k * bytes;
          }
          expect_panel(panel, dtype, k, columns, [&](std::int64_t column, std::int64_t i) {
            return static_cast<double>(
                load(values.data(), dtype, i * stride.k + column * stride.output));
          });
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(Pack, Biases) {
  for (const DType dtype : kDtypes) {
    for (const Activation kind : {Activation::silu, Activation::relu2}) {
      for (const GateUpLayout gate_up : {GateUpLayout::halves, GateUpLayout::interleaved}) {
        for (const GateUpOrder order : {GateUpOrder::gate_up, GateUpOrder::up_gate}) {
          MoeConfig config = config_of(kind);
          config.gate_up_layout = gate_up;
          config.gate_up_order = order;
          const RandomWeights weights(config, kExperts,
                                      {.w13_bias = true, .w2_bias = true, .bias_dtype = dtype}, 5);
          const PlanSpec spec = make_spec(config, {});
          const bool gated = kind == Activation::silu;
          const std::int64_t channels = gated ? kGatedOutputs : kPanelOutputs;
          for (const std::int64_t expert : {0, 2}) {
            for (std::int64_t p = 0; p < 3; ++p) {
              std::vector<float> b2(kPanelOutputs, kNaN);
              ASSERT_TRUE(w2_bias_panel(spec, weights.view(), expert, p, b2.data()));
              for (std::int64_t c = 0; c < kPanelOutputs; ++c) {
                const std::int64_t n = p * kPanelOutputs + c;
                const float want =
                    n < kHidden ? load(weights.view().w2_bias.data, dtype, expert * kHidden + n)
                                : 0.0F;
                ASSERT_EQ(bits(b2[c]), bits(want));
              }
              if (p * channels >= kInter) continue;
              std::vector<float> b13(kPanelOutputs, kNaN);
              ASSERT_TRUE(w13_bias_panel(spec, weights.view(), expert, p, b13.data()));
              for (std::int64_t c = 0; c < kPanelOutputs; ++c) {
                const std::int64_t channel = p * channels + c % channels;
                const std::int64_t row =
                    gated ? fused_row(config, channel, c < channels ? 0 : 1) : channel;
                const std::int64_t rows = gated ? 2 * kInter : kInter;
                const float want = channel < kInter ? load(weights.view().w13_bias.data, dtype,
                                                           expert * rows + row)
                                                    : 0.0F;
                ASSERT_EQ(bits(b13[c]), bits(want)) << "expert " << expert << " column " << c;
              }
            }
          }
        }
      }
    }
  }
  const RandomWeights none(config_of(Activation::silu), kExperts, {}, 5);
  const PlanSpec spec = make_spec(config_of(Activation::silu), {});
  float untouched[kPanelOutputs] = {7.0F};
  EXPECT_FALSE(w13_bias_panel(spec, none.view(), 0, 0, untouched));
  EXPECT_FALSE(w2_bias_panel(spec, none.view(), 0, 0, untouched));
  EXPECT_EQ(untouched[0], 7.0F);
}

}  // namespace
}  // namespace fusedmoe::cpu
