// load_rows of every line of gemm_inputs(): what was loaded is what the kernels multiply, whatever
// order they keep it in. Each element is read back by multiplying with an identity.
#include <map>

#include "backends/cpu/float_environment.h"
#include "kernel_recipes.h"
#include "tested_kernels.h"

namespace fusedmoe::cpu {
namespace {

// For each line, the kernel that multiplies its inputs by weights that hold 1 exactly: of its own
// type, or int8.
std::vector<TestedKernel> one_per_inputs() {
  std::vector<TestedKernel> all;
  for (const GemmInputs& inputs : gemm_inputs()) {
    const auto kernels = tested_kernels();
    const auto fits = [&](const TestedKernel& kernel) {
      return kernel.inputs.load_rows == inputs.load_rows &&
             (kernel.integers() ? kernel.gemm.format == WeightFormat::int8
                                : kernel.plain() && dtype_of(kernel.gemm.format) == inputs.dtype);
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
  // f32 and a8 take rows of every dtype, others only their own.
  std::vector<DType> dtypes() const {
    const DType own = GetParam().row_dtype();
    if (own != DType::f32) return {own};
    return {std::begin(kDtypes), std::end(kDtypes)};
  }

  // What becomes of a row: itself, or in mode a8 its bytes times its scale.
  std::vector<float> loaded_row(const std::vector<float>& row) const {
    if (!GetParam().integers()) return row;
    const IntegerRow integers(row);
    std::vector<float> result;
    for (const float byte : integers.bytes) result.push_back(byte * integers.scale);
    return result;
  }

  // [rows][k]: elements k0 .. k0 + k of each row, through load_rows and the kernel.
  std::vector<float> read(const std::vector<const void*>& from, DType dtype, std::int64_t k0,
                          std::int64_t k) {
    const GemmInputs& inputs = GetParam().inputs;
    const auto rows = static_cast<int>(from.size());
    std::byte* loaded = loaded_.take(inputs.bytes(rows, k));
    const std::int64_t segment_k = GetParam().integers() ? 2048 : 0;
    std::vector<std::int32_t> row_sums(static_cast<std::size_t>(rows));
    std::vector<float> scales(static_cast<std::size_t>(rows), 1.0F);
    inputs.load_rows({from.data(), dtype, k0, k, rows, loaded, k0 + k, segment_k, row_sums.data(),
                      scales.data()});
    EXPECT_TRUE(loaded_.front_is_untouched());
    std::vector<float> result(static_cast<std::size_t>(rows * k));
    std::vector<float> sums(static_cast<std::size_t>(inputs.padded_rows(rows) * kPanelOutputs));
    for (std::int64_t first = 0; first < k; first += kPanelOutputs) {
      const Identity& panel = identity(k, first);
      const std::byte* bytes = panel.bytes.data();
      GetParam().gemm.run({loaded, rows, panel.format.codes(bytes, k, 0), k, bytes, sums.data(),
                           true, panel.format.segments_of(bytes, k, 0), row_sums.data()});
      for (int r = 0; r < rows; ++r) {
        for (std::int64_t n = 0; n < kPanelOutputs && first + n < k; ++n) {
          result[static_cast<std::size_t>(r * k + first + n)] =
              sums[static_cast<std::size_t>(r * kPanelOutputs + n)] *
              scales[static_cast<std::size_t>(r)];
        }
      }
    }
    return result;
  }

  LastBytes& source(int row) { return sources_[static_cast<std::size_t>(row)]; }

 private:
  struct Identity {
    PanelFormat format;
    std::vector<std::byte> bytes;
  };
  // A panel with a 1 at (first + n, n).
  const Identity& identity(std::int64_t k, std::int64_t first) {
    Identity& panel = identities_[{k, first}];
    if (!panel.bytes.empty()) return panel;
    const WeightFormat format = GetParam().gemm.format;
    WeightTensor tensor{
        .format = format, .experts = 1, .outputs = kPanelOutputs, .inputs = k, .scales = {}};
    const std::vector<float> ones(kPanelOutputs, 1.0F);
    if (GetParam().integers()) {
      tensor.scales = {.data = ones.data(), .layout = ScaleLayout::channel};
    }
    std::vector<std::byte> data(
        static_cast<std::size_t>(format_info(format).bytes(kPanelOutputs * k)));
    tensor.data = data.data();
    for (std::int64_t n = 0; n < kPanelOutputs && first + n < k; ++n) {
      format_info(format).encode(data.data(), tensor, 0, n, first + n, 1.0);
    }
    panel.format = panel_format(tensor, GetParam().gemm);
    panel.bytes.resize(static_cast<std::size_t>(panel.format.bytes(k)));
    pack_panel(outputs_of(tensor), panel.format, 0, k, panel.bytes.data());
    return panel;
  }

  LastBytes loaded_{GetParam().inputs.bytes(GetParam().inputs.max_rows, 300)};
  LastBytes sources_[3]{LastBytes(16384), LastBytes(16384), LastBytes(16384)};
  std::map<std::pair<std::int64_t, std::int64_t>, Identity> identities_;
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
          std::vector<float> wanted[3];
          for (int r = 0; r < 3; ++r) {
            for (std::int64_t i = 0; i < k0 + k; ++i) {
              wanted[r].push_back(values[static_cast<std::size_t>((i + 11 * r) % 140)]);
            }
            wanted[r] = loaded_row(wanted[r]);
          }
          for (std::int64_t i = 0; i < 3 * k; ++i) {
            const float want = wanted[i / k][static_cast<std::size_t>(k0 + i % k)];
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
    std::vector<float> values = numbers(most_rows * k, 4, dtype);
    const std::vector<std::byte> memory = encode(values, dtype);
    for (auto row = values.begin(); row != values.end(); row += k) {
      const std::vector<float> loaded = loaded_row({row, row + k});
      std::copy(loaded.begin(), loaded.end(), row);
    }
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
          const float exact = dtype == DType::f16 ? f16_to_f32(pattern) : bf16_to_f32(pattern);
          const float want = loaded_row({exact})[0];
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

// Sums of every segment, for codes with offsets and for a8: f32, or of bytes i32.
TEST_P(LoadRowsTest, SumsOfSegments) {
  const GemmInputs& inputs = GetParam().inputs;
  const bool blocked =
      GetParam().gemm.isa != CpuIsa::scalar && GetParam().gemm.isa != CpuIsa::avx2_fma;
  if (!blocked && !GetParam().integers()) {
    GTEST_SKIP() << "its kernels apply offsets to weights, not to sums";
  }
  const bool tiles = GetParam().gemm.isa >= CpuIsa::amx_bf16;
  for (const DType dtype : dtypes()) {
    for (const std::int64_t k : {1, 3, 4, 31, 64, 131, 300}) {
      for (const std::int64_t k0 : {0, 32}) {
        for (const std::int64_t segment_k : {4, 16, 32, 64, 100, 192, 256}) {
          // Offsets of shorter segments are in the weights (amx_decode.h).
          if (tiles && (segment_k % 64 != 0 || k0 % segment_k != 0)) continue;
          for (const int rows : {1, 2, 5, 12, 13, 40}) {
            const std::int64_t row_k = k0 + k;
            const std::vector<float> values = numbers(rows * row_k, 8, dtype);
            const std::vector<std::byte> memory = encode(values, dtype);
            std::vector<const void*> from;
            for (int r = 0; r < rows; ++r) from.push_back(&memory[r * row_k * bytes_of(dtype)]);
            const std::int64_t segments = (k + segment_k - 1) / segment_k;
            std::vector<std::byte> loaded(static_cast<std::size_t>(inputs.bytes(rows, k)));
            std::byte* sums = source(0).take(segments * rows * 4);
            std::vector<float> scales(static_cast<std::size_t>(rows));
            inputs.load_rows({from.data(), dtype, k0, k, rows, loaded.data(), row_k, segment_k,
                              sums, scales.data()});
            ASSERT_TRUE(source(0).front_is_untouched());
            for (int r = 0; r < rows; ++r) {
              std::vector<float> row(values.begin() + r * row_k, values.begin() + (r + 1) * row_k);
              if (GetParam().integers()) row = IntegerRow(row).bytes;
              for (std::int64_t s = 0; s < segments; ++s) {
                double want = 0, magnitude = 0;
                for (std::int64_t i = s * segment_k; i < std::min(k, (s + 1) * segment_k); ++i) {
                  want += static_cast<double>(row[static_cast<std::size_t>(k0 + i)]);
                  magnitude += std::abs(static_cast<double>(row[static_cast<std::size_t>(k0 + i)]));
                }
                const std::byte* at = sums + (s * rows + r) * 4;
                std::int32_t whole;
                float single;
                std::memcpy(&whole, at, 4);
                std::memcpy(&single, at, 4);
                const double got = GetParam().integers() ? static_cast<double>(whole)
                                                         : static_cast<double>(single);
                const double bound = GetParam().integers() ? 0.0 : magnitude * 256 * 0x1p-24;
                ASSERT_NEAR(got, want, bound)
                    << to_string(dtype) << " k " << k << " of " << segment_k << ", row " << r
                    << " of " << rows << ", segment " << s;
              }
            }
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
