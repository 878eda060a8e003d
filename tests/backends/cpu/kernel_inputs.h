// What the kernel tests have in common: which instruction sets run here, reproducible numbers, and
// comparisons bit by bit.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "backends/cpu/cpu_isa.h"
#include "backends/cpu/kernels/kernels.h"
#include "formats/float_bits.h"

namespace fusedmoe::cpu {

inline constexpr DType kDtypes[] = {DType::f32, DType::f16, DType::bf16};
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

// A test of one instruction set's row kernels, or of those that it takes from the sets below it;
// skipped, with a message, where the machine has not got it.
class IsaTest : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (!is_available(GetParam())) {
      GTEST_SKIP() << "this machine does not run " << to_string(GetParam());
    }
  }
  const RowKernels& kernels() const { return row_kernels(GetParam()); }
};

inline std::string isa_name(const testing::TestParamInfo<CpuIsa>& info) {
  return to_string(info.param);
}

#define FUSEDMOE_FOR_EVERY_ISA(suite)                                                           \
  INSTANTIATE_TEST_SUITE_P(Isa, suite, testing::ValuesIn(all_isas().begin(), all_isas().end()), \
                           isa_name)

inline std::uint32_t bits(float value) { return std::bit_cast<std::uint32_t>(value); }
inline std::vector<std::uint32_t> bits(const std::vector<float>& values) {
  std::vector<std::uint32_t> result;
  for (const float value : values) result.push_back(bits(value));
  return result;
}

// Elements of a dtype or an unquantised format, and back.
inline std::int64_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }
inline DType dtype_of(WeightFormat format) {
  return format == WeightFormat::f32   ? DType::f32
         : format == WeightFormat::f16 ? DType::f16
                                       : DType::bf16;
}
inline void store(void* data, DType dtype, std::int64_t index, float value) {
  auto* to = static_cast<char*>(data) + index * bytes_of(dtype);
  const std::uint16_t half = dtype == DType::f16 ? f32_to_f16(value) : f32_to_bf16(value);
  if (dtype == DType::f32) {
    std::memcpy(to, &value, 4);
  } else {
    std::memcpy(to, &half, 2);
  }
}
inline float load(const void* data, DType dtype, std::int64_t index) {
  const auto* from = static_cast<const char*>(data) + index * bytes_of(dtype);
  float single = 0;
  std::uint16_t half = 0;
  if (dtype == DType::f32) {
    std::memcpy(&single, from, 4);
    return single;
  }
  std::memcpy(&half, from, 2);
  return dtype == DType::f16 ? f16_to_f32(half) : bf16_to_f32(half);
}

// Numbers with a standard deviation of 1, rounded to a dtype.
inline std::vector<float> numbers(std::int64_t count, unsigned seed, DType dtype = DType::f32) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> result(static_cast<std::size_t>(count));
  for (float& value : result) {
    value = normal(random);
    char element[4];
    store(element, dtype, 0, value);
    value = load(element, dtype, 0);
  }
  return result;
}

inline std::vector<std::byte> encode(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> result(values.size() * static_cast<std::size_t>(bytes_of(dtype)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    store(result.data(), dtype, static_cast<std::int64_t>(i), values[i]);
  }
  return result;
}

}  // namespace fusedmoe::cpu
