// load_rows of every line of gemm_inputs(): what was loaded is what the kernels multiply, whatever
// order they keep it in. Each element is read back by multiplying with an identity.
#include <map>

#include "backends/cpu/float_environment.h"
#include "tested_kernels.h"

namespace fusedmoe::cpu {
namespace {

// For each line, the kernel that multiplies its inputs by weights that hold 1 exactly.
std::vector<TestedKernel> one_per_inputs() {
  std::vector<TestedKernel> all;
  for (const GemmInputs& inputs : gemm_inputs()) {
    const auto kernels = tested_kernels();
    const auto fits = [&](const TestedKernel& kernel) {
      return kernel.inputs.load_rows == inputs.load_rows &&
             dtype_of(kernel.gemm.format) == inputs.dtype;
    };
    // The last: of AMX's, the one on the model.
    all.push_back(*std::find_if(kernels.rbegin(), kernels.rend(), fits));
  }
  return all;
}

std::string inputs_name(const testing::TestParamInfo<TestedKernel>& info) {
  return std::string(to_string(info.param.inputs.isa)) + "_" + to_string(info.param.inputs.dtype);
}

class LoadRowsTest : public TestedKernelTest {
 protected:
  // f32 takes rows of every dtype, others only their own.
  std::vector<DType> dtypes() const {
    const DType own = GetParam().inputs.dtype;
    if (own != DType::f32) return {own};
    return {std::begin(kDtypes), std::end(kDtypes)};
  }

  // [rows][k]: elements k0 .. k0 + k of each row, through load_rows and the kernel.
  std::vector<float> read(const std::vector<const void*>& from, DType dtype, std::int64_t k0,
                          std::int64_t k) {
    const GemmInputs& inputs = GetParam().inputs;
    const auto rows = static_cast<int>(from.size());
    std::byte* loaded = loaded_.take(inputs.bytes(rows, k));
    inputs.load_rows({from.data(), dtype, k0, k, rows, loaded});
    EXPECT_TRUE(loaded_.front_is_untouched());
    std::vector<float> result(static_cast<std::size_t>(rows * k));
    std::vector<float> sums(static_cast<std::size_t>(inputs.padded_rows(rows) * kPanelOutputs));
    for (std::int64_t first = 0; first < k; first += kPanelOutputs) {
      const std::vector<std::byte>& panel = identity(k, first);
      GetParam().gemm.run({loaded, rows, panel.data(), k, panel.data(), sums.data(), true});
      for (int r = 0; r < rows; ++r) {
        for (std::int64_t n = 0; n < kPanelOutputs && first + n < k; ++n) {
          result[static_cast<std::size_t>(r * k + first + n)] =
              sums[static_cast<std::size_t>(r * kPanelOutputs + n)];
        }
      }
    }
    return result;
  }

  LastBytes& source(int row) { return sources_[static_cast<std::size_t>(row)]; }

 private:
  // A panel with a 1 at (first + n, n).
  const std::vector<std::byte>& identity(std::int64_t k, std::int64_t first) {
    std::vector<std::byte>& panel = identities_[{k, first}];
    if (!panel.empty()) return panel;
    const PanelLayout& layout = GetParam().inputs.panel;
    const DType dtype = dtype_of(GetParam().gemm.format);
    panel.resize(static_cast<std::size_t>(layout.padded(k) * kPanelOutputs * bytes_of(dtype)));
    for (std::int64_t n = 0; n < kPanelOutputs && first + n < k; ++n) {
      const std::int64_t i = first + n;
      store(panel.data(), dtype,
            (i / layout.k_group * kPanelOutputs + n) * layout.k_group + i % layout.k_group, 1.0F);
    }
    return panel;
  }

