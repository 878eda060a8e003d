// A model's checkpoint on disk: a folder with config.json and safetensors, a bare .safetensors
// file, or a GGUF file. Gives each MoE layer's config, weights and router: views into mapped files,
// and one expert at a time where weights have to be rearranged. A further container is one more
// TensorSource; a further family is one row of families.cpp, a further way of storing a quantised
// matrix one row of storage_layouts.cpp.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/layer_reader.h"
#include "checkpoint/model_config.h"
#include "checkpoint/tensor_source.h"

namespace fusedmoe::checkpoint {

class Checkpoint {
 public:
  // `config`: where config.json is, when it is not beside the weights; a GGUF file needs none.
  // Throws Error{io} for what is broken or contradicts itself and Error{unsupported} for what is
  // sound but not read.
  static Checkpoint open(const std::filesystem::path& path,
                         const std::optional<std::filesystem::path>& config = {});

  std::string family() const { return std::string(model_.family->name); }
  const ModelConfig& model() const noexcept { return model_; }
  // Ascending. Views in them live as long as this object.
  const std::vector<MoeLayer>& layers() const noexcept { return layers_; }
  // Null when that layer has no experts.
  const MoeLayer* find_layer(std::int64_t index) const noexcept;

 private:
  Checkpoint(ModelConfig model, std::shared_ptr<TensorSource> source, std::vector<MoeLayer> layers);

  ModelConfig model_;
  std::shared_ptr<TensorSource> source_;
  std::vector<MoeLayer> layers_;
};

struct LayerListing {
  std::int64_t index = 0;
  MoeConfig config = {};
  bool complete = false;  // false: see the problems
  std::vector<WeightFormat> formats = {};
  std::int64_t bytes = 0;
};

struct Listing {
  std::filesystem::path path = {};
  std::string family = {};  // empty when it is not known: no config, or one that is not read
  std::vector<LayerListing> layers = {};
  std::vector<WeightFormat> formats = {};  // of all layers, each once
  std::int64_t bytes = 0;                  // of all experts
  std::int64_t num_tensors = 0;            // of the whole checkpoint
  std::vector<std::string> problems = {};
  std::vector<std::string> notes = {};  // what a user should know, though nothing is wrong
};

// What there is, for people. A bare file without a config is listed without layers. Problems inside
// a checkpoint are collected, not thrown; throws Error{io} only when `path` is not there.
Listing inspect_checkpoint(const std::filesystem::path& path,
                           const std::optional<std::filesystem::path>& config = {});

}  // namespace fusedmoe::checkpoint
