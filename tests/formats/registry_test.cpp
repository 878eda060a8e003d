// formats/registry.cpp: one row per format, and the one place where layout and strides of stored
// weights are resolved.
#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "formats/format.h"

namespace fusedmoe {
namespace {

TEST(FormatRegistry, OneRowPerFormatInOrder) {
  const auto formats = all_formats();
  ASSERT_EQ(formats.size(), static_cast<std::size_t>(WeightFormat::q6_k) + 1);
  std::set<std::string> names;
  for (std::size_t i = 0; i < formats.size(); ++i) {
    const FormatInfo& info = formats[i];
    EXPECT_EQ(static_cast<std::size_t>(info.format), i);
    EXPECT_EQ(&format_info(info.format), &info);
    EXPECT_STREQ(to_string(info.format), info.name);
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
    EXPECT_GT(info.bits_per_weight, 0);
    EXPECT_EQ(info.built, info.decode != nullptr) << info.name;
    EXPECT_EQ(info.built, info.encode != nullptr) << info.name;
  }
  const FormatInfo& unknown = format_info(static_cast<WeightFormat>(99));
  EXPECT_STREQ(unknown.name, "unknown");
  EXPECT_FALSE(unknown.built);
}

TEST(FormatRegistry, StridesAndElementIndex) {
  WeightTensor tensor{.experts = 3, .outputs = 5, .inputs = 7};
  EXPECT_EQ(row_stride_of(tensor), 7);
  EXPECT_EQ(expert_stride_of(tensor), 35);
  EXPECT_EQ(element_index(tensor, 0, 0, 0), 0);
  EXPECT_EQ(element_index(tensor, 2, 4, 6), 2 * 35 + 4 * 7 + 6);
  tensor.row_stride = 9;
  EXPECT_EQ(row_stride_of(tensor), 9);
  EXPECT_EQ(expert_stride_of(tensor), 45) << "dense experts of padded rows";
  EXPECT_EQ(element_index(tensor, 2, 4, 6), 2 * 45 + 4 * 9 + 6);
  tensor.expert_stride = 100;
  EXPECT_EQ(element_index(tensor, 2, 4, 6), 2 * 100 + 4 * 9 + 6);
  tensor = {.layout = WeightLayout::kn, .experts = 3, .outputs = 5, .inputs = 7};
  EXPECT_EQ(row_stride_of(tensor), 5);
  EXPECT_EQ(expert_stride_of(tensor), 35);
  EXPECT_EQ(element_index(tensor, 2, 4, 6), 2 * 35 + 6 * 5 + 4);
  tensor.row_stride = 8;
  EXPECT_EQ(expert_stride_of(tensor), 56);
  EXPECT_EQ(element_index(tensor, 1, 4, 6), 56 + 6 * 8 + 4);
  // Beyond 32 bits.
  const WeightTensor large{.experts = 256, .outputs = 4096, .inputs = 7168};
  EXPECT_EQ(element_index(large, 255, 4095, 7167), std::int64_t{256} * 4096 * 7168 - 1);
}

TEST(FormatRegistry, DecodeReadsWhatEncodeStoredAnywhere) {
  for (const FormatInfo& info : all_formats()) {
    if (!info.built) continue;
    for (const WeightLayout layout : {WeightLayout::nk, WeightLayout::kn}) {
      WeightTensor tensor{.format = info.format,
                          .layout = layout,
                          .experts = 2,
                          .outputs = 3,
                          .inputs = 4,
                          .row_stride = 6,
                          .expert_stride = 31};
      std::vector<std::byte> memory(1 + 62 * 4, std::byte{0xff});
      tensor.data = memory.data() + 1;  // any address
      const auto value = [](std::int64_t e, std::int64_t n, std::int64_t k) {
        return static_cast<double>(100 * e + 10 * n + k) / 4 - 3;  // exact in all of them
      };
      for (int e = 0; e < 2; ++e) {
        for (int n = 0; n < 3; ++n) {
          for (int k = 0; k < 4; ++k) {
            info.encode(memory.data() + 1, tensor, e, n, k, value(e, n, k));
          }
        }
      }
      int different = 0;
      for (int e = 0; e < 2; ++e) {
        for (int n = 0; n < 3; ++n) {
          for (int k = 0; k < 4; ++k) {
            different += info.decode(tensor, e, n, k) != value(e, n, k);
          }
        }
      }
      EXPECT_EQ(different, 0) << info.name;
      std::size_t padding = 0;
      for (const std::byte byte : memory) padding += byte == std::byte{0xff};
      EXPECT_GE(padding, memory.size() - 24 * static_cast<std::size_t>(info.bits_per_weight) / 8);
    }
  }
}

}  // namespace
}  // namespace fusedmoe