  LastBytes loaded_{GetParam().inputs.bytes(GetParam().inputs.max_rows, 300)};
  LastBytes sources_[3]{LastBytes(4096), LastBytes(4096), LastBytes(4096)};
  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<std::byte>> identities_;
};

// Three rows at addresses of their own, each ending where its memory ends.
TEST_P(LoadRowsTest, EveryLengthOffsetAndAddress) {
  for (const DType dtype : dtypes()) {
    const std::vector<float> values = numbers(140, 3, dtype);
    const std::int64_t element = bytes_of(dtype);
    for (std::int64_t k = 1; k <= 100; ++k) {
      for (const std::int64_t k0 : {0, 1, 7, 64}) {
        if (k0 % GetParam().inputs.panel.k_multiple != 0) continue;
        for (const std::int64_t behind : {0, 1, 5}) {  // elements of another row
          std::vector<const void*> from;
          for (int r = 0; r < 3; ++r) {
            std::byte* at = source(r).take((k0 + k + behind) * element);
            for (std::int64_t i = 0; i < k0 + k; ++i) {
              store(at, dtype, i, values[static_cast<std::size_t>((i + 11 * r) % 140)]);
            }
            from.push_back(at);
          }
          const std::vector<float> got = read(from, dtype, k0, k);
          for (std::int64_t i = 0; i < 3 * k; ++i) {
            const auto want = values[static_cast<std::size_t>((k0 + i % k + 11 * (i / k)) % 140)];
            ASSERT_EQ(bits(got[static_cast<std::size_t>(i)]), bits(want))
                << to_string(dtype) << " k0 " << k0 << " k " << k << " at " << i / k << ", "
                << i % k;
          }
        }
      }
    }
  }
}

// Every number of rows: rows go to their own places.
TEST_P(LoadRowsTest, EveryNumberOfRows) {
  const int most_rows = GetParam().inputs.max_rows;
  for (const DType dtype : dtypes()) {
    const std::int64_t k = 41;
    const std::vector<float> values = numbers(most_rows * k, 4, dtype);
    const std::vector<std::byte> memory = encode(values, dtype);
    for (int rows = 1; rows <= most_rows; rows += rows < 40 ? 1 : 23) {
      std::vector<const void*> from;
      for (int r = 0; r < rows; ++r) from.push_back(memory.data() + r * k * bytes_of(dtype));
      const std::vector<float> got = read(from, dtype, 0, k);
      for (std::size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(bits(got[i]), bits(values[i])) << rows << " rows, at " << i;
      }
    }
  }
}

// All 65536 bit patterns: subnormals, infinities and NaN among them, in vector bodies and in tails.
// Each has a row of its own, since infinity times the identity's zeros is NaN.
// Under the settings of a call: subnormals of bf16, which fp32 has, too, may count as zero; those
// of f16 are numbers.
TEST_P(LoadRowsTest, EveryPatternOfTheHalfTypes) {
  const FloatEnvironment environment;
  const int rows = GetParam().inputs.max_rows;
  for (const DType dtype : dtypes()) {
    if (dtype == DType::f32) continue;
    const bool flushes = dtype == DType::bf16;
    for (const std::int64_t k : {1, 35}) {
      for (int first = 0; first < 65536; first += rows) {
        std::vector<std::uint16_t> memory(static_cast<std::size_t>(rows * k));
        std::vector<const void*> from;
        for (int r = 0; r < rows; ++r) {
          memory[static_cast<std::size_t>(r * k + (first + r) % k)] =
              static_cast<std::uint16_t>(first + r);
          from.push_back(memory.data() + r * k);
        }
        const std::vector<float> got = read(from, dtype, 0, k);
        for (int r = 0; r < rows && first + r < 65536; ++r) {
          const auto pattern = static_cast<std::uint16_t>(first + r);
          const float want = dtype == DType::f16 ? f16_to_f32(pattern) : bf16_to_f32(pattern);
          const float value = got[static_cast<std::size_t>(r * k + (first + r) % k)];
          if (std::isnan(want)) {
            ASSERT_TRUE(std::isnan(value)) << pattern;
          } else if (flushes && (pattern & 0x7f80) == 0) {
            ASSERT_EQ(bits(value) & 0x7fffffff & ~bits(want), 0U) << pattern;  // it, or zero
          } else {
            ASSERT_EQ(value, want) << to_string(dtype) << " " << pattern;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Inputs, LoadRowsTest, testing::ValuesIn(one_per_inputs()), inputs_name);

TEST(LoadRowsRegistry, EveryLineOfTheTableIsTested) {
  EXPECT_EQ(one_per_inputs().size(), gemm_inputs().size());
}

}  // namespace
}  // namespace fusedmoe::cpu
