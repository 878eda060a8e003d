// exp, tanh and erf for the activations: once for double (the oracle, by the C library) and once
// for any vector type of floats (the kernels), so that all lanes and all widths agree on every bit.
//
// A vector type V has V(float), + - * / and unary minus, and: at_most, at_least (a NaN in the first
// argument stays), abs, copy_sign, select_less(a, b, x, y) = a < b ? x : y, round_even, pow2 (2^n
// for an integral n in [-126, 127]).
#pragma once

#include <cmath>

namespace fusedmoe::activations {

inline double exp(double x) { return std::exp(x); }
inline double tanh(double x) { return std::tanh(x); }
inline double erf(double x) { return std::erf(x); }
inline double at_most(double x, double limit) { return x > limit ? limit : x; }
inline double at_least(double x, double limit) { return x < limit ? limit : x; }

// Relative error below 2 ulp. Range reduction and coefficients as in Cephes' expf (S. Moshier).
template <class V>
inline V exp(V x) {
  // Beyond these bounds the result is 0 or infinity either way; inside, two factors of 2^n suffice.
  x = at_least(at_most(x, V(150.0F)), V(-150.0F));
  const V n = round_even(x * V(1.44269504088896341F));
  const V r = (x - n * V(0.693359375F)) - n * V(-2.12194440e-4F);
  V p = V(1.9875691500e-4F);
  p = p * r + V(1.3981999507e-3F);
  p = p * r + V(8.3334519073e-3F);
  p = p * r + V(4.1665795894e-2F);
  p = p * r + V(1.6666665459e-1F);
  p = p * r + V(5.0000001201e-1F);
  p = (p * r) * r + r + V(1.0F);
  const V half = round_even(n * V(0.5F));
  return p * pow2(half) * pow2(n - half);
}

// Small arguments by an odd polynomial (Cephes' tanhf), where the other form would cancel.
template <class V>
inline V tanh(V x) {
  const V a = abs(x);
  const V z = x * x;
  V p = V(-5.70498872745e-3F);
  p = p * z + V(2.06390887954e-2F);
  p = p * z + V(-5.37397155531e-2F);
  p = p * z + V(1.33314422036e-1F);
  p = p * z + V(-3.33332819422e-1F);
  const V small = p * z * x + x;
  const V large = V(1.0F) - V(2.0F) / (exp(a + a) + V(1.0F));
  return select_less(a, V(0.625F), small, copy_sign(large, x));
}

// Absolute error below 2e-7: Abramowitz and Stegun, 7.1.26. It is only ever added to 1.
template <class V>
inline V erf(V x) {
  const V a = abs(x);
  const V t = V(1.0F) / (V(1.0F) + V(0.3275911F) * a);
  V p = V(1.061405429F);
  p = p * t + V(-1.453152027F);
  p = p * t + V(1.421413741F);
  p = p * t + V(-0.284496736F);
  p = p * t + V(0.254829592F);
  return copy_sign(V(1.0F) - p * t * exp(-(a * a)), x);
}

}  // namespace fusedmoe::activations
