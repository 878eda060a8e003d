// activate: every activation with every combination of dtype, bias, router weight and tail, against
// the formulas in fp64 as the design states them.
#include "backends/cpu/float_environment.h"
#include "kernel_inputs.h"

namespace fusedmoe::cpu {
namespace {

constexpr Activation kActivations[] = {
    Activation::silu,       Activation::gelu, Activation::gelu_tanh, Activation::swigluoai,
    Activation::swiglustep, Activation::situ, Activation::relu2};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double clamp(double x, double limit) { return x > limit ? limit : x < -limit ? -limit : x; }

double formula(const ActivationConfig& config, double clamp_limit, double g, double u) {
  if (clamp_limit > 0) {
    g = g > clamp_limit ? clamp_limit : g;
    u = clamp(u, clamp_limit);
  }
  const double limit = static_cast<double>(config.limit);
  const double alpha = static_cast<double>(config.alpha);
  const double beta = static_cast<double>(config.beta);
  const double linear = static_cast<double>(config.linear_beta);
  switch (config.kind) {
    case Activation::silu:
      return g * sigmoid(g) * u;
    case Activation::gelu:
      return g * 0.5 * (1 + std::erf(g / std::sqrt(2.0))) * u;
    case Activation::gelu_tanh:
      return g * 0.5 *
             (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (g + 0.044715 * g * g * g))) *
             u;
    case Activation::swigluoai:
      g = g > limit ? limit : g;
      return (clamp(u, limit) + 1) * (g * sigmoid(alpha * g));
    case Activation::swiglustep: {
      const double s = g * sigmoid(g);
      return (s > limit ? limit : s) * clamp(u, limit);
    }
    case Activation::situ:
      return beta * std::tanh(g / beta) * sigmoid(g) *
             (linear == 0 ? u : linear * std::tanh(u / linear));
    case Activation::relu2:
      return u > 0 || std::isnan(u) ? u * u : 0;
  }
  return 0;
}

ActivationConfig config_of(Activation kind) {
  return {.kind = kind, .alpha = 1.3F, .limit = 2.5F, .beta = 1.7F, .linear_beta = 0};
}

struct Tile {
  int rows = 3;
  int outputs = 16;
  DType dtype = DType::f32;
  float clamp_limit = 0;
  ActivationConfig config;
  std::vector<float> accumulators, row_scale, scale, bias;
  std::int64_t stride = 0;

