// The tensors of one MoE layer, sorted into matrices, become a MoeLayer. How one matrix is read is
// in matrix_reader.h, which names belong to a layer in layer_reader.cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "checkpoint/layer_reader.h"
#include "checkpoint/model_config.h"
#include "checkpoint/storage_layouts.h"
#include "checkpoint/tensor_source.h"

namespace fusedmoe::checkpoint {

// A tensor's name and where it belongs (ExpertName).
struct Match {
  std::size_t pattern = 0;
  std::size_t tensor = 0;
  Part part = Part::data;
  std::int64_t expert = 0;
  std::string_view name = {};
};
using Matches = std::vector<Match>;

// `matches`: every tensor of the layer's experts. Throws Error naming what is missing, too much, or
// does not fit the config.
MoeLayer build_layer(const ModelConfig& model, const LayerConfig& layer,
                     const std::shared_ptr<TensorSource>& source, Matches matches);

}  // namespace fusedmoe::checkpoint
