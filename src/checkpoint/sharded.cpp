// Implementation of sharded.h.
#include "checkpoint/sharded.h"

#include <system_error>

#include "checkpoint/golden.h"
#include "checkpoint/json_value.h"
#include "checkpoint/text.h"

namespace fusedmoe::checkpoint {
namespace {

constexpr std::size_t kMaxIndexBytes = 100'000'000;
constexpr std::size_t kMaxNamedShards = 5;
constexpr std::string_view kExtension = ".safetensors";

// A name inside the folder and nothing else. The file itself may be a symbolic link: caches of
// model hubs keep the data elsewhere.
void check_shard_name(const std::string& name, const std::string& tensor,
                      const std::string& index_file) {
  const auto fail = [&](const char* reason) {
    fail_io(index_file, "weight_map places tensor " + quote(tensor) + " in " + quote(name) +
                            ", which " + reason +
                            "; expected the name of a .safetensors file in the same folder");
  };
  if (name.find_first_of("/\\") != std::string::npos) fail("leads out of the checkpoint's folder");
  for (const char c : name) {
    if (static_cast<unsigned char>(c) < 0x20) fail("has control characters");
  }
  if (!name.ends_with(kExtension) || name.size() == kExtension.size() || name[0] == '.') {
    fail("is no safetensors file");
  }
  if (is_golden_file(name)) fail("is a golden file, never weights");
}

}  // namespace

ShardedSource::ShardedSource(const std::filesystem::path& index_file)
    : index_file_(index_file.string()) {
  const JsonValue root = parse_json(read_text_file(index_file, kMaxIndexBytes), index_file_);
  const JsonValue* const map = root.find("weight_map");
  const auto* const members = map == nullptr ? nullptr : map->as<JsonObject>();
  if (members == nullptr) {
    fail_io(index_file_, "has no object weight_map that places tensors in files");
  }
  if (members->keys.empty())
    fail_io(index_file_, "weight_map is empty: no tensor is placed in a file");
  const std::filesystem::path folder = index_file.parent_path();
  placing_.reserve(members->keys.size());
  for (std::size_t i = 0; i < members->keys.size(); ++i) {
    const std::string& tensor = members->keys[i];
    const JsonValue& value = members->values[i];
    const auto* const name = value.as<std::string>();
    if (name == nullptr) {
      fail_io(index_file_, "weight_map: tensor " + quote(tensor) + " holds " + to_text(value) +
                               "; expected the name of a file");
    }
    const auto known = shards_.find(*name);
    if (known != shards_.end()) {
      placing_.emplace(tensor, &known->second);
      continue;
    }
    check_shard_name(*name, tensor, index_file_);
    Shard& shard = shards_[*name];
    shard.path = folder / *name;
    placing_.emplace(tensor, &shard);
  }

  std::string missing;
  std::size_t num_missing = 0;
  for (const auto& [name, shard] : shards_) {
    std::error_code error;
    if (std::filesystem::exists(shard.path, error)) continue;
    if (++num_missing > kMaxNamedShards) continue;
    missing += (missing.empty() ? "" : ", ") + quote(name);
  }
  if (num_missing > kMaxNamedShards) {
    missing += " and " + std::to_string(num_missing - kMaxNamedShards) + " more";
  }
  if (num_missing > 0) {
    fail_io(index_file_,
            "files of the checkpoint are missing from its folder: " + missing + "; fetch them");
  }
}

std::vector<std::string_view> ShardedSource::names() const {
  std::vector<std::string_view> result;
  result.reserve(placing_.size());
  for (const auto& [tensor, shard] : placing_) result.emplace_back(tensor);
  return result;
}

const Tensor* ShardedSource::find(std::string_view name) {
  const auto placed = placing_.find(std::string(name));
  if (placed == placing_.end()) return nullptr;
  Shard& shard = *placed->second;
  if (shard.file == nullptr) shard.file = std::make_unique<SafetensorsFile>(shard.path);
  const Tensor* const tensor = shard.file->find(name);
  if (tensor == nullptr) {
    fail_io(shard.file->location(), "tensor " + quote(name) + " is missing, although " +
                                        quote(index_file_) + " places it here");
  }
  return tensor;
}

}  // namespace fusedmoe::checkpoint
