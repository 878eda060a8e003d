// The container alone: what is in a sound file, and that nothing unsound passes.
#include "checkpoint/gguf.h"

#include <gtest/gtest.h>

#include "gguf_files.h"

namespace fusedmoe::checkpoint {
namespace {

GgufText sound() {
  return {.pairs = {pair_text("general.architecture", "llama"), pair_u32("a", 7)},
          .tensors = {{"first", {2, 3}, kGgmlF32, random_bytes(24, 1)},
                      {"second", {2, 1, 32}, kGgmlQ8_0, random_bytes(68, 2)},
                      {"third", {5}, kGgmlF16, random_bytes(10, 3)}}};
}

GgufContent parse(const std::string& text) {
  return parse_gguf(std::as_bytes(std::span(text)), "x.gguf");
}

void expect_refused(const std::string& text, std::vector<std::string> parts,
                    ErrorCode code = ErrorCode::io) {
  parts.emplace_back("x.gguf");
  expect_error(code, parts, [&] { parse(text); });
}

TEST(Gguf, WhatItHolds) {
  for (const std::uint32_t version : {2, 3}) {
    for (const std::uint64_t alignment : {1, 8, 32, 64, 4096}) {
      GgufText file = sound();
      file.version = version;
      file.alignment = alignment;
      file.pairs.push_back(pair_u32("general.alignment", static_cast<std::uint32_t>(alignment)));
      const std::string text = file.text();
      const GgufContent content = parse(text);
      ASSERT_EQ(content.tensors.size(), 3U);
      for (std::size_t i = 0; i < 3; ++i) {
        const Tensor& tensor = content.tensors[i];
        EXPECT_EQ(tensor.name, file.tensors[i].name);
        EXPECT_EQ(tensor.shape, file.tensors[i].shape);
        EXPECT_EQ(tensor.file, "x.gguf");
        EXPECT_EQ(text.substr(tensor.offset, tensor.bytes), file.tensors[i].data);
        EXPECT_EQ(reinterpret_cast<const char*>(tensor.data), text.data() + tensor.offset);
      }
      EXPECT_EQ(content.tensors[1].type, TensorType::q8_0);
      EXPECT_EQ(*content.metadata.find("a")->as<std::int64_t>(), 7);
    }
  }
}

TEST(Gguf, EveryKindOfValue) {
  const auto typed = [](const std::string& key, std::uint32_t type, const std::string& value) {
    return gguf_string(key) + raw(type) + value;
  };
  const std::vector<std::string> pairs = {
      typed("u8", 0, "\xff"),
      typed("i8", 1, "\xff"),
      typed("u16", 2, raw<std::uint16_t>(65535)),
      typed("i16", 3, raw<std::int16_t>(-2)),
      typed("u32", 4, raw<std::uint32_t>(4294967295U)),
      typed("i32", 5, raw<std::int32_t>(-3)),
      typed("f32", 6, raw(1.5F)),
      typed("bool", 7, "\x01"),
      typed("text", 8, gguf_string("hello")),
      typed("list", 9, raw<std::uint32_t>(5) + raw<std::uint64_t>(2) + raw(4) + raw(-5)),
      typed("words", 9, raw<std::uint32_t>(8) + raw<std::uint64_t>(1) + gguf_string("word")),
      typed("u64", 10, raw<std::uint64_t>(1ULL << 40)),
      typed("huge", 10, raw<std::uint64_t>(~0ULL)),
      typed("i64", 11, raw<std::int64_t>(-4)),
      typed("f64", 12, raw(2.5)),
  };
  const std::string text = GgufText{.pairs = pairs}.text();
  const JsonValue values = parse(text).metadata;
  EXPECT_EQ(*values.find("u8")->as<std::int64_t>(), 255);
  EXPECT_EQ(*values.find("i8")->as<std::int64_t>(), -1);
  EXPECT_EQ(*values.find("u16")->as<std::int64_t>(), 65535);
  EXPECT_EQ(*values.find("i16")->as<std::int64_t>(), -2);
  EXPECT_EQ(*values.find("u32")->as<std::int64_t>(), 4294967295);
  EXPECT_EQ(*values.find("i32")->as<std::int64_t>(), -3);
  EXPECT_EQ(*values.find("f32")->as<double>(), 1.5);
  EXPECT_EQ(*values.find("bool")->as<bool>(), true);
  EXPECT_EQ(*values.find("text")->as<std::string>(), "hello");
  EXPECT_EQ(to_text(*values.find("list")), "[4, -5]");
  EXPECT_EQ(values.find("words"), nullptr);  // a vocabulary: checked and left out
  EXPECT_EQ(*values.find("u64")->as<std::int64_t>(), std::int64_t{1} << 40);
  EXPECT_NE(values.find("huge")->as<double>(), nullptr);
  EXPECT_EQ(*values.find("i64")->as<std::int64_t>(), -4);
  EXPECT_EQ(*values.find("f64")->as<double>(), 2.5);
  // Cut at every byte: never more than an error.
  for (std::size_t size = 0; size < text.size() - 40; ++size) {
    EXPECT_THROW(parse(text.substr(0, size)), Error) << size;
  }
}

TEST(Gguf, MetadataThatCannotBe) {
  const auto with = [](const std::string& pair) { return GgufText{.pairs = {pair}}.text(); };
  const auto typed = [](std::uint32_t type, const std::string& value) {
    return gguf_string("key") + raw(type) + value;
  };
  expect_refused(with(typed(13, raw(0))), {"'key'", "type 13"});
  expect_refused(with(typed(7, "\x02")), {"'key'", "boolean"});
  expect_refused(with(typed(8, raw<std::uint64_t>(1ULL << 62))), {"string length", "'key'"});
  expect_refused(with(typed(9, raw<std::uint32_t>(4) + raw<std::uint64_t>(~0ULL))),
                 {"'key'", "18446744073709551615 values"});
  expect_refused(with(typed(9, raw<std::uint32_t>(8) + raw<std::uint64_t>(100))),
                 {"'key'", "100 values"});
  expect_refused(with(typed(9, raw<std::uint32_t>(9) + raw<std::uint64_t>(1))),
                 {"'key'", "array of arrays"});
  expect_refused(with(typed(9, raw<std::uint32_t>(99) + raw<std::uint64_t>(1))),
                 {"'key'", "type 99"});
  GgufText twice;
  twice.pairs = {pair_u32("key", 1), pair_u32("key", 2)};
  expect_refused(twice.text(), {"'key'", "twice"});
  for (const std::uint32_t alignment : {0U, 24U, 48U, 1U << 21U}) {
    expect_refused(with(pair_u32("general.alignment", alignment)),
                   {"general.alignment", std::to_string(alignment)});
  }
  expect_refused(with(pair_text("general.alignment", "32")), {"general.alignment"});
}

TEST(Gguf, HeadersThatCannotBe) {
  std::string text = sound().text();
  expect_refused("", {"magic", "file size 0"});
  expect_refused("GGU", {"magic"});
  expect_refused("GGML" + text.substr(4), {"magic"});
  const auto version = [&](const std::string& bytes) { return "GGUF" + bytes + text.substr(8); };
  expect_refused(version(raw(1)), {"version 1"}, ErrorCode::unsupported);
  expect_refused(version(raw(4)), {"version 4"}, ErrorCode::unsupported);
  expect_refused(version(raw(0)), {"version 0"}, ErrorCode::unsupported);
  expect_refused(version(std::string("\0\0\0\x03", 4)), {"big-endian"}, ErrorCode::unsupported);
  std::string counts = text;
  counts.replace(8, 8, raw<std::uint64_t>(~0ULL));
  expect_refused(counts, {"tensor count", "18446744073709551615"});
  counts = text;
  counts.replace(16, 8, raw<std::uint64_t>(1ULL << 60));
  expect_refused(counts, {"metadata count"});
  // Counts that the file could hold, but does not.
  counts = text;
  counts.replace(8, 8, raw<std::uint64_t>(4));
  EXPECT_THROW(parse(counts), Error);
}

TEST(Gguf, TensorsThatCannotBe) {
  const auto with = [](GgufTensor tensor) {
    return GgufText{.tensors = {std::move(tensor)}}.text();
  };
  const std::string data = random_bytes(64, 4);
  expect_refused(with({"t", {2, 2, 2, 2, 2}, kGgmlF32, data}), {"'t'", "5 dimensions"});
  expect_refused(with({"t", {-1}, kGgmlF32, data}), {"'t'", "63 bits"});
  expect_refused(with({"t", {1LL << 40, 1LL << 40}, kGgmlF32, data}), {"'t'", "64 bits"});
  expect_refused(with({"t", {1LL << 62}, kGgmlF32, data}), {"'t'", "63 bits"});
  expect_refused(with({"t", {2, 48}, kGgmlQ8_0, data}), {"'t'", "[2, 48]", "32", "Q8_0"});
  expect_refused(with({"t", {1, 64}, kGgmlQ4K, data}), {"'t'", "256", "Q4_K"});
  expect_refused(with({"t", {17}, kGgmlF32, data}), {"'t'", "file size"});
  expect_refused(with({"t", {15}, kGgmlF32, data + std::string(32, 'x')}), {"belong to no tensor"});
  expect_refused(with({"t\x01", {16}, kGgmlF32, data}), {"'t\\x01'", "ASCII"});
  expect_refused(with({"\xff", {16}, kGgmlF32, data}), {"\\xff", "ASCII"});
  expect_refused(with({"t", {16}, 5, data}), {"'t'", "type 5"}, ErrorCode::unsupported);
  expect_refused(with({"t", {16}, 4294967295U, data}), {"'t'"}, ErrorCode::unsupported);
  EXPECT_EQ(parse(with({"t", {16}, kGgmlF32, data})).tensors.front().bytes, 64);
  EXPECT_EQ(parse(with({"t", {}, kGgmlF32, data.substr(0, 4)})).tensors.front().bytes, 4);
  EXPECT_EQ(parse(with({"t", {0, 32}, kGgmlF32, ""})).tensors.front().bytes, 0);
  GgufText twice = sound();
  twice.tensors[2].name = "first";
  expect_refused(twice.text(), {"'first'", "twice"});
}

// Offsets, by a file of two tensors of 40 bytes each: 0 and 64 are right.
TEST(Gguf, OffsetsThatCannotBe) {
  GgufText file;
  file.tensors = {{"a", {10}, kGgmlF32, random_bytes(40, 5)},
                  {"b", {10}, kGgmlF32, random_bytes(40, 6)}};
  const std::string text = file.text();
  const std::size_t at = text.find(std::string("b") + raw<std::uint32_t>(1)) + 1 + 4 + 8 + 4;
  const auto with = [&](std::uint64_t offset, std::size_t more) {
    std::string changed = text;
    changed.replace(at, 8, raw(offset));
    return changed + std::string(more, 'x');
  };
  EXPECT_EQ(parse(with(64, 0)).tensors.size(), 2U);
  expect_refused(with(32, 0), {"'b'", "overlaps", "'a'"});
  expect_refused(with(0, 0), {"overlaps"});
  expect_refused(with(60, 0), {"'b'", "general.alignment"});
  expect_refused(with(96, 64), {"'b'", "belong to no tensor"});
  expect_refused(with(1U << 20U, 0), {"'b'", "file size"});
  expect_refused(with(~0ULL, 0), {"'b'", "63 bits"});
  expect_refused(with(0x7fffffffffffffe0ULL, 0), {"'b'", "file size"});
}

}  // namespace
}  // namespace fusedmoe::checkpoint
