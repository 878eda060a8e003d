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
    EXPECT_GT(info.block_elements, 0);
    EXPECT_GT(info.block_bytes, 0);
    EXPECT_NE(info.decode, nullptr) << info.name;
    EXPECT_NE(info.encode == nullptr, info.encode_block == nullptr) << info.name;
    EXPECT_NE(info.scales.layouts, 0U) << info.name;
    const bool scaled = !info.takes(ScaleLayout::none);
    EXPECT_EQ(info.scale_for != nullptr, scaled) << info.name;
    EXPECT_EQ(info.scales.types != 0, scaled) << info.name;
  }
  const FormatInfo& unknown = format_info(static_cast<WeightFormat>(99));
  EXPECT_STREQ(unknown.name, "unknown");
  EXPECT_EQ(unknown.decode, nullptr);
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

// Bits of one element, and bytes of some, as formats.md's table has them.
TEST(FormatRegistry, Sizes) {
  struct Size {
    WeightFormat format;
    std::int64_t elements, bytes;
  };
  for (const Size& size : {Size{WeightFormat::f32, 7, 28}, Size{WeightFormat::f16, 7, 14},
                           Size{WeightFormat::bf16, 7, 14}, Size{WeightFormat::fp8_e4m3, 7, 7},
                           Size{WeightFormat::fp8_e5m2, 7, 7}, Size{WeightFormat::mxfp8, 33, 33},
                           Size{WeightFormat::mxfp4, 7, 4}, Size{WeightFormat::nvfp4, 8, 4},
                           Size{WeightFormat::int8, 7, 7}, Size{WeightFormat::int4, 1, 1},
                           Size{WeightFormat::q4_k, 512, 288}, Size{WeightFormat::q5_k, 512, 352},
                           Size{WeightFormat::q6_k, 512, 420}}) {
    EXPECT_EQ(format_info(size.format).bytes(size.elements), size.bytes) << to_string(size.format);
  }
}

TEST(FormatRegistry, RowsOfSharedBytesStartWholeOnes) {
  WeightTensor tensor{.format = WeightFormat::int4, .experts = 3, .outputs = 5, .inputs = 7};
  EXPECT_EQ(row_stride_of(tensor), 8);
  EXPECT_EQ(expert_stride_of(tensor), 40);
  EXPECT_EQ(byte_offset(tensor, element_index(tensor, 2, 3, 6)), (2 * 40 + 3 * 8 + 6) / 2);
  tensor = {.format = WeightFormat::q6_k, .experts = 3, .outputs = 5, .inputs = 512};
  EXPECT_EQ(byte_offset(tensor, element_index(tensor, 1, 2, 256)), ((5 + 2) * 2 + 1) * 210);
}

}  // namespace
}  // namespace fusedmoe
