// Expected results beside a checkpoint: golden*.safetensors with the input of a layer, the routing
// and the output of a reference. They are never read as weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "fusedmoe/tensor.h"

namespace fusedmoe::checkpoint {

bool is_golden_file(const std::filesystem::path& path);

// A matrix that owns its bytes, aligned for its dtype.
struct GoldenMatrix {
  DType dtype = DType::f32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::vector<std::byte> data = {};

  bool empty() const noexcept { return data.empty(); }
  ConstMatrixView view() const { return {data.data(), dtype, rows, columns}; }
};

struct Golden {
  std::filesystem::path file = {};
  std::int64_t layer = 0;
  GoldenMatrix hidden = {};         // [num_tokens, hidden_size]; f32, f16 or bf16
  GoldenMatrix topk_ids = {};       // [num_tokens, top_k]; i32 or i64
  GoldenMatrix topk_weights = {};   // [num_tokens, top_k]; f32
  GoldenMatrix expected = {};       // [num_tokens, hidden_size]; f32
  GoldenMatrix expected_hf = {};    // the same from the model's own code; may be empty
  GoldenMatrix router_logits = {};  // [num_tokens, num_experts]; f32; may be empty
  // Sum and sum of absolute values of the dequantised gate, up and down (up, down without a gate)
  // of each expert: [num_experts, num_matrices, 2]; may be empty.
  std::vector<double> weight_checksums = {};
  std::int64_t num_experts = 0;   // of weight_checksums
  std::int64_t num_matrices = 0;  // of weight_checksums
};

// The goldens in the folder of `checkpoint` (a folder, or a file in it), by layer. Throws
// Error{io} for one that is broken.
std::vector<Golden> read_goldens(const std::filesystem::path& checkpoint);
Golden read_golden(const std::filesystem::path& file);

}  // namespace fusedmoe::checkpoint
