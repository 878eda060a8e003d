// Every gemm of kernels.inc, with every way of scaling its format: against fp64, against its own
// recipe bit by bit where that is fp32, and what the recipe promises: no influence of the number of
// rows, of the split of K, or of a row's neighbours.
#include <algorithm>
#include <set>

#include "kernel_recipes.h"
#include "tested_kernels.h"

namespace fusedmoe::cpu {
namespace {

constexpr std::int64_t kMaxK = 600;

class GemmKernels : public TestedKernelTest {
 protected:
  const GemmInputs& inputs() const { return GetParam().inputs; }
  std::int64_t most_k() const { return GetParam().blocks() ? 768 : kMaxK; }
  // Every number up to 40, then around every tile's height, and the most at once.
  std::vector<int> rows() const {
    std::vector<int> all;
    for (int rows = 1; rows <= 40; ++rows) all.push_back(rows);
    for (const int rows : {47, 48, 49, 63, 65, 95, 96, 97, 255, 256}) {
      if (rows <= inputs().max_rows) all.push_back(rows);
    }
    return all;
  }
  // Of the rows of one block: some within every tile, and the most.
  std::vector<int> some_rows() const { return {1, 2, 3, 5, 12, 13, 17, 33, inputs().max_rows}; }
  // Every k at first, then around the edges of the kernels' own pieces. With scales, around the
  // ends of groups.
  std::vector<std::int64_t> lengths() const {
    if (GetParam().blocks()) return {256, 512, 768};
    std::vector<std::int64_t> all;
    const std::int64_t every = GetParam().plain() ? 130 : 10;
    for (std::int64_t k = 1; k <= every; ++k) all.push_back(k);
    if (!GetParam().plain()) {
      for (const std::int64_t k : {15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 101, 131}) {
        all.push_back(k);
      }
    }
    for (const std::int64_t k : {159, 193, 255, 256, 257, 287, 301, 511, 512, 513, 545, 600}) {
      all.push_back(k);
    }
    return all;
  }
  // With these, every number of rows.
  static bool is_special(std::int64_t k) { return k == 33 || k == 257 || k == 512; }

