// The activations: one formula each, the definition for the oracle (V = double) and for every
// backend (V = its vector of floats). To add one, add its enumerator and its case here.
#pragma once

#include "activations/math.h"
#include "fusedmoe/config.h"

namespace fusedmoe::activations {

template <class V>
inline V sigmoid(V x) {
  return V(1.0F) / (V(1.0F) + exp(-x));
}

template <class V>
inline V clamp(V x, V limit) {
  return at_least(at_most(x, limit), -limit);
}

// gate, up: one value or one vector of each. clamp_limit: MoeConfig::clamp_limit, 0 = off.
template <Activation kKind, class V>
inline V activate(const ActivationConfig& config, float clamp_limit, V gate, V up) {
  if (clamp_limit > 0.0F) {
    gate = at_most(gate, V(clamp_limit));
    up = clamp(up, V(clamp_limit));
  }
  if constexpr (kKind == Activation::silu) {
    return gate * sigmoid(gate) * up;
  } else if constexpr (kKind == Activation::gelu) {
    return gate * V(0.5F) * (V(1.0F) + erf(gate * V(0.70710678118654752F))) * up;
  } else if constexpr (kKind == Activation::gelu_tanh) {
    // (1 + tanh(y)) / 2 = sigmoid(2y), which does not cancel; 2 sqrt(2 / pi) = 1.5957691216.
    const V y = V(1.5957691216057308F) * (gate + V(0.044715F) * gate * gate * gate);
    return gate * sigmoid(y) * up;
  } else if constexpr (kKind == Activation::swigluoai) {
    const V g = at_most(gate, V(config.limit));
    const V u = clamp(up, V(config.limit));
    return (u + V(1.0F)) * (g * sigmoid(V(config.alpha) * g));
  } else if constexpr (kKind == Activation::swiglustep) {
    return at_most(gate * sigmoid(gate), V(config.limit)) * clamp(up, V(config.limit));
  } else if constexpr (kKind == Activation::situ) {
    const V g = V(config.beta) * tanh(gate / V(config.beta)) * sigmoid(gate);
    if (config.linear_beta == 0.0F) return g * up;
    return g * (V(config.linear_beta) * tanh(up / V(config.linear_beta)));
  } else {
    static_assert(kKind == Activation::relu2);  // its only input comes as `up`
    const V x = at_least(up, V(0.0F));
    return x * x;
  }
}

// Calls f with the kind as a compile-time constant: f.template operator()<kKind>().
template <class F>
inline void dispatch(Activation kind, const F& f) {
  switch (kind) {
    case Activation::silu:
      return f.template operator()<Activation::silu>();
    case Activation::gelu:
      return f.template operator()<Activation::gelu>();
    case Activation::gelu_tanh:
      return f.template operator()<Activation::gelu_tanh>();
    case Activation::swigluoai:
      return f.template operator()<Activation::swigluoai>();
    case Activation::swiglustep:
      return f.template operator()<Activation::swiglustep>();
    case Activation::situ:
      return f.template operator()<Activation::situ>();
    case Activation::relu2:
      return f.template operator()<Activation::relu2>();
  }
}

}  // namespace fusedmoe::activations
