#include "bench_random.h"

#include <algorithm>
#include <cstring>

#include "bench_threads.h"
#include "formats/format.h"
#include "formats/scales.h"

namespace fusedmoe::tool {
namespace {

std::uint64_t in_each(int bits, std::uint64_t value) {
  std::uint64_t all = 0;
  for (int at = 0; at < 64; at += bits) all |= value << at;
  return all;
}

struct FloatBits {
  int bits, mantissa, bias;
};
constexpr FloatBits kF32{32, 23, 127}, kF16{16, 10, 15}, kBf16{16, 7, 127};

// Positive floats of one magnitude, 2^exponent to 2^(exponent + 1).
BitPattern positive_floats(const FloatBits& bits, int exponent) {
  return {in_each(bits.bits, (std::uint64_t{1} << bits.mantissa) - 1),
          in_each(bits.bits, static_cast<std::uint64_t>(bits.bias + exponent) << bits.mantissa)};
}

// The root of the mean square of random codes, as a power of two, rounded down: 110 for e4m3
// without NaN, 0.4 for e5m2 below 2, 2.9 for e2m1, 74 for s8, 4.6 for four bits around 8.
int code_exponent(WeightFormat format) {
  switch (format) {
    case WeightFormat::fp8_e4m3:
    case WeightFormat::mxfp8:
    case WeightFormat::int8:
      return 6;
    case WeightFormat::fp8_e5m2:
      return -2;
    case WeightFormat::mxfp4:
    case WeightFormat::nvfp4:
      return 1;
    default:
      return 2;
  }
}

// Weights of 2^-6 and some, as those of signed_floats(dtype, -7).
constexpr int kWeightExponent = -6;

BitPattern code_pattern(WeightFormat format) {
  switch (format) {
    case WeightFormat::f32:
      return signed_floats(DType::f32, kWeightExponent - 1);
    case WeightFormat::f16:
      return signed_floats(DType::f16, kWeightExponent - 1);
    case WeightFormat::bf16:
      return signed_floats(DType::bf16, kWeightExponent - 1);
    case WeightFormat::fp8_e4m3:
    case WeightFormat::mxfp8:
      return {.e4m3 = true};
    case WeightFormat::fp8_e5m2:
      return {.random = in_each(8, 0xbf)};  // neither infinite nor NaN
    default:
      return {};
  }
}

BitPattern scale_pattern(WeightFormat format, ScaleType type) {
  const int exponent = kWeightExponent - code_exponent(format);
  switch (type) {
    case ScaleType::f32:
      return positive_floats(kF32, exponent);
    case ScaleType::f16:
      return positive_floats(kF16, exponent);
    case ScaleType::bf16:
      return positive_floats(kBf16, exponent);
    case ScaleType::e8m0: {  // two of them
      const int even = (127 + exponent) / 2 * 2;
      return {in_each(8, 1), in_each(8, static_cast<std::uint64_t>(even))};
    }
    case ScaleType::e4m3:
      return {in_each(8, 7), in_each(8, 7 << 3)};  // 1 to 2, and a global scale
  }
  return {};
}

// K-quants keep f16 in their blocks: where, and of which size. Scales of sub-blocks (6 or 8 bits)
// and codes are random, so minima that cancel the mean of q4_k and q5_k are 8 or 16 steps.
struct BlockFloat {
  int offset;
  std::uint16_t random, fixed;
};
std::span<const BlockFloat> block_floats(WeightFormat format) {
  static constexpr BlockFloat kQ4[] = {{0, 0x03ff, 0x0400}, {2, 0x03ff, 0x1000}};
  static constexpr BlockFloat kQ5[] = {{0, 0x01ff, 0x0200}, {2, 0x03ff, 0x1000}};
  static constexpr BlockFloat kQ6[] = {{208, 0x00ff, 0x0100}};
  switch (format) {
    case WeightFormat::q4_k:
      return kQ4;
    case WeightFormat::q5_k:
      return kQ5;
    case WeightFormat::q6_k:
      return kQ6;
    default:
      return {};
  }
}

// Eight generators side by side (xorshift64), so that the compiler runs them in vectors.
template <bool kE4m3>
void fill_words(std::span<std::uint64_t> words, const BitPattern& pattern, std::uint64_t seed) {
  constexpr std::size_t kLanes = 8;
  std::uint64_t state[kLanes];
  for (std::size_t i = 0; i < kLanes; ++i) state[i] = mix(seed * kLanes + i) | 1;
  for (std::size_t begin = 0; begin < words.size(); begin += kLanes) {
    std::uint64_t values[kLanes];
    for (std::size_t i = 0; i < kLanes; ++i) {
      state[i] ^= state[i] << 13;
      state[i] ^= state[i] >> 7;
      state[i] ^= state[i] << 17;
      values[i] = (state[i] & pattern.random) | pattern.fixed;
      if constexpr (kE4m3) {  // 0x7f plus one reaches the byte's top bit, whatever the sign
        const std::uint64_t magnitudes = values[i] & 0x7f7f7f7f7f7f7f7fU;
        values[i] ^= ((magnitudes + 0x0101010101010101U) & 0x8080808080808080U) >> 7;
      }
    }
    std::copy_n(values, std::min(kLanes, words.size() - begin), words.begin() + begin);
  }
}

std::vector<std::uint64_t> words_for(std::int64_t bytes) {
  return std::vector<std::uint64_t>(static_cast<std::size_t>((bytes + 7) / 8));
}

}  // namespace

std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9U;
  x = (x ^ x >> 27) * 0x94d049bb133111ebU;
  return x ^ x >> 31;
}

