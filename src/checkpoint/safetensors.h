// One safetensors file: parsed and checked in full before any tensor is handed out. Several files
// with an index are in sharded.h.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/mapped_file.h"
#include "checkpoint/tensor_source.h"

namespace fusedmoe::checkpoint {

struct SafetensorsContent {
  std::vector<Tensor> tensors;  // by offset; they cover the data without gap or overlap
  std::map<std::string, std::string> metadata;
};

// Reads from memory; `file` is the name that messages and tensors carry. Throws Error{io} naming
// file, tensor and offsets for anything that is not a sound file. Both arguments must outlive the
// result.
SafetensorsContent parse_safetensors(std::span<const std::byte> bytes, std::string_view file);

class SafetensorsFile final : public TensorSource {
 public:
  // Throws Error{io}.
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::string& location() const noexcept override { return file_.path(); }
  std::vector<std::string_view> names() const override;
  const Tensor* find(std::string_view name) override;

  const std::vector<Tensor>& tensors() const noexcept { return content_.tensors; }
  const std::map<std::string, std::string>& metadata() const noexcept { return content_.metadata; }

 private:
  MappedFile file_;
  SafetensorsContent content_;
  std::unordered_map<std::string_view, const Tensor*> by_name_;
};

}  // namespace fusedmoe::checkpoint
