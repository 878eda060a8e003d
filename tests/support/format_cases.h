// Every weight format with every way of scaling it, out of the registry: a format that gets its row
// there is covered by the tests that run over this table.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "formats/format.h"
#include "formats/quantize.h"
#include "formats/scales.h"
#include "reference/random_layer.h"

namespace fusedmoe::test {

struct FormatCase {
  std::string name;
  WeightFormat format = WeightFormat::bf16;
  WeightScales scales = {};  // of w2, and of w13 but for parts
  ScaleParts w13_parts = ScaleParts::one;
  bool zero_points = false;
  WeightLayout layout = WeightLayout::nk;

  const FormatInfo& info() const { return format_info(format); }
  // The inputs of a matrix of this format are a multiple of this.
  std::int64_t k_multiple() const { return info().encode == nullptr ? info().block_elements : 1; }
  std::int64_t k(std::int64_t about) const {
    return (about + k_multiple() - 1) / k_multiple() * k_multiple();
  }
  WeightScales w13_scales() const {
    WeightScales result = scales;
    result.parts = w13_parts;
    return result;
  }
  RandomWeightsOptions options() const {
    RandomWeightsOptions result;
    result.w13_format = result.w2_format = format;
    result.w13_scales = w13_scales();
    result.w2_scales = scales;
    result.zero_points = zero_points;
    result.w13_layout = result.w2_layout = layout;
    return result;
  }
};

inline void PrintTo(const FormatCase& c, std::ostream* out) { *out << c.name; }
inline std::string format_case_name(const testing::TestParamInfo<FormatCase>& info) {
  return info.param.name;
}

namespace internal {

inline std::vector<FormatCase> cases_of(const FormatInfo& format, bool every_type) {
  std::vector<FormatCase> all;
  const WeightScales usual = default_scales(format.format);
  const auto add = [&](const std::string& what, WeightScales scales, auto... change) {
    FormatCase c{format.name + std::string(what.empty() ? "" : "_") + what, format.format, scales};
    (change(c), ...);
    all.push_back(c);
  };
  const auto halves = [](FormatCase& c) { c.w13_parts = ScaleParts::halves; };
  const auto kn = [](FormatCase& c) { c.layout = WeightLayout::kn; };
  if (format.takes(ScaleLayout::none)) {
    add("", usual);
    if (format.scales.any_order && every_type) add("kn", usual, kn);
    return all;
  }
  // The types of scales that this format takes: the usual one for each layout, others once.
  std::vector<ScaleType> others;
  for (int i = 0; i <= static_cast<int>(ScaleType::e4m3); ++i) {
    const auto type = static_cast<ScaleType>(i);
    if (format.takes(type) && type != usual.type) others.push_back(type);
  }
  WeightScales scales = usual;
  const auto group_size = [&](std::int64_t free) {
    return format.scales.group_size != 0 ? format.scales.group_size : free;
  };
  if (format.takes(ScaleLayout::tensor)) {
    scales.layout = ScaleLayout::tensor;
    add("tensor", scales);
    add("tensor_parts", scales, halves);
  }
  if (format.takes(ScaleLayout::channel)) {
    scales.layout = ScaleLayout::channel;
    add("channel", scales);
    if (format.scales.any_order && every_type) add("channel_kn", scales, kn);
  }
  if (format.takes(ScaleLayout::block)) {
    scales = usual;
    scales.layout = ScaleLayout::block;
    scales.block_n = 32;  // no panel of 16 or 32 outputs has two blocks
    scales.block_k = 64;
    add("block", scales, halves);
    scales.block_n = 24;
    scales.block_k = 20;
    scales.transposed = true;
    add("block_uneven", scales, halves);
  }
  if (format.takes(ScaleLayout::group)) {
    scales = usual;
    scales.layout = ScaleLayout::group;
    scales.group_size = group_size(32);
    add("group", scales);
    if (format.scales.global) add("group_parts", scales, halves);
    if (format.scales.zero_points) {
      add("group_zeros", scales, [](FormatCase& c) { c.zero_points = true; });
    }
    scales.transposed = true;
    if (every_type) add("group_transposed", scales);
    if (every_type && format.scales.any_order) add("group_kn", scales, kn);
    scales.transposed = false;
    if (format.scales.group_size ==
        0) {  // the shortest, of few steps of AMX, the longest, beyond it
      for (const std::int64_t size : {4, 64, 192, 256, 300}) {
        scales.group_size = size;
        if (every_type) {
          add("group" + std::to_string(size), scales,
              [&](FormatCase& c) { c.zero_points = format.scales.zero_points; });
        }
      }
    }
    if (format.scales.zero_points && every_type) {
      scales = usual;
      scales.layout = ScaleLayout::channel;
      add("channel_zeros", scales, [](FormatCase& c) { c.zero_points = true; });
    }
  }
  for (const ScaleType type : others) {
    if (!every_type) break;
    scales = usual;
    scales.type = type;
    if (scales.layout == ScaleLayout::group) scales.group_size = group_size(32);
    add(to_string(type), scales);
    if (format.takes(ScaleLayout::group) && usual.layout != ScaleLayout::group) {
      scales.layout = ScaleLayout::group;
      scales.group_size = group_size(32);
      add(std::string("group_") + to_string(type), scales);
    }
  }
  return all;
}

inline std::vector<FormatCase> cases(bool every_type) {
  std::vector<FormatCase> all;
  for (const FormatInfo& format : all_formats()) {
    for (FormatCase& c : cases_of(format, every_type)) all.push_back(std::move(c));
  }
  return all;
}

}  // namespace internal

// One for each format and layout of scales: what a contract is tested with.
inline const std::vector<FormatCase>& format_cases() {
  static const auto& all = *new std::vector<FormatCase>(internal::cases(false));
  return all;
}
// And the types of scales, orders and group sizes: where a test of each is cheap.
inline const std::vector<FormatCase>& all_format_cases() {
  static const auto& all = *new std::vector<FormatCase>(internal::cases(true));
  return all;
}

}  // namespace fusedmoe::test