  // [rows][stride], 0xFF bytes where nothing was stored.
  std::vector<std::byte> run(const RowKernels& kernels) {
    stride = outputs + 5;
    std::vector<std::byte> to(rows * stride * bytes_of(dtype), std::byte{0xff});
    kernels.activate({accumulators.data(), rows, outputs,
                      row_scale.empty() ? nullptr : row_scale.data(),
                      scale.empty() ? nullptr : scale.data(), bias.empty() ? nullptr : bias.data(),
                      &config, clamp_limit, to.data(), dtype, stride});
    return to;
  }
  double projected(int row, int column) const {
    double value = static_cast<double>(accumulators[row * kPanelOutputs + column]);
    if (!scale.empty()) value *= static_cast<double>(scale[column]);
    if (!row_scale.empty()) value *= static_cast<double>(row_scale[row]);
    if (!bias.empty()) value += static_cast<double>(bias[column]);
    return value;
  }
  double expected(int row, int channel) const {
    if (config.kind == Activation::relu2) {
      return formula(config, clamp_limit, 0, projected(row, channel));
    }
    return formula(config, clamp_limit, projected(row, channel),
                   projected(row, channel + kGatedOutputs));
  }
};

// Both sides NaN, or the same infinity, or near.
void expect_near(float got, double expected, DType dtype, double magnitude) {
  if (!std::isfinite(expected)) {
    ASSERT_TRUE(std::isnan(expected) ? std::isnan(got) : static_cast<double>(got) == expected)
        << got << " for " << expected;
    return;
  }
  const double roundoff = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0x1p-24;
  const double smallest = dtype == DType::f16 ? 0x1p-25 : 0;  // half of f16's last place
  ASSERT_NEAR(static_cast<double>(got), expected,
              1.01 * roundoff * std::abs(expected) + 2e-6 * magnitude + smallest);
}

class ActivateTest : public IsaTest {};

TEST_P(ActivateTest, EveryActivationDtypeBiasScaleAndTail) {
  const FloatEnvironment environment;  // as in apply
  for (const Activation kind : kActivations) {
    const int most = kind == Activation::relu2 ? kPanelOutputs : kGatedOutputs;
    for (const DType dtype : kDtypes) {
      for (int which = 0; which < 16; ++which) {
        for (int outputs = 1; outputs <= most; ++outputs) {
          Tile tile;
          tile.config = config_of(kind);
          tile.dtype = dtype;
          tile.outputs = outputs;
          tile.accumulators = numbers(3 * kPanelOutputs, static_cast<unsigned>(outputs));
          for (float& value : tile.accumulators) value *= 2.5F;
          if ((which & 1) != 0) tile.bias = numbers(kPanelOutputs, 9);
          if ((which & 2) != 0) tile.row_scale = {0.25F, 1.9F, -0.7F};
          if ((which & 8) != 0) tile.scale = numbers(kPanelOutputs, 11);
          const bool may_clamp =
              kind == Activation::silu || kind == Activation::gelu || kind == Activation::gelu_tanh;
          if ((which & 4) != 0) {
            if (kind == Activation::situ) tile.config.linear_beta = 0.8F;
            if (may_clamp) tile.clamp_limit = 1.25F;
          }
          const std::vector<std::byte> got = tile.run(kernels());
          for (int r = 0; r < 3; ++r) {
            for (int i = 0; i < tile.stride; ++i) {
              const std::int64_t at = r * tile.stride + i;
              if (i >= outputs) {
                for (std::int64_t b = 0; b < bytes_of(dtype); ++b) {
                  ASSERT_EQ(got[at * bytes_of(dtype) + b], std::byte{0xff}) << "beyond the tail";
                }
                continue;
              }
              const int up = kind == Activation::relu2 ? i : i + kGatedOutputs;
              const double size =
                  (1 + std::abs(tile.projected(r, i))) * (1 + std::abs(tile.projected(r, up)));
              expect_near(load(got.data(), dtype, at), tile.expected(r, i), dtype, size);
              if (HasFatalFailure()) {
                FAIL() << to_string(kind) << " " << to_string(dtype) << " which " << which
                       << " outputs " << outputs << " at " << r << ", " << i;
              }
            }
          }
        }
      }
    }
  }
}

// Far out, at infinity and at NaN, in every lane: what IEEE arithmetic of the formula gives.
TEST_P(ActivateTest, ExtremesAndNaN) {
  const FloatEnvironment environment;
  const float extremes[] = {0.0F,    -0.0F, 20.0F, -20.0F, 88.0F, -88.0F, 200.0F,
                            -200.0F, 3e4F,  -3e4F, kInf,   -kInf, kNaN};
  for (const Activation kind : kActivations) {
    for (const DType dtype : kDtypes) {
      for (const float g : extremes) {
        for (const float u : extremes) {
          Tile tile;
          tile.config = config_of(kind);
          tile.dtype = dtype;
          tile.rows = 1;
          tile.outputs = 13;
          tile.accumulators.assign(kPanelOutputs, g);
          if (kind == Activation::relu2) {
            tile.accumulators.assign(kPanelOutputs, u);
          } else {
            std::fill_n(tile.accumulators.begin() + kGatedOutputs, kGatedOutputs, u);
          }
          const std::vector<std::byte> got = tile.run(kernels());
          double expected = tile.expected(0, 0);
          const double largest = dtype == DType::f16 ? 65520 : 3.4e38;
          if (std::abs(expected) >= largest) expected = expected > 0 ? HUGE_VAL : -HUGE_VAL;
          for (int i = 0; i < 13; ++i) {
            ASSERT_EQ(got[i * bytes_of(dtype)], got[0]) << "lane " << i;
          }
          const float value = load(got.data(), dtype, 12);
          if (std::isinf(u) && !std::isfinite(expected)) {
            // Times a gate that underflows in fp32, infinity is NaN where fp64 still has infinity.
            ASSERT_FALSE(std::isfinite(value)) << to_string(kind) << " of " << g << ", " << u;
            continue;
          }
          expect_near(value, expected, dtype, 1 + std::abs(expected));
          if (HasFatalFailure()) {
            FAIL() << to_string(kind) << " " << to_string(dtype) << " of " << g << ", " << u;
          }
        }
      }
    }
  }
}

// A channel takes the same path in a body and in a tail, in every lane and every row.
TEST_P(ActivateTest, BitsDoNotDependOnThePlaceOrTheNeighbours) {
  for (const Activation kind : kActivations) {
    for (const DType dtype : kDtypes) {
      Tile tile;
      tile.config = config_of(kind);
      tile.dtype = dtype;
      tile.rows = 5;
      tile.outputs = 16;
      tile.row_scale = numbers(5, 4);
      tile.accumulators = numbers(5 * kPanelOutputs, 6);
      const std::vector<std::byte> together = tile.run(kernels());
      for (int r = 0; r < 5; ++r) {
        for (int i = 0; i < 16; ++i) {
          for (const int place : {0, 7, 15}) {
            Tile alone = tile;
            alone.rows = 1;
            alone.outputs = place + 1;
            alone.row_scale = {tile.row_scale[r]};
            alone.accumulators.assign(kPanelOutputs, kNaN);
            const int up = kind == Activation::relu2 ? 0 : kGatedOutputs;
            alone.accumulators[place] = tile.accumulators[r * kPanelOutputs + i];
            alone.accumulators[place + up] = tile.accumulators[r * kPanelOutputs + i + up];
            const std::vector<std::byte> got = alone.run(kernels());
            ASSERT_EQ(bits(load(got.data(), dtype, place)),
                      bits(load(together.data(), dtype, r * tile.stride + i)))
                << to_string(kind) << " row " << r << " channel " << i << " at " << place;
          }
        }
      }
    }
  }
}

FUSEDMOE_FOR_EVERY_ISA(ActivateTest);

}  // namespace
}  // namespace fusedmoe::cpu
