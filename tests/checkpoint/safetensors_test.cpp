// One safetensors file: every kind of damage is an error that names file, tensor and offset.
#include "checkpoint/safetensors.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "test_files.h"

namespace fusedmoe::checkpoint {
namespace {

// A header with one tensor 't', of 16 bytes of data.
std::string one_tensor(const std::string& fields) {
  return safetensors_text("{\"t\":{" + fields + "}}", std::string(16, 'x'));
}

SafetensorsContent parse(const std::string& text) {
  return parse_safetensors(std::as_bytes(std::span(text)), "file.safetensors");
}

void expect_refused(const std::string& text, std::vector<std::string> parts) {
  SCOPED_TRACE(text.substr(0, 200));
  parts.emplace_back("file.safetensors");
  expect_error(ErrorCode::io, parts, [&] { parse(text); });
}

TEST(Safetensors, MalformedFilesOfTheManifest) {
  const auto manifest = nlohmann::json::parse(std::ifstream(kGolden / "bad" / "manifest.json"));
  int seen = 0;
  for (const auto& entry : manifest["files"]) {
    if (entry["kind"] != "safetensors") continue;
    ++seen;
    const std::filesystem::path path = kGolden / "bad" / entry["path"].get<std::string>();
    SCOPED_TRACE(path);
    if (entry["fault"].is_null()) {
      EXPECT_EQ(SafetensorsFile(path).tensors().size(), 7U);
      continue;
    }
    std::vector<std::string> parts;
    for (const auto& part : entry["message_names"]) {
      parts.push_back(part == "file" ? path.filename().string() : part.get<std::string>());
    }
    expect_error(ErrorCode::io, parts, [&] { SafetensorsFile file(path); });
  }
  EXPECT_EQ(seen, 11);
}

TEST(Safetensors, ReadsNamesShapesBytesAndMetadata) {
  const TempFolder folder;
  SafetensorsFile file(
      folder.write("a.safetensors", make_safetensors({{"x", {2, 3}}, {"scalar", {}, "F32"}})));
  ASSERT_EQ(file.names().size(), 2U);
  const Tensor* const x = file.find("x");
  ASSERT_NE(x, nullptr);
  EXPECT_EQ(x->type, TensorType::bf16);
  EXPECT_EQ(x->shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(x->bytes, 12);
  EXPECT_EQ(x->file, (folder.path() / "a.safetensors").string());
  const Tensor* const scalar = file.find("scalar");
  ASSERT_NE(scalar, nullptr);
  EXPECT_TRUE(scalar->shape.empty());
  EXPECT_EQ(scalar->data - x->data, 12);
  EXPECT_EQ(file.find("y"), nullptr);
  EXPECT_EQ(file.metadata().at("format"), "pt");
}

TEST(Safetensors, EveryTypeHasItsSize) {
  const std::pair<const char*, int> types[] = {
      {"BOOL", 8},    {"U8", 8},   {"I8", 8},      {"F8_E4M3", 8}, {"F8_E5M2", 8},
      {"F8_E8M0", 8}, {"F4", 4},   {"I16", 16},    {"U16", 16},    {"F16", 16},
      {"BF16", 16},   {"I32", 32}, {"F6_E2M3", 6}, {"U32", 32},    {"F32", 32},
      {"F64", 64},    {"I64", 64}, {"U64", 64},    {"F6_E3M2", 6}, {"C64", 64}};
  for (const auto& [name, bits] : types) {
    // 8 elements take as many bytes as one has bits.
    const std::string header = std::string("{\"t\":{\"dtype\":\"") + name +
                               "\",\"shape\":[8],\"data_offsets\":[0," + std::to_string(bits) +
                               "]}}";
    const std::string text = safetensors_text(header, std::string(bits, 'x'));
    EXPECT_EQ(parse(text).tensors.front().bytes, bits) << name;
    EXPECT_STREQ(to_string(parse(text).tensors.front().type), name);
  }
}

TEST(Safetensors, LegalOddities) {
  EXPECT_TRUE(parse(safetensors_text("{}", "")).tensors.empty());
  // Blanks behind the header, as writers pad it; empty tensors between others.
  const std::string text = safetensors_text(
      R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
      R"("none":{"dtype":"F32","shape":[9223372036854775807,0,8],"data_offsets":[2,2]},)"
      R"("b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}    )",
      "xyz");
  EXPECT_EQ(parse(text).tensors.size(), 3U);
}

TEST(Safetensors, BrokenTensorEntries) {
  const std::string ok = R"("dtype":"U8","shape":[16],"data_offsets":[0,16])";
  EXPECT_EQ(parse(one_tensor(ok)).tensors.size(), 1U);
  expect_refused(one_tensor(R"("shape":[16],"data_offsets":[0,16])"), {"'t'", "no dtype"});
  expect_refused(one_tensor(R"("dtype":"U8","data_offsets":[0,16])"), {"'t'", "no shape"});
  expect_refused(one_tensor(R"("dtype":"U8","shape":[16])"), {"'t'", "no data_offsets"});
  expect_refused(one_tensor(R"("dtype":"U7","shape":[16],"data_offsets":[0,16])"), {"'t'", "'U7'"});
  expect_refused(one_tensor(R"("dtype":8,"shape":[16],"data_offsets":[0,16])"), {"'t'", "dtype"});
  expect_refused(one_tensor(ok + R"(,"dtype":"U8")"), {"'t'", "dtype stands twice"});
  expect_refused(one_tensor(ok + R"(,"shape":[16])"), {"'t'", "shape stands twice"});
  expect_refused(one_tensor(ok + R"(,"more":1)"), {"'t'", "'more'"});
  expect_refused(one_tensor(R"("dtype":"U8","shape":[-16],"data_offsets":[0,16])"),
                 {"'t'", "negative"});
  expect_refused(one_tensor(R"("dtype":"U8","shape":[16.0],"data_offsets":[0,16])"),
                 {"'t'", "shape"});
  expect_refused(one_tensor(R"("dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,16])"),
                 {"'t'", "shape"});
  expect_refused(one_tensor(R"("dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,16])"),
                 {"'t'", "shape"});
  expect_refused(one_tensor(R"("dtype":"U8","shape":[[16]],"data_offsets":[0,16])"),
                 {"'t'", "shape"});
  expect_refused(one_tensor(R"("dtype":"U8","shape":["16"],"data_offsets":[0,16])"),
                 {"'t'", "shape"});
  expect_refused(
      one_tensor(
          R"("dtype":"U8","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,16],"data_offsets":[0,16])"),
      {"'t'", "dimensions"});
  expect_refused(one_tensor(R"("dtype":"U8","shape":[16],"data_offsets":[0,8,16])"),
                 {"'t'", "data_offsets"});
  expect_refused(one_tensor(R"("dtype":"U8","shape":[16],"data_offsets":[16])"),
                 {"'t'", "data_offsets"});
  expect_refused(one_tensor(R"("dtype":"U8","shape":[16],"data_offsets":[16,0])"),
                 {"'t'", "[16, 0)"});
  expect_refused(one_tensor(R"("dtype":"F4","shape":[3],"data_offsets":[0,1])"),
                 {"'t'", "whole bytes"});
  expect_refused(one_tensor(R"("dtype":"U8","shape":[12],"data_offsets":[0,12])"), {"no tensor"});
  expect_refused(one_tensor(R"("dtype":"U8","shape":[12],"data_offsets":[4,16])"),
                 {"'t'", "[0, 4)", "no tensor"});
  expect_refused(one_tensor(R"("dtype":"U8","shape":[16],"data_offsets":[4,20])"),
                 {"'t'", "[4, 20)", "end beyond", "file size"});
}

