// The experts' matrices of one layer, found and checked, and what gives one expert at a time of
// them. How they were found is in layer_reader.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "checkpoint/storage_layouts.h"
#include "checkpoint/tensor_source.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::checkpoint {

// One part of a matrix for all experts: a stack, or an address for each.
class PartBytes {
 public:
  PartBytes() = default;
  PartBytes(const std::byte* stack, std::int64_t bytes_per_expert)
      : stack_(stack), stride_(bytes_per_expert), present_(true) {}
  explicit PartBytes(std::vector<const std::byte*> experts)
      : experts_(std::move(experts)), present_(true) {}

  bool present() const noexcept { return present_; }
  const std::byte* at(std::int64_t expert) const {
    if (experts_.empty()) return stack_ + expert * stride_;
    return experts_[static_cast<std::size_t>(expert)];
  }

 private:
  const std::byte* stack_ = nullptr;
  std::int64_t stride_ = 0;
  std::vector<const std::byte*> experts_;
  bool present_ = false;
};

// Memory for what has to be converted of one expert.
class ExpertBuffers {
 public:
  std::byte* add(std::int64_t bytes);

 private:
  std::vector<std::unique_ptr<std::byte[]>> blocks_;
};

struct StoredMatrix {
  WeightTensor shape = {};  // with all experts and the scales' layout, without addresses
  Conversion conversion = Conversion::none;
  int zero_offset = 0;
  std::array<PartBytes, kNumParts> parts = {};
  // [E] each, or empty.
  std::vector<float> globals = {};       // as they multiply
  std::vector<float> factors = {};       // what scales of f16 are multiplied by; never all 1
  std::vector<float> input_scales = {};  // not used in a16

  const PartBytes& part(Part which) const { return parts[static_cast<std::size_t>(which)]; }
  bool empty() const noexcept { return shape.empty(); }
  // Whether it can be given as a stack of all experts, in place.
  bool in_place() const noexcept;
  bool converts() const noexcept { return conversion != Conversion::none; }
  // All experts; for in_place().
  WeightTensor stack() const;
  // Views that this object or `buffers` keep alive.
  WeightTensor expert(std::int64_t index, ExpertBuffers& buffers) const;

  // True for a stack.
  bool stacked = false;
};

struct StoredBias {
  const std::byte* data = nullptr;  // [E, size]
  DType dtype = DType::f32;
  std::int64_t size = 0;

  bool empty() const noexcept { return size == 0; }
};

struct ExpertTable {
  std::shared_ptr<TensorSource> source;  // keeps the maps alive
  std::int64_t num_experts = 0;
  StoredMatrix w13, w13_up, w2;
  StoredBias w13_bias, w13_up_bias, w2_bias;
  std::vector<float> w13_input_scales;  // [E]: the larger one of gate's and up's
};

// As whole stacks where nothing has to be converted or moved, else with a source. Keeps `table`.
ExpertWeights expert_weights(std::shared_ptr<const ExpertTable> table);

}  // namespace fusedmoe::checkpoint
