// Every gemm of kernels.inc: against fp64, against its own recipe bit by bit where that is fp32,
// and what the recipe promises: no influence of the number of rows, of the split of K, or of a
// row's neighbours.
#include <algorithm>
#include <optional>
#include <set>

#include "tested_kernels.h"

namespace fusedmoe::cpu {
namespace {

constexpr std::int64_t kMaxK = 600;

class GemmKernels : public TestedKernelTest {
 protected:
  const GemmInputs& inputs() const { return GetParam().inputs; }
  // Around every tile's height: 3, 12 and 16 rows, two tiles of 16, and the most at once.
  std::vector<int> rows() const {
    std::vector<int> all;
    for (int rows = 1; rows <= 26; ++rows) all.push_back(rows);
    for (const int rows : {31, 32, 33, 47, 48, 49, 63, 65, 95, 96, 97, 255, 256}) {
      if (rows <= inputs().max_rows) all.push_back(rows);
    }
    return all;
  }
};

// Every k at first, then around the edges of the kernels' own pieces.
std::vector<std::int64_t> lengths() {
  std::vector<std::int64_t> all;
  for (std::int64_t k = 1; k <= 130; ++k) all.push_back(k);
  for (const std::int64_t k : {159, 193, 255, 256, 257, 287, 289, 511, 512, 513, 545, 600}) {
    all.push_back(k);
  }
  return all;
}

// One step of a recipe in fp32, by its text; nothing for recipes of another arithmetic.
std::optional<float> step(const std::string& recipe, float x, float w, float sum) {
  if (recipe == "fp32 fused multiply-add") return std::fma(x, w, sum);
  if (recipe == "fp32 multiply, then add") {
    const volatile float product = x * w;
    return sum + product;
  }
  EXPECT_TRUE(recipe == "vdpbf16ps, k pairs ascending" ||
              recipe == "tdpbf16ps, steps of 32 k ascending")
      << "a recipe that this test does not know: " << recipe;
  return std::nullopt;
}

TEST_P(GemmKernels, MatchFp64AndTheirRecipeForEveryKAndEveryNumberOfRows) {
  const int most_rows = inputs().max_rows;
  const Product in(GetParam(), most_rows, kMaxK);
  GemmRunner runner(GetParam(), kMaxK);
  const std::string text = GetParam().gemm.recipe;
  const bool by_bits = step(text, 1, 1, 0).has_value();
  std::vector<double> exact(most_rows * kPanelOutputs), magnitude(exact.size());
  std::vector<float> recipe(exact.size());
  std::int64_t done = 0;
  std::size_t turn = 0;
  for (const std::int64_t k : lengths()) {
    for (; done < k; ++done) {
      for (int r = 0; r < most_rows; ++r) {
        const float x = in.x[r * kMaxK + done];
        for (int n = 0; n < kPanelOutputs; ++n) {
          const float w = in.w[done * kPanelOutputs + n];
          const int i = r * kPanelOutputs + n;
          exact[i] += static_cast<double>(x) * static_cast<double>(w);
          magnitude[i] += std::abs(static_cast<double>(x) * static_cast<double>(w));
          if (by_bits) recipe[i] = *step(text, x, w, recipe[i]);
        }
      }
    }
    // Every k with some number of rows, some k with every number.
    std::vector<int> counts = rows();
    if (k != 1 && k != 31 && k != 33 && k != 65 && k != 257 && k != kMaxK) {
      counts = {counts[turn++ * 7 % counts.size()]};
    }
    for (const int count : counts) {
      const std::vector<float> got = runner.run(in, 0, count, k);
      for (std::size_t i = 0; i < got.size(); ++i) {
        // One rounding per product, and two where even and odd k come together.
        const double bound = static_cast<double>(k + 2) * 0x1p-24 * magnitude[i] + 1e-30;
        ASSERT_NEAR(static_cast<double>(got[i]), exact[i], bound) << count << " x " << k;
        if (!by_bits) continue;
        ASSERT_EQ(bits(got[i]), bits(recipe[i])) << count << " x " << k << ", element " << i;
      }
    }
  }
}

TEST_P(GemmKernels, ASplitOfKGivesTheSameBits) {
  const int most_rows = inputs().max_rows;
  const std::int64_t multiple = inputs().panel.k_multiple;
  const Product in(GetParam(), most_rows, kMaxK);
  GemmRunner runner(GetParam(), kMaxK);
  for (const std::int64_t k : {2, 7, 64, 257, 331, 600}) {
    for (const int rows : {1, 2, 3, 5, 17, 33, 47, most_rows}) {
      const std::vector<float> whole = runner.run(in, 0, rows, k);
      for (const std::int64_t at : {std::int64_t{1}, k / 3 + 1, k - 1}) {
        const std::int64_t end = at / multiple * multiple;
        if (end == 0) continue;
        ASSERT_EQ(bits(runner.run(in, 0, rows, k, {end})), bits(whole))
            << rows << " x " << k << " at " << end;
        if (end + multiple >= k) continue;
        ASSERT_EQ(bits(runner.run(in, 0, rows, k, {end, end + multiple})), bits(whole))
            << rows << " x " << k << " at " << end << " and one further";
      }
    }
  }
}

TEST_P(GemmKernels, ARowsBitsDoNotDependOnItsNeighbours) {
  const int most_rows = inputs().max_rows;
  const std::int64_t k = 131;
  const Product in(GetParam(), most_rows, k);
  GemmRunner runner(GetParam(), k);
  std::vector<std::uint32_t> alone;
  for (int r = 0; r < most_rows; ++r) {
    for (const float value : runner.run(in, r, 1, k)) alone.push_back(bits(value));
  }
  const auto expect_alone = [&](const std::vector<float>& got, int first) {
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(bits(got[i]), alone[static_cast<std::size_t>(first * kPanelOutputs) + i])
          << "row " << i / kPanelOutputs << " from " << first << " of "
          << got.size() / kPanelOutputs;
    }
  };
  for (const int count : rows()) {
    expect_alone(runner.run(in, 0, count, k), 0);
    expect_alone(runner.run(in, most_rows - count, count, k), most_rows - count);
    if (HasFatalFailure()) return;
  }
  // All neighbours NaN.
  for (const int kept : {0, 1, 2, 15, 16, 24, most_rows / 2, most_rows - 1}) {
    Product other = in;
    for (int r = 0; r < most_rows; ++r) {
      for (std::int64_t i = 0; i < k && r != kept; ++i) other.x_at(r, i) = kNaN;
    }
    const std::vector<float> got = runner.run(other, 0, most_rows, k);
    for (int i = 0; i < most_rows * kPanelOutputs; ++i) {
      if (i / kPanelOutputs == kept) {
        ASSERT_EQ(bits(got[i]), alone[i]) << "row " << kept;
      } else {
        ASSERT_TRUE(std::isnan(got[i]));
      }
    }
  }
}

TEST_P(GemmKernels, NaNAndInfinityStayInTheirRowAndColumn) {
  for (const int rows : {7, 20, 37}) {
    const std::int64_t k = 65;
    const Product clean(GetParam(), rows, k);
    GemmRunner runner(GetParam(), k);
    const std::vector<float> before = runner.run(clean, 0, rows, k);
    const int row = rows - 4;
    for (const std::int64_t place : {40, 64}) {
      for (const float bad : {kNaN, kInf, -kInf}) {
        Product in = clean;
        in.x_at(row, place) = bad;
        in.w_at(place - 7, 17) = bad;
        const std::vector<float> got = runner.run(in, 0, rows, k);
        for (int i = 0; i < rows * kPanelOutputs; ++i) {
          if (i / kPanelOutputs != row && i % kPanelOutputs != 17) {
            ASSERT_EQ(bits(got[i]), bits(before[i])) << i;
          } else {
            ASSERT_FALSE(std::isfinite(got[i])) << i;
            ASSERT_TRUE(!std::isnan(bad) || std::isnan(got[i]));
          }
        }
      }
    }
    // 0 * infinity is NaN, in every format.
    Product in = clean;
    for (int r = 0; r < rows; ++r) in.x_at(r, 50) = 0;
    in.w_at(50, 31) = kInf;
    const std::vector<float> got = runner.run(in, 0, rows, k);
    for (int r = 0; r < rows; ++r) ASSERT_TRUE(std::isnan(got[r * kPanelOutputs + 31]));
  }
}

INSTANTIATE_TEST_SUITE_P(Table, GemmKernels, testing::ValuesIn(tested_kernels()), tested_name);

// A kernel exists only with its line, and a line only with its test.
TEST(GemmRegistry, EveryLineOfTheTableIsTested) {
  std::set<std::string> tested;
  const auto& unit = *testing::UnitTest::GetInstance();
  for (int s = 0; s < unit.total_test_suite_count(); ++s) {
    const auto& suite = *unit.GetTestSuite(s);
    if (suite.name() != std::string("Table/GemmKernels")) continue;
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const std::string name = suite.GetTestInfo(t)->name();
      if (name.rfind("MatchFp64", 0) == 0) tested.insert(name.substr(name.find('/') + 1));
    }
  }
  for (const GemmKernel& kernel : gemm_kernels()) {
    EXPECT_EQ(tested.count(kernel.name), 1U) << kernel.name << " has no test";
  }
  EXPECT_EQ(tested.count("gemm_amx_model_bf16"), 1U);
}

// The same recipe is the same bits, whatever the instruction set and the format that held a value.
TEST(GemmRecipes, EqualTextIsEqualBits) {
  // Numbers of 6 bits below 1: exact in every unquantised format.
  std::mt19937 random(5);
  const auto short_numbers = [&random](std::vector<float>& values) {
    for (float& value : values) value = (static_cast<float>(random() % 127) - 63) / 64;
  };
  int pairs = 0;
  for (const TestedKernel& one : tested_kernels()) {
    for (const TestedKernel& other : tested_kernels()) {
      if (std::string(one.gemm.recipe) != other.gemm.recipe) continue;
      if (one.gemm.name == other.gemm.name || !one.available || !other.available) continue;
      Product in(one, 48, 333);
      short_numbers(in.w);
      for (const int rows : {1, 2, 3, 8, 48}) {
        ASSERT_EQ(bits(GemmRunner(one, 333).run(in, 0, rows, 333)),
                  bits(GemmRunner(other, 333).run(in, 0, rows, 333)))
            << one.gemm.name << " and " << other.gemm.name;
      }
      ++pairs;
    }
  }
  EXPECT_GE(pairs, 6);
}

}  // namespace
}  // namespace fusedmoe::cpu