  template <class F>
  void for_each_scaling(const F& f) const {
    for (const test::FormatCase& scaling : scalings(GetParam())) {
      SCOPED_TRACE(scaling.name);
      f(scaling);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
};

TEST_P(GemmKernels, MatchFp64AndTheirRecipeForEveryKAndEveryNumberOfRows) {
  for_each_scaling([&](const test::FormatCase& scaling) {
    const int most_rows = inputs().max_rows;
    const Product in(GetParam(), scaling, most_rows, most_k());
    GemmRunner runner(GetParam(), most_k());
    std::size_t turn = 0;
    for (const std::int64_t k : lengths()) {
      const PanelWeights::Cut cut(in.w, k);
      const Terms w(cut.tensor(), GetParam().gemm);
      std::vector<int> counts = rows();
      if (!is_special(k)) counts = {counts[turn++ * 7 % counts.size()]};
      std::vector<double> exact, bound;
      std::vector<float> recipe;
      for (int r = 0; r < counts.back(); ++r) {
        std::vector<float> x(in.x.begin() + r * most_k(), in.x.begin() + r * most_k() + k);
        float row_scale = 1.0F;
        if (GetParam().integers()) {
          IntegerRow integers(x);
          x = integers.bytes;
          row_scale = integers.scale;
        }
        const auto expected = by_recipe(GetParam().gemm.recipe, w, x);
        for (int n = 0; n < kPanelOutputs; ++n) {
          double sum = 0, magnitude = 0;
          for (std::int64_t i = 0; i < k; ++i) {
            const auto at = static_cast<std::size_t>(i * kPanelOutputs + n);
            const auto value = static_cast<double>(x[static_cast<std::size_t>(i)]);
            sum += value * w.weight[at];
            // With offsets, the larger of the two parts of a weight.
            double size = std::abs(w.weight[at]);
            if (w.segment_k != 0) {
              const auto s = static_cast<std::size_t>(i / w.segment_k * kPanelOutputs + n);
              size = std::max(size, static_cast<double>(std::abs(w.code[at] * w.scale[s])) +
                                        static_cast<double>(std::abs(w.offset[s])));
            }
            magnitude += std::abs(value) * size;
          }
          exact.push_back(sum * static_cast<double>(row_scale));
          // One rounding per product, two where even and odd k come together, some per segment.
          // Of weights that become bf16 again, one of each, too.
          const bool rounded = std::string(GetParam().gemm.recipe).find("weights scaled to bf16") !=
                               std::string::npos;
          const double each = static_cast<double>(2 * k + 8) * 0x1p-24 + (rounded ? 0x1p-8 : 0.0);
          bound.push_back(each * magnitude * static_cast<double>(row_scale) + 1e-30);
          if (expected) recipe.push_back((*expected)[static_cast<std::size_t>(n)] * row_scale);
        }
      }
      for (const int count : counts) {
        const std::vector<float> got = runner.run(in, 0, count, k);
        for (std::size_t i = 0; i < got.size(); ++i) {
          ASSERT_NEAR(static_cast<double>(got[i]), exact[i], bound[i])
              << count << " x " << k << ", element " << i;
          if (recipe.empty()) continue;
          ASSERT_EQ(bits(got[i]), bits(recipe[i])) << count << " x " << k << ", element " << i;
        }
      }
    }
  });
}

// The factors that a kernel takes from its record and from the epilogue are the format's.
TEST_P(GemmKernels, TermsAreTheFormatsWeights) {
  for_each_scaling([&](const test::FormatCase& scaling) {
    const Product in(GetParam(), scaling, 1, most_k());
    for (const std::int64_t k : {std::int64_t{30}, std::int64_t{257}, most_k()}) {
      const std::int64_t cut_k = scaling.k(k);
      const PanelWeights::Cut cut(in.w, cut_k);
      const Terms w(cut.tensor(), GetParam().gemm);
      for (std::int64_t i = 0; i < cut_k; ++i) {
        for (int n = 0; n < kPanelOutputs; ++n) {
          const auto at = static_cast<std::size_t>(i * kPanelOutputs + n);
          double expected = static_cast<double>(w.code[at]);
          double size = std::abs(expected);
          if (w.segment_k != 0) {
            const auto s = static_cast<std::size_t>(i / w.segment_k * kPanelOutputs + n);
            expected *= static_cast<double>(w.scale[s]);
            size = std::abs(expected) + std::abs(static_cast<double>(w.offset[s]));
            expected += static_cast<double>(w.offset[s]);
          }
          ASSERT_NEAR(w.weight[at], expected, size * 0x1p-22) << n << ", " << i;
          ASSERT_NEAR(in.w.value(n, i) / static_cast<double>(w.column[static_cast<std::size_t>(n)]),
                      w.weight[at], size * 0x1p-22)
              << "cut to " << cut_k << " at " << n << ", " << i;
        }
      }
    }
  });
}

TEST_P(GemmKernels, ASplitOfKGivesTheSameBits) {
  for_each_scaling([&](const test::FormatCase& scaling) {
    const int most_rows = inputs().max_rows;
    const Product in(GetParam(), scaling, most_rows, most_k());
    GemmRunner runner(GetParam(), most_k());
    for (const std::int64_t about : {2, 7, 64, 257, 331, 600}) {
      const std::int64_t k = scaling.k(about);
      const PanelWeights::Cut cut(in.w, k);
      const std::int64_t multiple = panel_format(cut.tensor(), GetParam().gemm).period();
      for (const int rows : {1, 2, 3, 5, 17, 33, 47, most_rows}) {
        if (!GetParam().plain() && (rows == 2 || rows == 5 || rows == 33)) continue;
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
  });
}

TEST_P(GemmKernels, ARowsBitsDoNotDependOnItsNeighbours) {
  for_each_scaling([&](const test::FormatCase& scaling) {
    const int most_rows = inputs().max_rows;
    const std::int64_t k = scaling.k(131);
    const Product in(GetParam(), scaling, most_rows, k);
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
    for (const int count : GetParam().plain() ? rows() : some_rows()) {
      expect_alone(runner.run(in, 0, count, k), 0);
      expect_alone(runner.run(in, most_rows - count, count, k), most_rows - count);
      if (HasFatalFailure()) return;
    }
    // All neighbours NaN.
    for (const int kept : {0, 1, 2, 15, 16, 24, most_rows / 2, most_rows - 1}) {
      Product other(GetParam(), scaling, most_rows, k);
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
  });
}

// NaN or infinity as a weight, where the format has one; false where it has not.
bool spoil(Product& in, std::int64_t n, std::int64_t k, float bad) {
  const WeightTensor& tensor = in.w.whole();
  const bool nan = std::isnan(bad);
  const std::int64_t at = byte_offset(tensor, element_index(tensor, 0, n, k));
  switch (tensor.format) {
    case WeightFormat::f32:
    case WeightFormat::f16:
    case WeightFormat::bf16:
      in.w.set(n, k, static_cast<double>(bad));
      return true;
    case WeightFormat::fp8_e5m2:
      in.w.bytes()[at] = static_cast<std::byte>((nan ? 0x7e : 0x7c) | (bad < 0 ? 0x80 : 0));
      return true;
    case WeightFormat::fp8_e4m3:
    case WeightFormat::mxfp8:
      in.w.bytes()[at] = std::byte{0xff};
      return nan;
    default:
      return false;
  }
}

TEST_P(GemmKernels, NaNAndInfinityStayInTheirRowAndColumn) {
  for_each_scaling([&](const test::FormatCase& scaling) {
    for (const int rows : {7, 20, 37}) {
      const std::int64_t k = scaling.k(65);
      const Product clean(GetParam(), scaling, rows, k);
      GemmRunner runner(GetParam(), k);
      const std::vector<float> before = runner.run(clean, 0, rows, k);
      const int row = rows - 4;
      for (const std::int64_t place : {40, 64}) {
        for (const float bad : {kNaN, kInf, -kInf}) {
          Product in(GetParam(), scaling, rows, k);
          in.x_at(row, place) = bad;
          const bool spoilt = spoil(in, 17, place - 7, bad);
          const std::vector<float> got = runner.run(in, 0, rows, k);
          for (int i = 0; i < rows * kPanelOutputs; ++i) {
            if (i / kPanelOutputs != row && (i % kPanelOutputs != 17 || !spoilt)) {
              if (i % kPanelOutputs == 17) continue;  // another code than before
              ASSERT_EQ(bits(got[i]), bits(before[i])) << i;
            } else {
              ASSERT_FALSE(std::isfinite(got[i])) << i;
              ASSERT_TRUE(!std::isnan(bad) || std::isnan(got[i]));
            }
          }
        }
      }
      // 0 * infinity is NaN, in every format that has it.
      Product in(GetParam(), scaling, rows, k);
      for (int r = 0; r < rows; ++r) in.x_at(r, 50) = 0;
      if (!spoil(in, 31, 50, kInf)) continue;
      const std::vector<float> got = runner.run(in, 0, rows, k);
      for (int r = 0; r < rows; ++r) ASSERT_TRUE(std::isnan(got[r * kPanelOutputs + 31]));
    }
  });
}

// A scale of NaN spoils the outputs that it belongs to, and no other.
TEST_P(GemmKernels, AScaleOfNaNStaysInItsOutputs) {
  for_each_scaling([&](const test::FormatCase& scaling) {
    if (scaling.scales.layout == ScaleLayout::none ||
        scaling.scales.layout == ScaleLayout::tensor) {
      return;
    }
    constexpr int kRows = 14;
    const std::int64_t k = 301;
    const Product clean(GetParam(), scaling, kRows, k);
    GemmRunner runner(GetParam(), k);
    const PanelWeights::Cut cut(clean.w, k);
    const SegmentLayout layout = panel_format(cut.tensor(), GetParam().gemm).segments;
    if (layout.k == 0 || layout.scale == SegmentLayout::Scale::one) return;  // the epilogue's
    const std::vector<float> before = runner.run(clean, 0, kRows, k);
    Product in(GetParam(), scaling, kRows, k);
    const WeightTensor& tensor = in.w.whole();
    const std::int64_t row = scale_row(tensor, 17);
    // All bits set are NaN in every type of scale.
    const std::int64_t size = bytes_per_scale(tensor.scales.type);
    std::memset(in.w.stack().scales.data() +
                    size * scale_index(tensor, 0, row, scale_column(tensor, k - 1)),
                0xff, static_cast<std::size_t>(size));
    const std::vector<float> got = runner.run(in, 0, kRows, k);
    for (int i = 0; i < kRows * kPanelOutputs; ++i) {
      if (scale_row(tensor, i % kPanelOutputs) == row) {
        ASSERT_TRUE(std::isnan(got[i])) << i;
      } else {
        ASSERT_EQ(bits(got[i]), bits(before[i])) << i;
      }
    }
  });
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
  for (const TestedKernel& kernel : tested_kernels()) {
    EXPECT_EQ(tested.count(kernel.gemm.name), 1U) << kernel.gemm.name << " has no test";
    EXPECT_FALSE(scalings(kernel).empty()) << kernel.gemm.name << " is tested with no scales";
  }
  EXPECT_EQ(tested.count("model_amx_bf16_bf16"), 1U);
}

// The same recipe is the same bits, whatever the instruction set and, of unquantised weights, the
// format that held a value.
TEST(GemmRecipes, EqualTextIsEqualBits) {
  // Numbers of 6 bits below 1: exact in every unquantised format.
  std::mt19937 random(5);
  std::vector<float> short_numbers(333 * kPanelOutputs);
  for (float& value : short_numbers) value = (static_cast<float>(random() % 127) - 63) / 64;
  int pairs = 0;
  for (const TestedKernel& one : tested_kernels()) {
    for (const TestedKernel& other : tested_kernels()) {
      if (std::string(one.gemm.recipe) != other.gemm.recipe) continue;
      if (one.gemm.name == other.gemm.name || !one.available || !other.available) continue;
      if (one.gemm.format != other.gemm.format && !(one.plain() && other.plain())) continue;
      if (one.blocks()) continue;
      const Product a(one, scalings(one)[0], 48, 333, short_numbers);
      const Product b(other, scalings(other)[0], 48, 333, short_numbers);
      ASSERT_EQ(bits(a.x), bits(b.x));
      for (const int rows : {1, 2, 3, 8, 48}) {
        ASSERT_EQ(bits(GemmRunner(one, 333).run(a, 0, rows, 333)),
                  bits(GemmRunner(other, 333).run(b, 0, rows, 333)))
            << one.gemm.name << " and " << other.gemm.name;
      }
      ++pairs;
    }
  }
  EXPECT_GE(pairs, 6);
}

}  // namespace
}  // namespace fusedmoe::cpu
