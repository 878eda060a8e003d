// A checkpoint folder whose model.safetensors.index.json places tensors in several safetensors
// files. A shard is mapped when the first of its tensors is asked for.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/safetensors.h"
#include "checkpoint/tensor_source.h"

namespace fusedmoe::checkpoint {

class ShardedSource final : public TensorSource {
 public:
  // Throws Error{io} when the index is broken, names a file outside its folder or a golden, or
  // when shards are missing.
  explicit ShardedSource(const std::filesystem::path& index_file);

  const std::string& location() const noexcept override { return index_file_; }
  std::vector<std::string_view> names() const override;
  // Throws Error{io} when the shard is broken or lacks the tensor that the index places in it.
  const Tensor* find(std::string_view name) override;

  bool has_shard(const std::string& file_name) const { return shards_.count(file_name) > 0; }

 private:
  struct Shard {
    std::filesystem::path path;
    std::unique_ptr<SafetensorsFile> file;  // null until needed
  };

  std::string index_file_;
  std::map<std::string, Shard> shards_;              // by file name
  std::unordered_map<std::string, Shard*> placing_;  // tensor -> shard
};

}  // namespace fusedmoe::checkpoint
