// Implementation of golden.h.
#include "checkpoint/golden.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>
#include <system_error>
#include <tuple>

#include "checkpoint/mapped_file.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/text.h"

namespace fusedmoe::checkpoint {
namespace {

namespace fs = std::filesystem;

std::optional<DType> dtype_of(TensorType type) {
  switch (type) {
    case TensorType::f32:
      return DType::f32;
    case TensorType::f16:
      return DType::f16;
    case TensorType::bf16:
      return DType::bf16;
    case TensorType::i32:
      return DType::i32;
    case TensorType::i64:
      return DType::i64;
    default:
      return std::nullopt;
  }
}

// Empty when the file has no such tensor.
GoldenMatrix read_matrix(SafetensorsFile& file, const char* name,
                         std::initializer_list<DType> dtypes) {
  const Tensor* const tensor = file.find(name);
  if (tensor == nullptr) return {};
  const std::optional<DType> dtype = dtype_of(tensor->type);
  const bool known = dtype && std::find(dtypes.begin(), dtypes.end(), *dtype) != dtypes.end();
  if (!known || tensor->shape.size() != 2) {
    fail_io(file.location(), std::string("tensor '") + name + "' is " + to_string(tensor->type) +
                                 " " + shape_text(tensor->shape) +
                                 "; expected a matrix of a dtype that fits a golden");
  }
  return {*dtype, tensor->shape[0], tensor->shape[1], {tensor->data, tensor->data + tensor->bytes}};
}

GoldenMatrix require_matrix(SafetensorsFile& file, const char* name,
                            std::initializer_list<DType> dtypes) {
  if (file.find(name) == nullptr) {
    fail_io(file.location(), std::string("tensor '") + name + "' is missing; a golden needs it");
  }
  return read_matrix(file, name, dtypes);
}

void expect_size(const SafetensorsFile& file, const char* name, const GoldenMatrix& matrix,
                 std::int64_t rows, std::int64_t columns) {
  if (matrix.rows == rows && matrix.columns == columns) return;
  fail_io(file.location(), std::string("tensor '") + name + "' is [" + std::to_string(matrix.rows) +
                               ", " + std::to_string(matrix.columns) + "]; expected [" +
                               std::to_string(rows) + ", " + std::to_string(columns) + "]");
}

std::int64_t read_layer(const SafetensorsFile& file) {
  const auto entry = file.metadata().find("layer");
  if (entry == file.metadata().end()) {
    fail_io(file.location(), "header: __metadata__ has no key 'layer'; a golden needs it");
  }
  const std::string& text = entry->second;
  std::int64_t layer = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), layer);
  if (error != std::errc() || end != text.data() + text.size() || layer < 0) {
    fail_io(file.location(),
            "header: __metadata__ key 'layer' is " + quote(text) + "; expected a layer's number");
  }
  return layer;
}

void read_checksums(SafetensorsFile& file, Golden& golden) {
  const Tensor* const tensor = file.find("weight_checksums");
  if (tensor == nullptr) return;
  if (tensor->type != TensorType::f64 || tensor->shape.size() != 3 || tensor->shape[2] != 2) {
    fail_io(file.location(),
            "tensor 'weight_checksums' is " + std::string(to_string(tensor->type)) + " " +
                shape_text(tensor->shape) + "; expected F64 [experts, matrices, 2]");
  }
  golden.num_experts = tensor->shape[0];
  golden.num_matrices = tensor->shape[1];
  golden.weight_checksums.resize(static_cast<std::size_t>(tensor->bytes) / sizeof(double));
  if (tensor->bytes == 0) return;
  std::memcpy(golden.weight_checksums.data(), tensor->data,
              static_cast<std::size_t>(tensor->bytes));
}

}  // namespace

bool is_golden_file(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.starts_with("golden") && name.ends_with(".safetensors");
}

Golden read_golden(const fs::path& path) {
  SafetensorsFile file(path);
  Golden golden{.file = path, .layer = read_layer(file)};
  golden.hidden = require_matrix(file, "hidden", {DType::f32, DType::f16, DType::bf16});
  golden.topk_ids = require_matrix(file, "topk_ids", {DType::i32, DType::i64});
  golden.topk_weights = require_matrix(file, "topk_weights", {DType::f32});
  golden.expected = require_matrix(file, "expected", {DType::f32});
  golden.expected_hf = read_matrix(file, "expected_hf", {DType::f32});
  golden.router_logits = read_matrix(file, "router_logits", {DType::f32});
  read_checksums(file, golden);
  const std::int64_t tokens = golden.hidden.rows;
  const std::int64_t hidden_size = golden.hidden.columns;
  expect_size(file, "topk_ids", golden.topk_ids, tokens, golden.topk_ids.columns);
  expect_size(file, "topk_weights", golden.topk_weights, tokens, golden.topk_ids.columns);
  expect_size(file, "expected", golden.expected, tokens, hidden_size);
  if (file.find("expected_hf") != nullptr) {
    expect_size(file, "expected_hf", golden.expected_hf, tokens, hidden_size);
  }
  if (file.find("router_logits") != nullptr) {
    expect_size(file, "router_logits", golden.router_logits, tokens, golden.router_logits.columns);
  }
  return golden;
}

std::vector<Golden> read_goldens(const fs::path& checkpoint) {
  std::error_code error;
  const bool is_folder = fs::is_directory(checkpoint, error);
  fs::path folder = is_folder ? checkpoint : checkpoint.parent_path();
  if (folder.empty()) folder = ".";
  std::vector<Golden> goldens;
  for (const fs::path& entry : list_folder(folder)) {
    if (is_golden_file(entry)) goldens.push_back(read_golden(entry));
  }
  std::sort(goldens.begin(), goldens.end(), [](const Golden& a, const Golden& b) {
    return std::tie(a.layer, a.file) < std::tie(b.layer, b.file);
  });
  return goldens;
}

}  // namespace fusedmoe::checkpoint