BitPattern signed_floats(DType dtype, int exponent) {
  const FloatBits& bits = dtype == DType::f32 ? kF32 : dtype == DType::f16 ? kF16 : kBf16;
  BitPattern pattern = positive_floats(bits, exponent);
  pattern.random |=
      in_each(bits.bits, std::uint64_t{1} << bits.mantissa | std::uint64_t{1} << (bits.bits - 1));
  return pattern;
}

void fill_random(std::span<std::uint64_t> words, const BitPattern& pattern, std::uint64_t seed,
                 int threads) {
  // A thread's start is worth it from about 1 MiB on.
  const auto used = static_cast<std::size_t>(
      std::clamp<std::int64_t>(static_cast<std::int64_t>(words.size() >> 17), 1, threads));
  run_together(static_cast<int>(used), [&](int thread) {
    const auto index = static_cast<std::size_t>(thread);
    const std::size_t begin = words.size() * index / used;
    const auto part = words.subspan(begin, words.size() * (index + 1) / used - begin);
    const std::uint64_t own = mix(seed) + index;
    if (pattern.e4m3) {
      fill_words<true>(part, pattern, own);
    } else {
      fill_words<false>(part, pattern, own);
    }
  });
}

RandomStack::RandomStack(const FormatSpec& spec, const WeightTensor& tensor)
    : spec_(spec), tensor_(tensor) {
  const std::int64_t scales = tensor.experts * scale_shape(tensor).count();
  const std::int64_t globals = tensor.experts * globals_per_expert(tensor);
  codes_ = words_for(format_info(tensor.format).bytes(tensor.experts * expert_stride_of(tensor)));
  scales_ = words_for(scales * bytes_per_scale(tensor.scales.type));
  if (spec.zero_points) zero_points_ = words_for(scales);
  global_ = words_for(globals * static_cast<std::int64_t>(sizeof(float)));
}

void RandomStack::fill(std::uint64_t seed, int threads) {
  fill_random(codes_, code_pattern(spec_.format), 4 * seed, threads);
  fill_random(scales_, scale_pattern(spec_.format, spec_.scales.type), 4 * seed + 1, threads);
  // 8 to 11: beside the middle of 0 to 15, as what is chosen for weights around zero.
  fill_random(zero_points_, {in_each(8, 3), in_each(8, 8)}, 4 * seed + 2, threads);
  fill_random(global_, positive_floats(kF32, kWeightExponent - code_exponent(spec_.format)),
              4 * seed + 3, threads);
  const std::span<const BlockFloat> floats = block_floats(spec_.format);
  if (floats.empty()) return;
  auto* const bytes = reinterpret_cast<std::uint8_t*>(codes_.data());
  const FormatInfo& info = format_info(spec_.format);
  const std::int64_t blocks = tensor_.experts * expert_stride_of(tensor_) / info.block_elements;
  for (std::int64_t i = 0; i < blocks; ++i) {
    for (const BlockFloat& one : floats) {
      std::uint8_t* const at = bytes + i * info.block_bytes + one.offset;
      std::uint16_t value = 0;
      std::memcpy(&value, at, sizeof value);
      value = static_cast<std::uint16_t>((value & one.random) | one.fixed);
      std::memcpy(at, &value, sizeof value);
    }
  }
}

WeightTensor RandomStack::view() const {
  WeightTensor result = tensor_;
  result.data = codes_.data();
  if (!scales_.empty()) result.scales.data = scales_.data();
  if (!zero_points_.empty()) {
    result.scales.zero_points = reinterpret_cast<const std::uint8_t*>(zero_points_.data());
  }
  if (!global_.empty()) result.scales.global = reinterpret_cast<const float*>(global_.data());
  return result;
}

WeightTensor RandomStack::view_without_data(std::int64_t experts) const {
  WeightTensor result = tensor_;
  result.experts = experts;
  // Whether there are some is said by an address, which nobody reads.
  if (spec_.zero_points) {
    result.scales.zero_points = reinterpret_cast<const std::uint8_t*>(zero_points_.data());
  }
  return result;
}

}  // namespace fusedmoe::tool
