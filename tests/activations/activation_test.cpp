// activations/activation.h, the definition: each formula against one written down here in long
// double, on a grid, on values without bound, and on the numbers of known cases.
#include "activations/activation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace fusedmoe {
namespace {

using Real = long double;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double activate(const ActivationConfig& config, float clamp_limit, double gate, double up) {
  double result = 0;
  activations::dispatch(config.kind, [&]<Activation kKind>() {
    result = activations::activate<kKind>(config, clamp_limit, gate, up);
  });
  return result;
}

Real sigmoid(Real x) { return 1 / (1 + std::exp(-x)); }
Real silu(Real x) { return x * sigmoid(x); }
Real gelu(Real x) { return x / 2 * (1 + std::erf(x / std::sqrt(Real{2}))); }
// By its usual tanh form; the definition has another, equal one.
Real gelu_tanh(Real x) {
  const Real pi = std::acos(Real{-1});
  return x / 2 * (1 + std::tanh(std::sqrt(2 / pi) * (x + Real{0.044715L} * x * x * x)));
}
Real clamp(Real x, Real low, Real high) { return x < low ? low : x > high ? high : x; }

Real expected(const ActivationConfig& c, float clamp_limit, Real g, Real u) {
  if (clamp_limit > 0) {
    g = g > clamp_limit ? clamp_limit : g;
    u = clamp(u, -clamp_limit, clamp_limit);
  }
  switch (c.kind) {
    case Activation::silu:
      return silu(g) * u;
    case Activation::gelu:
      return gelu(g) * u;
    case Activation::gelu_tanh:
      return gelu_tanh(g) * u;
    case Activation::swigluoai: {
      const Real gate = g > c.limit ? c.limit : g;
      return (clamp(u, -c.limit, c.limit) + 1) * gate * sigmoid(c.alpha * gate);
    }
    case Activation::swiglustep:
      return std::min(silu(g), static_cast<Real>(c.limit)) * clamp(u, -c.limit, c.limit);
    case Activation::situ:
      return c.beta * std::tanh(g / c.beta) * sigmoid(g) *
             (c.linear_beta != 0 ? c.linear_beta * std::tanh(u / c.linear_beta) : u);
    case Activation::relu2:
      return u > 0 ? u * u : 0;
  }
  return 0;
}

std::vector<ActivationConfig> all_activations() {
  return {{.kind = Activation::silu},
          {.kind = Activation::gelu},
          {.kind = Activation::gelu_tanh},
          {.kind = Activation::swigluoai},
          {.kind = Activation::swigluoai, .alpha = 1.0F, .limit = 3.5F},
          {.kind = Activation::swigluoai, .limit = std::numeric_limits<float>::infinity()},
          {.kind = Activation::swiglustep},
          {.kind = Activation::swiglustep, .limit = 0.75F},
          {.kind = Activation::situ, .beta = 2.5F},
          {.kind = Activation::situ, .beta = 4.0F, .linear_beta = 3.0F},
          {.kind = Activation::relu2}};
}

TEST(Activation, FormulasOnAGrid) {
  for (const ActivationConfig& config : all_activations()) {
    for (const float limit : {0.0F, 2.0F}) {
      const bool clamps = config.kind == Activation::silu || config.kind == Activation::gelu ||
                          config.kind == Activation::gelu_tanh;
      if (limit > 0 && !clamps) continue;
      for (double g = -30; g <= 30; g += 0.37) {
        for (double u = -20; u <= 20; u += 1.9) {
          const auto want = static_cast<double>(expected(config, limit, g, u));
          const double got = activate(config, limit, g, u);
          // Constants are floats: 6e-8 each, and erf cancels where its result is tiny.
          ASSERT_NEAR(got, want, 2e-6 * std::abs(want) + 1e-6 * std::abs(u))
              << to_string(config.kind) << " of " << g << ", " << u;
        }
      }
    }
  }
}

TEST(Activation, NanStaysNanAndHugeStaysRight) {
  for (const ActivationConfig& config : all_activations()) {
    const std::string name = to_string(config.kind);
    EXPECT_TRUE(std::isnan(activate(config, 0, 1.0, kNan))) << name;
    EXPECT_TRUE(!is_gated(config.kind) || std::isnan(activate(config, 0, kNan, 1.0))) << name;
    for (const double g : {-1e30, -1e4, 1e4, 1e30}) {
      for (const double u : {-1e30, -3.0, 0.0, 3.0, 1e30}) {
        const double got = activate(config, 0, g, u);
        EXPECT_FALSE(std::isnan(got)) << name << " of " << g << ", " << u;
        const auto want = static_cast<double>(expected(config, 0, g, u));
        EXPECT_TRUE(std::isnan(want) || std::abs(got - want) <= 1e-6 * std::abs(want)) << name;
      }
    }
  }
  for (const Activation kind : {Activation::silu, Activation::gelu, Activation::gelu_tanh}) {
    const ActivationConfig config{.kind = kind};
    EXPECT_EQ(activate(config, 0, kInf, 1.0), kInf);
    EXPECT_TRUE(std::isnan(activate(config, 5, kNan, 1.0))) << "a clamp drops no NaN";
    EXPECT_TRUE(std::isnan(activate(config, 5, 1.0, kNan)));
    EXPECT_NEAR(activate(config, 5, kInf, kInf), activate(config, 0, 5, 5), 1e-12);
  }
  EXPECT_EQ(activate({.kind = Activation::relu2}, 0, 0, kInf), kInf);
  EXPECT_EQ(activate({.kind = Activation::relu2}, 0, 0, -kInf), 0);
  EXPECT_NEAR(activate({.kind = Activation::swigluoai}, 0, kInf, kInf),
              static_cast<double>(expected({.kind = Activation::swigluoai}, 0, 7, 7)), 1e-5);
}

TEST(Activation, B058_TheClampComesBeforeTheGateAndLimitsItFromAboveOnly) {
  const ActivationConfig silu_config{.kind = Activation::silu};
  EXPECT_NEAR(activate(silu_config, 10, 20, -20), -99.9955, 1e-4);
  EXPECT_NEAR(activate(silu_config, 10, -20, 3), static_cast<double>(silu(-20) * 3), 1e-12);
  EXPECT_NEAR(activate(silu_config, 0, 20, -20), -400, 1e-4);
}

TEST(Activation, B059_ConstantsAreThoseOfTheModel) {
  EXPECT_NEAR(activate({.kind = Activation::swigluoai}, 0, 8, -9), -41.99972, 1e-4);
  EXPECT_NEAR(activate({.kind = Activation::silu}, 0, 1, 1), 0.731059, 1e-6);
  EXPECT_NEAR(activate({.kind = Activation::swigluoai}, 0, 1, 1), 2 * 0.845796, 1e-5);
}

TEST(Activation, B060_SquaredReluHasNoGate) {
  const ActivationConfig config{.kind = Activation::relu2};
  EXPECT_FALSE(is_gated(config.kind));
  EXPECT_EQ(activate(config, 0, 123, -3), 0);
  EXPECT_EQ(activate(config, 0, 123, 2), 4);
}

TEST(Activation, DispatchKnowsEveryKindAndNoOther) {
  for (int kind = 0; kind <= static_cast<int>(Activation::relu2); ++kind) {
    int seen = -1;
    activations::dispatch(static_cast<Activation>(kind),
                          [&]<Activation kKind>() { seen = static_cast<int>(kKind); });
    EXPECT_EQ(seen, kind);
    EXPECT_STRNE(to_string(static_cast<Activation>(kind)), "unknown");
  }
  EXPECT_STREQ(to_string(static_cast<Activation>(200)), "unknown");
}

}  // namespace
}  // namespace fusedmoe
