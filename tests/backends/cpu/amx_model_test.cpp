// The model of AMX's tiles does what Intel's manual says, and shows what a kernel on it gets wrong:
// tiles that nobody configured, strides, heights and tile numbers.
#include "tested_kernels.h"

namespace fusedmoe::cpu {
namespace {

const TestedKernel& model_kernel() {
  static const TestedKernel kernel = [] {
    for (const TestedKernel& one : tested_kernels()) {
      if (one.gemm.run == &gemm_on_model<Code::bf16>) return one;
    }
    throw std::logic_error("no kernel on the model");
  }();
  return kernel;
}

// One tile's product of numbers that fp32 holds exactly.
TEST(AmxModelTest, DotIsTheSumOverThirtyTwoK) {
  std::uint16_t rows[16][32], weights[16][32];
  float sums[16][16];
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 32; ++j) {
      rows[i][j] = f32_to_bf16(static_cast<float>((7 * i + 3 * j) % 11 - 5));
      weights[i][j] = f32_to_bf16(static_cast<float>((5 * i + j) % 13 - 6));
    }
    for (int n = 0; n < 16; ++n) sums[i][n] = static_cast<float>(i - n);
  }
  AmxModel::configure(5);  // of the rows; weights always have 16
  AmxModel::load<1>(sums, 64);
  AmxModel::load<4>(rows, 64);
  AmxModel::load<7>(weights, 64);
  AmxModel::dot<1, 4, 7>();
  float got[16][16];
  std::memset(got, 0xff, sizeof(got));
  AmxModel::store<1>(got, 64);
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 16; ++n) {
      if (m >= 5) {
        ASSERT_TRUE(std::isnan(got[m][n])) << "a row beyond the tile's";
        continue;
      }
      float want = sums[m][n];
      for (int k = 0; k < 32; ++k) {
        want += bf16_to_f32(rows[m][k]) * bf16_to_f32(weights[k / 2][2 * n + k % 2]);
      }
      ASSERT_EQ(got[m][n], want) << m << " " << n;
    }
  }
  AmxModel::release();
}

TEST(AmxModelTest, ByteDotIsTheSumOverSixtyFourK) {
  std::int8_t rows[16][64], weights[16][64];
  std::int32_t sums[16][16];
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 64; ++j) {
      rows[i][j] = static_cast<std::int8_t>((37 * i + 11 * j) % 255 - 127);
      weights[i][j] = static_cast<std::int8_t>((53 * i + 29 * j) % 256 - 128);
    }
    for (int n = 0; n < 16; ++n) sums[i][n] = 1000 * i - n;
  }
  AmxByteModel::configure(5);
  AmxByteModel::load<1>(sums, 64);
  AmxByteModel::load<4>(rows, 64);
  AmxByteModel::load<7>(weights, 64);
  AmxByteModel::dot<1, 4, 7>();
  std::int32_t got[5][16];
  AmxByteModel::store<1>(got, 64);
  for (int m = 0; m < 5; ++m) {
    for (int n = 0; n < 16; ++n) {
      std::int32_t want = sums[m][n];
      for (int k = 0; k < 64; ++k) want += rows[m][k] * weights[k / 4][4 * n + k % 4];
      ASSERT_EQ(got[m][n], want) << m << " " << n;
    }
  }
  AmxByteModel::release();
}

TEST(AmxModelTest, WithoutConfigurationNothingIsStored) {
  AmxModel::release();
  std::uint8_t memory[16][64];
  std::memset(memory, 0xa5, sizeof(memory));
  AmxModel::zero<0>();
  AmxModel::store<0>(memory, 64);
  for (const auto& row : memory) {
    for (const std::uint8_t byte : row) ASSERT_EQ(byte, 0xa5);
  }
}

// A kernel leaves its thread without tiles in use.
TEST(AmxModelTest, TheKernelReleasesItsTiles) {
  const Product in(model_kernel(), scalings(model_kernel())[0], 20, 40);
  GemmRunner(model_kernel(), 40).run(in, 0, 20, 40);
  std::uint8_t memory[16][64];
  std::memset(memory, 0xa5, sizeof(memory));
  AmxModel::store<0>(memory, 64);
  AmxModel::store<6>(memory, 64);
  for (const auto& row : memory) {
    for (const std::uint8_t byte : row) ASSERT_EQ(byte, 0xa5);
  }
}

// --- Kernels with a fault --------------------------------------------------------------------

struct NeverConfigured : AmxModel {
  static void configure(int) {}
};
struct TallerWeightStride : AmxModel {
  template <int kTile>
  static void load(const void* from, std::int64_t stride) {
    AmxModel::load<kTile>(from, kTile >= 6 ? stride / 2 : stride);
  }
};
struct TightRowStride : AmxModel {  // forgets the pad
  template <int kTile>
  static void load(const void* from, std::int64_t stride) {
    AmxModel::load<kTile>(from, kTile == 4 || kTile == 5 ? stride - 64 : stride);
  }
};
struct OneRowLess : AmxModel {
  static void configure(int rows) { AmxModel::configure(rows - 1); }
};
struct ForgetsZero : AmxModel {
  template <int kTile>
  static void zero() {}
  static void configure(int rows) {
    AmxModel::configure(rows);
    const std::uint32_t one[16] = {0x3f800000};
    AmxModel::load<0>(one, 0);  // what another call left
  }
};
struct SwapsWeights : AmxModel {
  template <int kSums, int kRows, int kWeights>
  static void dot() {
    AmxModel::dot<kSums, kRows, 13 - kWeights>();
  }
};

template <class Tiles>
bool is_right(int rows, std::int64_t k) {
  const Product in(model_kernel(), scalings(model_kernel())[0], rows, k);
  TestedKernel other = model_kernel();
  other.gemm.run = [](const GemmTile& tile) { gemm_bf16_tiles<Tiles>(tile, nullptr); };
  return bits(GemmRunner(other, k).run(in, 0, rows, k)) ==
         bits(GemmRunner(model_kernel(), k).run(in, 0, rows, k));
}

TEST(AmxModelTest, ShowsFaultsOfAKernel) {
  for (const int rows : {3, 16, 33}) {
    for (const std::int64_t k : {32, 70}) {
      EXPECT_TRUE(is_right<AmxModel>(rows, k));
      EXPECT_FALSE(is_right<NeverConfigured>(rows, k)) << rows;
      EXPECT_FALSE(is_right<TallerWeightStride>(rows, k)) << rows;
      EXPECT_FALSE(is_right<TightRowStride>(rows, k)) << rows;
      EXPECT_FALSE(is_right<OneRowLess>(rows, k)) << rows;
      EXPECT_FALSE(is_right<ForgetsZero>(rows, k)) << rows;
      EXPECT_FALSE(is_right<SwapsWeights>(rows, k)) << rows;
    }
  }
  AmxModel::release();
}

}  // namespace
}  // namespace fusedmoe::cpu
