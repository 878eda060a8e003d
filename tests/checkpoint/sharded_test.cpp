// The index of a sharded checkpoint: followed, but never out of its folder.
#include "checkpoint/sharded.h"

#include <gtest/gtest.h>

#include "test_files.h"

namespace fusedmoe::checkpoint {
namespace {

constexpr char kIndex[] = "model.safetensors.index.json";

void expect_refused(const std::string& index, const std::vector<std::string>& parts) {
  SCOPED_TRACE(index);
  const TempFolder folder;
  folder.write("a.safetensors", make_safetensors({{"x", {2}}}));
  expect_error(ErrorCode::io, parts,
               [path = folder.write(kIndex, index)] { ShardedSource source(path); });
}

TEST(Sharded, FollowsTheIndex) {
  const TempFolder folder;
  folder.write("a.safetensors", make_safetensors({{"x", {2}}}));
  folder.write("b b.safetensors", make_safetensors({{"y", {3}, "F32"}}));
  ShardedSource source(
      folder.write(kIndex, R"({"weight_map":{"x":"a.safetensors","y":"b b.safetensors"}})"));
  EXPECT_EQ(source.names().size(), 2U);
  EXPECT_EQ(source.find("x")->bytes, 4);
  EXPECT_EQ(source.find("y")->bytes, 12);
  EXPECT_EQ(source.find("z"), nullptr);
  EXPECT_TRUE(source.has_shard("a.safetensors"));
}

TEST(Sharded, ShardsAreMappedWhenNeeded) {
  const TempFolder folder;
  folder.write("a.safetensors", make_safetensors({{"x", {2}}}));
  folder.write("broken.safetensors", "broken");
  ShardedSource source(
      folder.write(kIndex, R"({"weight_map":{"x":"a.safetensors","y":"broken.safetensors"}})"));
  EXPECT_NE(source.find("x"), nullptr);
  expect_error(ErrorCode::io, {"broken.safetensors"}, [&] { source.find("y"); });
}

TEST(Sharded, ATensorThatItsShardLacks) {
  const TempFolder folder;
  folder.write("a.safetensors", make_safetensors({{"x", {2}}}));
  ShardedSource source(folder.write(kIndex, R"({"weight_map":{"y":"a.safetensors"}})"));
  expect_error(ErrorCode::io, {"a.safetensors", "'y'", kIndex}, [&] { source.find("y"); });
}

TEST(Sharded, LinksToFilesElsewhereAreFollowed) {
  const TempFolder blobs;
  const TempFolder folder;
  const auto blob = blobs.write("0123abcd", make_safetensors({{"x", {2}}}));
  std::filesystem::create_symlink(blob, folder.path() / "a.safetensors");
  ShardedSource source(folder.write(kIndex, R"({"weight_map":{"x":"a.safetensors"}})"));
  EXPECT_NE(source.find("x"), nullptr);
}

TEST(Sharded, NamesThatLeaveTheFolder) {
  for (const char* const name :
       {"../a.safetensors", "/a.safetensors", "sub/a.safetensors", "..", "..\\\\a.safetensors"}) {
    expect_refused(std::string(R"({"weight_map":{"x":")") + name + "\"}}", {kIndex, "'x'"});
  }
  expect_refused(R"({"weight_map":{"x":""}})", {"'x'"});
  expect_refused(R"({"weight_map":{"x":"a.bin"}})", {"'a.bin'"});
  expect_refused(R"({"weight_map":{"x":"a\u0000.safetensors"}})", {"control characters"});
  expect_refused(R"({"weight_map":{"x":"golden.safetensors"}})", {"golden", "never weights"});
}

TEST(Sharded, BrokenIndexes) {
  expect_refused("{", {kIndex, "JSON"});
  expect_refused("[]", {kIndex, "weight_map"});
  expect_refused("{}", {kIndex, "weight_map"});
  expect_refused(R"({"weight_map":[]})", {kIndex, "weight_map"});
  expect_refused(R"({"weight_map":{}})", {kIndex, "empty"});
  expect_refused(R"({"weight_map":{"x":1}})", {kIndex, "'x'"});
  expect_refused(R"({"weight_map":{"x":"a.safetensors","x":"b.safetensors"}})", {"'x'", "twice"});
  expect_refused("{\"weight_map\":{\"\xff\":\"a.safetensors\"}}", {kIndex, "JSON"});
  expect_refused(R"({"weight_map":{"x":"b.safetensors","y":"c.safetensors","z":"a.safetensors"}})",
                 {kIndex, "'b.safetensors', 'c.safetensors'"});
  std::string many = "{\"weight_map\":{";
  for (int i = 0; i < 9; ++i) {
    many += (i > 0 ? ",\"" : "\"") + std::to_string(i) + "\":\"s" + std::to_string(i) +
            ".safetensors\"";
  }
  expect_refused(many + "}}", {"'s0.safetensors'", "and 4 more"});
}

}  // namespace
}  // namespace fusedmoe::checkpoint