TEST(Safetensors, BrokenHeaders) {
  expect_refused("abc", {"file size 3"});
  expect_refused(safetensors_text("", ""), {"header"});
  expect_refused(safetensors_text("[]", ""), {"header", "'{'"});
  expect_refused(safetensors_text(" {}", ""), {"header", "'{'"});
  expect_refused(safetensors_text("{\"a\":1}", ""), {"header", "'a'"});
  expect_refused(safetensors_text("{\"a\":[1]}", ""), {"header", "'a'"});
  expect_refused(safetensors_text("{\"a\":null}", ""), {"header", "'a'"});
  expect_refused(safetensors_text("{} x", ""), {"header", "JSON"});
  expect_refused(safetensors_text(std::string("{}\0", 3), ""), {"header", "JSON"});
  expect_refused(safetensors_text("{\"__metadata__\":{\"a\":1}}", ""), {"__metadata__", "'a'"});
  expect_refused(safetensors_text("{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", ""),
                 {"'a' twice"});
  expect_refused(safetensors_text("{\"__metadata__\":{},\"__metadata__\":{}}", ""), {"twice"});
  // A million levels: refused at the second, with no recursion.
  std::string deep = "{\"a\":";
  for (int i = 0; i < 1'000'000; ++i) deep += "[";
  expect_refused(safetensors_text(deep, ""), {"header", "'a'"});
  // Names are made printable in messages.
  expect_refused(safetensors_text("{\"a\\u0001\\n\":1}", ""), {"'a\\x01\\x0a'"});
}

TEST(Safetensors, NotAFileThatCanBeRead) {
  const TempFolder folder;
  const auto open = [](const std::filesystem::path& path) {
    return [path] { SafetensorsFile file(path); };
  };
  const std::filesystem::path missing = folder.path() / "missing.safetensors";
  expect_error(ErrorCode::io, {missing.string(), "No such file"}, open(missing));
  expect_error(ErrorCode::io, {folder.path().string(), "folder"}, open(folder.path()));
  expect_error(ErrorCode::io, {"empty"}, open(folder.write("empty.safetensors", "")));
  const std::filesystem::path fifo = folder.path() / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  expect_error(ErrorCode::io, {"regular file"}, open(fifo));
  if (::geteuid() != 0) {  // root reads everything
    const std::filesystem::path secret = folder.write("secret.safetensors", "x");
    std::filesystem::permissions(secret, std::filesystem::perms::none);
    expect_error(ErrorCode::io, {"Permission"}, open(secret));
  }
}

}  // namespace
}  // namespace fusedmoe::checkpoint
