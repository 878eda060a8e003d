// Names of formats with their scales, and the bytes that a checkpoint of them has.
#include "format_spec.h"

#include <gtest/gtest.h>

#include "formats/format.h"
#include "fusedmoe/error.h"
#include "model_shapes.h"

namespace fusedmoe::tool {
namespace {

std::string canonical(const std::string& text) { return to_string(parse_format(text)); }

TEST(FormatSpec, NamesSayWhatIsChosen) {
  const std::pair<const char*, const char*> names[] = {
      {"bf16", "bf16"},
      {"fp8_e4m3", "fp8_e4m3:128x128"},
      {"fp8_e5m2:tensor", "fp8_e5m2:tensor"},
      {"fp8_e4m3:bf16:channel", "fp8_e4m3:channel:bf16"},
      {"fp8_e4m3:64x1", "fp8_e4m3:64x1"},
      {"int8", "int8:channel"},
      {"int8:128", "int8:128"},
      {"int4", "int4:128"},
      {"int4:f16", "int4:128"},
      {"int4:zp:32:f32", "int4:32:f32:zp"},
      {"mxfp4", "mxfp4"},
      {"mxfp4:32", "mxfp4"},
      {"mxfp8:e8m0", "mxfp8"},
      {"nvfp4:16", "nvfp4"},
      {"q6_k", "q6_k"}};
  for (const auto& [text, name] : names) {
    EXPECT_EQ(canonical(text), name) << text;
    EXPECT_EQ(canonical(name), name);
  }
  for (const FormatInfo& info : all_formats()) {
    EXPECT_EQ(parse_format(info.name).format, info.format);
  }
}

TEST(FormatSpec, RefusesTheRestWithWhatIsLegal) {
  for (const char* bad : {"",
                          "bf17",
                          "bf16:",
                          "bf16:f32",
                          "fp8_e4m3:",
                          "fp8_e4m3:128",
                          "fp8_e4m3:zp",
                          "fp8:tensor",
                          "fp8_e4m3:128x",
                          "fp8_e4m3:x128",
                          "fp8_e4m3:0x128",
                          "fp8_e4m3:tensor:channel",
                          "int8:tensor",
                          "int8:-4",
                          "int8:4.5",
                          "int8:128:64",
                          "int4:f16:f16",
                          "int4:zp:zp",
                          "int4:e8m0",
                          "mxfp4:16",
                          "mxfp4:f32",
                          "nvfp4:zp",
                          "q4_k:256",
                          "int8:99999999999"}) {
    try {
      parse_format(bad);
      ADD_FAILURE() << "'" << bad << "' was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      const std::string text = error.what();
      EXPECT_EQ(text.rfind("--format: expected ", 0), 0U) << text;
      EXPECT_NE(text.find(", got '"), std::string::npos) << text;
    }
  }
}

TEST(FormatSpec, BytesAreThoseOfACheckpoint) {
  const auto bytes = [](const char* name, std::int64_t outputs, std::int64_t inputs) {
    const FormatSpec spec = parse_format(name);
    return stored_bytes(spec, tensor_of(spec, 2, outputs, inputs));
  };
  EXPECT_EQ(bytes("bf16", 6, 10), 2 * 6 * 10 * 2);
  EXPECT_EQ(bytes("fp8_e4m3:tensor", 6, 10), 2 * (60 + 4));
  EXPECT_EQ(bytes("fp8_e4m3:channel:bf16", 6, 10), 2 * (60 + 6 * 2));
  EXPECT_EQ(bytes("fp8_e4m3:4x8", 6, 10), 2 * (60 + 2 * 2 * 4));
  EXPECT_EQ(bytes("mxfp8", 6, 70), 2 * (6 * 70 + 6 * 3));
  EXPECT_EQ(bytes("mxfp4", 6, 69), 2 * (6 * 35 + 6 * 3));
  EXPECT_EQ(bytes("nvfp4", 6, 32), 2 * (6 * 16 + 6 * 2 + 4));
  EXPECT_EQ(bytes("int4:32", 6, 64), 2 * (6 * 32 + 6 * 2 * 2));
  EXPECT_EQ(bytes("int4:32:zp", 6, 64), 2 * (6 * 32 + 6 * 2 * 2 + 6));
  EXPECT_EQ(bytes("q4_k", 6, 512), 2 * 6 * 2 * 144);
}

// Gate and up are quantised apart, but for blocks of rows that alternate.
TEST(FormatSpec, W13IsTwoMatrices) {
  MoeConfig halves = find_model("qwen3-30b-a3b").config;
  MoeConfig interleaved = find_model("gpt-oss-20b").config;
  MoeConfig alone = halves;
  alone.activation.kind = Activation::relu2;
  const auto parts = [](const char* name, const MoeConfig& config) {
    return w13_of(parse_format(name), config, 1).scales.parts;
  };
  for (const char* name : {"fp8_e4m3:tensor", "nvfp4"}) {
    EXPECT_EQ(parts(name, halves), ScaleParts::halves);
    EXPECT_EQ(parts(name, interleaved), ScaleParts::interleaved);
    EXPECT_EQ(parts(name, alone), ScaleParts::one);
  }
  EXPECT_EQ(parts("fp8_e4m3", halves), ScaleParts::halves);
  EXPECT_EQ(parts("fp8_e4m3", interleaved), ScaleParts::one);
  EXPECT_EQ(parts("int4", halves), ScaleParts::one);
  EXPECT_EQ(w13_of(parse_format("int4"), alone, 3).outputs, 768);
  EXPECT_EQ(w2_of(parse_format("int4"), alone, 3).outputs, 2048);
}

}  // namespace
}  // namespace fusedmoe::tool
