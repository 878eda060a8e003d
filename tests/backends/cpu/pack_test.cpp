// Packing: every layout that weights may come in, element by element against the formats' decode.
#include "backends/cpu/pack.h"

#include <functional>
#include <utility>

#include "backends/cpu/kernels/segments.h"
#include "core/validate.h"
#include "formats/q4_k.h"
#include "formats/q5_k.h"
#include "formats/q6_k.h"
#include "formats/scales.h"
#include "fusedmoe/error.h"
#include "tested_kernels.h"

namespace fusedmoe::cpu {
namespace {

constexpr std::int64_t kExperts = 3;
constexpr WeightLayout kLayouts[] = {WeightLayout::nk, WeightLayout::kn};

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
// The same with inputs that a format takes.
MoeConfig config_of(Activation kind, const test::FormatCase& c) {
  MoeConfig config = config_of(kind);
  if (c.k_multiple() > 1) config.hidden_size = config.intermediate_size = c.k_multiple();
  return config;
}

// The row of the fused w13 that holds gate (part 0) or up (part 1) of a channel, as the public
// header says it.
std::int64_t fused_row(const MoeConfig& config, std::int64_t channel, int part) {
  const bool gate_first = config.gate_up_order == GateUpOrder::gate_up;
  const std::int64_t place = (part == 0) == gate_first ? 0 : 1;
  if (config.gate_up_layout == GateUpLayout::interleaved) return 2 * channel + place;
  return place * config.intermediate_size + channel;
}

// One kernel for each order in which panels keep codes.
std::vector<GemmKernel> kernels_for(WeightFormat format) {
  std::vector<GemmKernel> result;
  for (const GemmKernel& kernel : gemm_kernels()) {
    if (kernel.format != format) continue;
    const PanelLayout& layout = inputs_of(kernel).panel;
    if (std::none_of(result.begin(), result.end(),
                     [&](const GemmKernel& other) { return inputs_of(other).panel == layout; })) {
      result.push_back(kernel);
    }
  }
  return result;
}

// Code (column, i) of a piece, as kernels.h and codes.h say where it lies.
std::uint32_t code_of_panel(const PanelFormat& format, const std::byte* codes, std::int64_t column,
                            std::int64_t i) {
  const PanelLayout& layout = format.layout;
  const std::int64_t group = layout.k_group;
  const std::int64_t at = (i / group * kPanelOutputs + column) * group + i % group;
  const auto byte = [&](std::int64_t b) { return static_cast<std::uint32_t>(codes[b]); };
  switch (bits_of(format.code)) {
    case 32:
      return byte(4 * at) | byte(4 * at + 1) << 8 | byte(4 * at + 2) << 16 | byte(4 * at + 3) << 24;
    case 16:
      return byte(2 * at) | byte(2 * at + 1) << 8;
    case 8: {
      if (group != 2) return byte(at);
      // Lines of 64: eight bytes of the first half, eight of the second, in turns.
      const std::int64_t in_half = at % 32;
      return byte(at / 64 * 64 + in_half / 8 * 16 + at % 64 / 32 * 8 + in_half % 8);
    }
    default: {
      // 128 codes to a line: of `lanes` lanes each code takes four bits, first codes lowest.
      const std::int64_t lane = at % 128 % layout.lanes;
      const std::int64_t bit = lane * (512 / layout.lanes) + at % 128 / layout.lanes * 4;
      return byte(at / 128 * 64 + bit / 8) >> bit % 8 & 15U;
    }
  }
}

// The same code in the tensor.
std::uint32_t code_of_tensor(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                             std::int64_t k) {
  const std::int64_t at = element_index(tensor, expert, n, k);
  const auto* bytes = static_cast<const std::uint8_t*>(tensor.data);
  const int in_block = static_cast<int>(k % 256);
  switch (tensor.format) {
    case WeightFormat::f32: {
      std::uint32_t value;
      std::memcpy(&value, bytes + 4 * at, 4);
      return value;
    }
    case WeightFormat::f16:
    case WeightFormat::bf16: {
      std::uint16_t value;
      std::memcpy(&value, bytes + 2 * at, 2);
      return value;
    }
    case WeightFormat::mxfp4:
    case WeightFormat::nvfp4:
    case WeightFormat::int4:
      return bytes[at / 2] >> at % 2 * 4 & 15U;
    case WeightFormat::q4_k:
      return formats::Q4kBlock{formats::k_block(tensor, expert, n, k)}.code(in_block);
    case WeightFormat::q5_k:
      return formats::Q5kBlock{formats::k_block(tensor, expert, n, k)}.code(in_block);
    case WeightFormat::q6_k:
      return static_cast<std::uint8_t>(
          formats::Q6kBlock{formats::k_block(tensor, expert, n, k)}.code(in_block) - 32);
    default:
      return bytes[at];
  }
}

// What a code of a panel is worth, and the factor that the epilogue has.
double value_of(Code code, std::uint32_t bits, const SegmentLayout& segments) {
  switch (code) {
    case Code::f32:
      return static_cast<double>(std::bit_cast<float>(bits));
    case Code::f16:
      return static_cast<double>(f16_to_f32(static_cast<std::uint16_t>(bits)));
    case Code::bf16:
      return static_cast<double>(bf16_to_f32(static_cast<std::uint16_t>(bits)));
    case Code::s8:
      return static_cast<std::int8_t>(bits);
    case Code::e4m3:
      return static_cast<double>(e4m3_to_f32(static_cast<std::uint8_t>(bits)));
    case Code::e5m2:
      return static_cast<double>(e5m2_to_f32(static_cast<std::uint8_t>(bits)));
    case Code::e2m1:
      return static_cast<double>(e2m1_to_f32(static_cast<std::uint8_t>(bits)));
    case Code::u4:
      return static_cast<double>(bits) -
             (segments.offset == SegmentLayout::Offset::centre ? 8.0 : 0.0);
  }
  return 0;
}

// Output `column` of a panel, as its matrix has it: false for padding.
using Source = std::function<bool(std::int64_t column, PanelOutput& output)>;

// Packs a panel whole and in pieces, for every order of codes, and compares each element: its code
// by bits, and what code, scales and offsets are worth together with the format's decode. What is
// no output, and what lies behind the last k up to the layout's multiple, is a code of zeros.
void expect_panel(const PanelOutputs& panel, const WeightTensor& tensor, const Source& source) {
  const std::int64_t k = tensor.inputs;
  for (const GemmKernel& kernel : kernels_for(tensor.format)) {
    SCOPED_TRACE(kernel.name);
    const PanelFormat format = panel_format(tensor, kernel);
    const PanelLayout& layout = format.layout;
    std::vector<float> columns(kPanelOutputs, 1.0F);
    ASSERT_EQ(column_scales(panel, format, columns.data()), format.column_scales);
    for (const std::int64_t about : {k, std::int64_t{1}, std::int64_t{33}}) {
      const std::int64_t period = format.period();
      const std::int64_t step = about == k ? k : (about + period - 1) / period * period;
      if (about != k && step >= k) continue;
      for (std::int64_t k0 = 0; k0 < k; k0 += step) {
        const std::int64_t piece = std::min(step, k - k0);
        std::vector<std::byte> packed(static_cast<std::size_t>(format.bytes(piece)),
                                      std::byte{0xff});
        pack_panel(panel, format, k0, piece, packed.data(),
                   about == k ? PanelUse::later : PanelUse::now);
        const std::byte* codes = format.codes(packed.data(), piece, 0);
        ASSERT_LE(codes + format.code_bytes(piece) - packed.data(), format.bytes(piece));
        float scale[kPanelOutputs], offset[kPanelOutputs];
        for (std::int64_t i = 0; i < layout.padded(piece); ++i) {
          const Segments segments = format.segments_of(packed.data(), piece, 0);
          if (format.segments.k > 0 && i % format.segments.k == 0 && i < piece) {
            load_segment(segments, i / format.segments.k, scale, offset);
          }
          for (std::int64_t column = 0; column < kPanelOutputs; ++column) {
            PanelOutput output;
            const std::uint32_t got = code_of_panel(format, codes, column, i);
            if (!source(column, output) || i >= piece) {
              ASSERT_EQ(got, 0U) << "padding at " << column << ", " << i;
              continue;
            }
            ASSERT_EQ(got, code_of_tensor(*output.tensor, output.expert, output.n, k0 + i))
                << "column " << column << ", k " << k0 << " + " << i << " of pieces of " << step;
            double value = value_of(format.code, got, format.segments);
            double size = std::abs(value);
            if (format.segments.k > 0) {
              value *= static_cast<double>(scale[column]);
              size = std::abs(value) + std::abs(static_cast<double>(offset[column]));
              value += static_cast<double>(offset[column]);
            }
            const double factor = static_cast<double>(columns[static_cast<std::size_t>(column)]);
            const double want =
                format_info(tensor.format).decode(*output.tensor, output.expert, output.n, k0 + i);
            ASSERT_NEAR(value * factor, want, size * std::abs(factor) * 0x1p-22)
                << "column " << column << ", k " << k0 << " + " << i << " of pieces of " << step;
          }
        }
      }
    }
  }
}

void expect_w2(const PlanSpec& spec, const ExpertWeights& weights) {
  const MoeConfig& config = spec.config;
  for (const std::int64_t expert : {0, 2}) {
    const std::int64_t last = (config.hidden_size - 1) / kPanelOutputs;
    for (const std::int64_t p : {std::int64_t{0}, last}) {
      expect_panel(w2_panel(spec, weights, expert, p), weights.w2,
                   [&](std::int64_t column, PanelOutput& output) {
                     output = {&weights.w2, expert, p * kPanelOutputs + column};
                     return output.n < config.hidden_size;
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
    const std::int64_t last = (config.intermediate_size - 1) / channels;
    for (const std::int64_t p : {std::int64_t{0}, std::int64_t{1}, last}) {
      if (p > last) continue;
      const bool apart = !weights.w13_up.empty();
      expect_panel(w13_panel(spec, weights, expert, p), weights.w13,
                   [&](std::int64_t column, PanelOutput& output) {
                     const std::int64_t channel = p * channels + column % channels;
                     const int part = column < channels ? 0 : 1;
                     const bool up = gated && part == 1 && apart;
                     output.tensor = up ? &weights.w13_up : &weights.w13;
                     output.expert = expert;
                     output.n = !gated || apart ? channel : fused_row(config, channel, part);
                     return channel < config.intermediate_size;
                   });
    }
  }
}

class PackTest : public testing::TestWithParam<test::FormatCase> {};

TEST_P(PackTest, EveryStrideAndAddress) {
  const test::FormatCase& c = GetParam();
  for (const Activation kind : {Activation::silu, Activation::relu2}) {
    if (kind == Activation::relu2 && c.w13_parts != ScaleParts::one) continue;
    for (const auto& [padding, misalign] :
         {std::pair{0, 0}, std::pair{0, 1}, std::pair{5, 2}, std::pair{5, 33}}) {
      const MoeConfig config = config_of(kind, c);
      RandomWeightsOptions options = c.options();
      options.row_padding = padding;
      options.expert_padding = 3 * padding;
      options.misalign = misalign;
      const RandomWeights weights(config, kExperts, options, 17);
      const PlanSpec spec = make_spec(config, {});
      SCOPED_TRACE(std::string(to_string(kind)) + " padding " + std::to_string(padding) +
                   " misalign " + std::to_string(misalign));
      expect_w13(spec, weights.view());
      expect_w2(spec, weights.view());
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(PackTest, EveryOrderOfGateAndUp) {
  const test::FormatCase& c = GetParam();
  for (const GateUpLayout gate_up : {GateUpLayout::halves, GateUpLayout::interleaved}) {
    for (const GateUpOrder order : {GateUpOrder::gate_up, GateUpOrder::up_gate}) {
      MoeConfig config = config_of(Activation::silu, c);
      config.gate_up_layout = gate_up;
      config.gate_up_order = order;
      RandomWeightsOptions options = c.options();
      options.row_padding = 2;
      if (gate_up == GateUpLayout::interleaved && c.w13_parts != ScaleParts::one) {
        // Blocks of alternating rows are those of one matrix.
        options.w13_scales->parts =
            c.scales.layout == ScaleLayout::block ? ScaleParts::one : ScaleParts::interleaved;
      }
      const RandomWeights weights(config, kExperts, options, 3);
      SCOPED_TRACE(std::string(to_string(gate_up)) + " " + to_string(order));
      expect_w13(make_spec(config, {}), weights.view());
      if (HasFatalFailure()) return;
    }
  }
}

// Gate and up in tensors of their own: the layout and order of rows do not matter then, and each
// has its own strides and its own order of K and N.
TEST_P(PackTest, GateAndUpApart) {
  const test::FormatCase& c = GetParam();
  for (const GateUpLayout gate_up : {GateUpLayout::halves, GateUpLayout::interleaved}) {
    for (const GateUpOrder order : {GateUpOrder::gate_up, GateUpOrder::up_gate}) {
      for (const WeightLayout up_layout : kLayouts) {
        if (up_layout == WeightLayout::kn && !c.info().scales.any_order) continue;
        MoeConfig config = config_of(Activation::silu, c);
        config.gate_up_layout = gate_up;
        config.gate_up_order = order;
        RandomWeightsOptions options = c.options();
        options.gate_up_apart = true;
        options.w13_scales = c.scales;
        const RandomWeights gate(config, kExperts, options, 3);
        options.w13_layout = up_layout;
        options.row_padding = 4;
        options.misalign = 1;
        const RandomWeights up(config, kExperts, options, 4);
        ExpertWeights weights = gate.view();
        weights.w13_up = up.view().w13_up;
        SCOPED_TRACE(std::string("up ") + to_string(up_layout));
        expect_w13(make_spec(config, {}), weights);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The last expert's tensors end where their memory ends, with k or the outputs side by side, or
// neither: nothing behind them is read. Scales and zero points likewise.
TEST_P(PackTest, NothingBehindTheWeightsIsRead) {
  const test::FormatCase& c = GetParam();
  for (std::int64_t about = 1; about <= 80; ++about) {
    const std::int64_t k = c.k(about);
    if (c.k_multiple() > 1 && about > 1) break;
    for (const std::int64_t columns : {32, 13}) {
      WeightTensor tensor{.format = c.format,
                          .layout = c.layout,
                          .experts = 1,
                          .outputs = columns,
                          .inputs = k,
                          .scales = c.scales};
      const QuantizedStack stack =
          quantize(numbers(columns * k, 9), tensor, {.zero_points = c.zero_points});
      tensor = stack.tensor;
      const auto guarded = [](const auto& from) {
        return test::GuardedBuffer(from.data(), static_cast<std::int64_t>(from.size()),
                                   test::Side::back);
      };
      const test::GuardedBuffer data = guarded(stack.data), scales = guarded(stack.scales),
                                zeros = guarded(stack.zero_points);
      tensor.data = data.data();
      if (tensor.scales.data != nullptr) tensor.scales.data = scales.data();
      if (tensor.scales.zero_points != nullptr) tensor.scales.zero_points = zeros.data();
      expect_panel(outputs_of(tensor, columns), tensor,
                   [&](std::int64_t column, PanelOutput& output) {
                     output = {&tensor, 0, column};
                     return column < columns;
                   });
      if (HasFatalFailure()) FAIL() << "k " << k << ", outputs " << columns;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, PackTest, testing::ValuesIn(test::all_format_cases()),
                         test::format_case_name);

// Where a panel's parts lie: apart from one another, each from a multiple of 64 bytes on, and every
// order of panels is one that a kernel reads.
TEST(PanelFormats, PartsDoNotOverlap) {
  for (const test::FormatCase& c : test::all_format_cases()) {
    for (const GemmKernel& kernel : kernels_for(c.format)) {
      for (const std::int64_t about : {1, 31, 64, 257, 2880}) {
        const std::int64_t k = c.k(about);
        WeightTensor tensor{
            .format = c.format, .experts = 1, .outputs = 64, .inputs = k, .scales = c.scales};
        const std::uint8_t zero = 0;
        if (c.zero_points) tensor.scales.zero_points = &zero;
        const PanelFormat format = panel_format(tensor, kernel);
        SCOPED_TRACE(c.name + " for " + kernel.name);
        const std::int64_t records = format.segments.count(k) * format.segments.record_bytes();
        EXPECT_EQ(format.records_offset(k) % 64, 0);
        EXPECT_EQ(format.codes_offset(k) % 64, 0);
        EXPECT_EQ(format.bytes(k) % 64, 0);
        EXPECT_LE(format.records_offset(k) + records, format.codes_offset(k));
        EXPECT_LE(format.codes_offset(k) + format.code_bytes(k), format.bytes(k));
        EXPECT_EQ(format.period() % 4, 0);
        if (format.segments.k > 0) {
          EXPECT_EQ(format.segments.k % 4, 0);
          EXPECT_EQ(format.period() % format.segments.k, 0);
        }
      }
    }
  }
}

TEST(PanelFormats, GroupsThatNoUnitDividesAreRefused) {
  WeightTensor tensor{
      .format = WeightFormat::int8, .experts = 1, .outputs = 8, .inputs = 60, .scales = {}};
  tensor.scales = {.layout = ScaleLayout::group};
  for (const std::int64_t size : {1, 2, 3, 5, 6, 30, 59}) {
    tensor.scales.group_size = size;
    try {
      check_panel_format("weights.w2", tensor);
      ADD_FAILURE() << size;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported);
      EXPECT_EQ(std::string(error.what()).find("weights.w2.scales"), 0U) << error.what();
      EXPECT_NE(std::string(error.what()).find("got " + std::to_string(size)), std::string::npos)
          << error.what();
    }
  }
  for (const std::int64_t size : {4, 12, 20, 60, 61, 300}) {  // the last three are one group
    tensor.scales.group_size = size;
    EXPECT_NO_THROW(check_panel_format("weights.w2", tensor)) << size;
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
