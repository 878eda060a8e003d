// Random weights and activations for bench, at the speed of memory: bits, some of them fixed, so
// that every code is a number and outputs of layers of any size are finite and near 1.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "format_spec.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::tool {

// Which bits of each 64 are random, and what the others are.
struct BitPattern {
  std::uint64_t random = ~std::uint64_t{0};
  std::uint64_t fixed = 0;
  bool e4m3 = false;  // bytes that are NaN in e4m3 become the largest number
};

// Signed floats of magnitudes 2^exponent to 2^(exponent + 2). exponent: odd, or the lowest bit of
// its field would not be free.
BitPattern signed_floats(DType dtype, int exponent);

// A seed far from the others (splitmix64).
std::uint64_t mix(std::uint64_t seed);

// About 8 GB/s per thread. The numbers depend on seed and threads.
void fill_random(std::span<std::uint64_t> words, const BitPattern& pattern, std::uint64_t seed,
                 int threads);

// A stack of random weights of any format that owns its memory. Made once, filled often.
class RandomStack {
 public:
  // tensor: format, sizes and scales of a dense stack; its pointers are ignored.
  RandomStack(const FormatSpec& spec, const WeightTensor& tensor);
  void fill(std::uint64_t seed, int threads);
  WeightTensor view() const;
  // What a source states of all experts: no addresses but that of zero points, if there are some.
  WeightTensor view_without_data(std::int64_t experts) const;

 private:
  FormatSpec spec_;
  WeightTensor tensor_;
  std::vector<std::uint64_t> codes_, scales_, zero_points_, global_;
};

}  // namespace fusedmoe::tool
