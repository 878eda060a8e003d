// Every gemm of kernels.inc: against fp64, against its own recipe bit by bit, and what the recipe
// promises: no influence of the number of rows, of the split of K, or of a row's neighbours.
#include <algorithm>

#include "kernel_inputs.h"

namespace fusedmoe::cpu {
namespace {

constexpr int kMaxRows = 50;
constexpr std::int64_t kMaxK = 600;

class GemmKernels : public testing::TestWithParam<GemmKernel> {
 protected:
  void SetUp() override {
    if (!is_available(GetParam().isa)) {
      GTEST_SKIP() << "this machine does not run " << to_string(GetParam().isa);
    }
  }
};

struct Inputs {
  std::int64_t a_stride = kMaxK + 3;
  std::vector<float> a;       // [kMaxRows][a_stride], NaN behind each row
  std::vector<float> values;  // [kMaxK][32]
  std::vector<std::byte> panel;

  explicit Inputs(WeightFormat format)
      : a(kMaxRows * a_stride, kNaN), values(numbers(kMaxK * kPanelOutputs, 1, dtype_of(format))) {
    const std::vector<float> x = numbers(kMaxRows * kMaxK, 2);
    for (int r = 0; r < kMaxRows; ++r) {
      std::copy_n(x.begin() + r * kMaxK, kMaxK, a.begin() + r * a_stride);
    }
    panel = encode(values, dtype_of(format));
  }
};

// accumulators[rows][32] over k0 .. k0 + k, started at zero when k0 is 0.
void run(const GemmKernel& kernel, const Inputs& in, int first_row, int rows, std::int64_t k0,
         std::int64_t k, float* accumulators) {
  const std::int64_t element = bytes_of(dtype_of(kernel.format));
  // Exactly as many weights as the kernel may read.
  const auto* from = in.panel.data() + k0 * kPanelOutputs * element;
  const std::vector<std::byte> panel(from, from + k * kPanelOutputs * element);
  kernel.run({in.a.data() + first_row * in.a_stride + k0, in.a_stride, rows, panel.data(), k,
              accumulators, k0 == 0});
}

std::vector<float> run(const GemmKernel& kernel, const Inputs& in, int rows, std::int64_t k) {
  // NaN before, and one row more, which must stay.
  std::vector<float> accumulators((rows + 1) * kPanelOutputs, kNaN);
  run(kernel, in, 0, rows, 0, k, accumulators.data());
  for (int n = 0; n < kPanelOutputs; ++n) {
    EXPECT_TRUE(std::isnan(accumulators[rows * kPanelOutputs + n])) << "beyond the last row";
  }
  accumulators.resize(rows * kPanelOutputs);
  return accumulators;
}

// One step of a kernel's recipe, by its text.
float step(const GemmKernel& kernel, float x, float w, float sum) {
  const std::string recipe = kernel.recipe;
  if (recipe == "fp32 fused multiply-add") return std::fma(x, w, sum);
  EXPECT_EQ(recipe, "fp32 multiply, then add") << "a recipe that this test does not know";
  const volatile float product = x * w;
  return sum + product;
}

TEST_P(GemmKernels, MatchFp64AndTheirRecipeForEveryKAndEveryNumberOfRows) {
  const GemmKernel& kernel = GetParam();
  const Inputs in(kernel.format);
  std::vector<double> exact(kMaxRows * kPanelOutputs), magnitude(exact.size());
  std::vector<float> recipe(exact.size());
  for (std::int64_t k = 1; k <= kMaxK; ++k) {
    for (int r = 0; r < kMaxRows; ++r) {
      const float x = in.a[r * in.a_stride + k - 1];
      for (int n = 0; n < kPanelOutputs; ++n) {
        const float w = in.values[(k - 1) * kPanelOutputs + n];
        const int i = r * kPanelOutputs + n;
        exact[i] += static_cast<double>(x) * static_cast<double>(w);
        magnitude[i] += std::abs(static_cast<double>(x) * static_cast<double>(w));
        recipe[i] = step(kernel, x, w, recipe[i]);
      }
    }
    // Every k with some number of rows, some k with every number.
    const bool all = k <= 3 || k == 31 || k == 33 || k == 256 || k == 257 || k == kMaxK;
    const int some = static_cast<int>(1 + k * 37 % kMaxRows);
    for (int rows = all ? 1 : some; rows <= (all ? kMaxRows : some); ++rows) {
      const std::vector<float> got = run(kernel, in, rows, k);
      for (std::size_t i = 0; i < got.size(); ++i) {
        const double bound = static_cast<double>(k + 1) * 0x1p-24 * magnitude[i] + 1e-30;
        ASSERT_NEAR(static_cast<double>(got[i]), exact[i], bound) << rows << " x " << k;
        ASSERT_EQ(bits(got[i]), bits(recipe[i])) << rows << " x " << k << ", element " << i;
      }
    }
  }
}

TEST_P(GemmKernels, ASplitOfKGivesTheSameBits) {
  const GemmKernel& kernel = GetParam();
  const Inputs in(kernel.format);
  for (const std::int64_t k : {2, 7, 64, 257}) {
    for (const int rows : {1, 2, 3, 5, 47}) {
      const std::vector<float> whole = run(kernel, in, rows, k);
      for (const std::int64_t at : {std::int64_t{1}, k / 3 + 1, k - 1}) {
        std::vector<float> parts(rows * kPanelOutputs, kNaN);
        run(kernel, in, 0, rows, 0, at, parts.data());
        run(kernel, in, 0, rows, at, k - at, parts.data());
        ASSERT_EQ(bits(parts), bits(whole)) << rows << " x " << k << " at " << at;
      }
    }
  }
}

TEST_P(GemmKernels, ARowsBitsDoNotDependOnItsNeighbours) {
  const GemmKernel& kernel = GetParam();
  Inputs in(kernel.format);
  const std::int64_t k = 131;
  const std::vector<float> together = run(kernel, in, kMaxRows, k);
  for (int r = 0; r < kMaxRows; ++r) {
    std::vector<float> alone(kPanelOutputs, kNaN);
    run(kernel, in, r, 1, 0, k, alone.data());
    ASSERT_TRUE(std::equal(alone.begin(), alone.end(), together.begin() + r * kPanelOutputs,
                           [](float a, float b) { return bits(a) == bits(b); }))
        << "row " << r;
  }
  // All neighbours NaN.
  for (const int kept : {0, 1, 2, 24, 48, 49}) {
    Inputs other = in;
    for (int r = 0; r < kMaxRows; ++r) {
      if (r != kept) std::fill_n(other.a.begin() + r * in.a_stride, k, kNaN);
    }
    const std::vector<float> got = run(kernel, other, kMaxRows, k);
    for (int i = 0; i < kMaxRows * kPanelOutputs; ++i) {
      if (i / kPanelOutputs == kept) {
        ASSERT_EQ(bits(got[i]), bits(together[i])) << "row " << kept;
      } else {
        ASSERT_TRUE(std::isnan(got[i]));
      }
    }
  }
}

TEST_P(GemmKernels, NaNAndInfinityStayInTheirRowAndColumn) {
  const GemmKernel& kernel = GetParam();
  const Inputs clean(kernel.format);
  const std::int64_t k = 65;
  const std::vector<float> before = run(kernel, clean, 7, k);
  for (const float bad : {kNaN, kInf, -kInf}) {
    Inputs in = clean;
    in.a[3 * in.a_stride + 40] = bad;
    store(in.panel.data(), dtype_of(kernel.format), 50 * kPanelOutputs + 17, bad);
    const std::vector<float> got = run(kernel, in, 7, k);
    for (int r = 0; r < 7; ++r) {
      for (int n = 0; n < kPanelOutputs; ++n) {
        const int i = r * kPanelOutputs + n;
        if (r != 3 && n != 17) {
          ASSERT_EQ(bits(got[i]), bits(before[i])) << r << " " << n;
        } else {
          ASSERT_FALSE(std::isfinite(got[i])) << r << " " << n;
          ASSERT_TRUE(!std::isnan(bad) || std::isnan(got[i]));
        }
      }
    }
  }
  // 0 * infinity is NaN, in every format.
  Inputs in = clean;
  for (int r = 0; r < 7; ++r) in.a[r * in.a_stride + 50] = 0;
  store(in.panel.data(), dtype_of(kernel.format), 50 * kPanelOutputs + 31, kInf);
  const std::vector<float> got = run(kernel, in, 7, k);
  for (int r = 0; r < 7; ++r) ASSERT_TRUE(std::isnan(got[r * kPanelOutputs + 31]));
}

std::string kernel_name(const testing::TestParamInfo<GemmKernel>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(Table, GemmKernels,
                         testing::ValuesIn(gemm_kernels().begin(), gemm_kernels().end()),
                         kernel_name);

// The same recipe is the same bits, whatever the instruction set and the format that held a value.
TEST(GemmRecipes, EqualTextIsEqualBits) {
  // Numbers of 6 bits below 1: exact in every unquantised format.
  std::mt19937 random(5);
  std::vector<float> values(kMaxK * kPanelOutputs);
  for (float& value : values) value = (static_cast<float>(random() % 127) - 63) / 64;
  int pairs = 0;
  for (const GemmKernel& one : gemm_kernels()) {
    for (const GemmKernel& other : gemm_kernels()) {
      if (std::string(one.recipe) != other.recipe || one.name == other.name) continue;
      if (!is_available(one.isa) || !is_available(other.isa)) continue;
      Inputs in_one(one.format), in_other(other.format);
      in_one.panel = encode(values, dtype_of(one.format));
      in_other.panel = encode(values, dtype_of(other.format));
      for (const int rows : {1, 2, 3, 8}) {
        ASSERT_EQ(bits(run(one, in_one, rows, 333)), bits(run(other, in_other, rows, 333)))
            << one.name << " and " << other.name;
      }
      ++pairs;
    }
  }
  EXPECT_GE(pairs, 6);
}

}  // namespace
}  // namespace fusedmoe::cpu
