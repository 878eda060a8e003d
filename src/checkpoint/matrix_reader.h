// The tensors of one matrix of a layer's experts, checked against the config and the layout, become
// a StoredMatrix. Which tensors these are is found in layer_reader.cpp.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/families.h"
#include "checkpoint/quant_config.h"
#include "checkpoint/storage_layouts.h"
#include "checkpoint/stored_matrix.h"
#include "checkpoint/tensor_source.h"
#include "fusedmoe/error.h"

namespace fusedmoe::checkpoint {

// Thrown inside a layer and turned into a Problem at its border.
[[noreturn]] void fail_tensor(ErrorCode code, std::string_view file, std::string_view name,
                              const std::string& text);

struct MatrixTensors {
  // By part: none, one (a stack), or one for each expert in order.
  std::array<std::vector<const Tensor*>, kNumParts> parts = {};
  const StorageLayout* layout = nullptr;
  // The part of `parts` that holds the data: Part::plain for unquantised weights with a name of
  // their own.
  Part data = Part::data;
};

struct MatrixContext {
  ExpertStyle style = ExpertStyle::per_expert;
  std::int64_t num_experts = 0;
  Extent extent = {};
  QuantNumbers numbers = {};
  std::string_view config_file = {};  // where the sizes stand
};

// Throws Error naming file and tensor. Adds to `notes`.
StoredMatrix read_stored_matrix(const MatrixTensors& tensors, const MatrixContext& context,
                                std::vector<std::string>& notes);

// Throws unless the tensor has that shape, by the sizes in `config_file`.
void check_shape(const Tensor& tensor, const std::vector<std::int64_t>& expected,
                 std::string_view config_file);

}  // namespace fusedmoe::checkpoint
