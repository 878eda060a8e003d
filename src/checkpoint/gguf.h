// One GGUF file, version 2 or 3: header, metadata and tensors, checked in full before any tensor is
// handed out. What the metadata says of the model is in gguf_config.h.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/json_value.h"
#include "checkpoint/mapped_file.h"
#include "checkpoint/tensor_source.h"

namespace fusedmoe::checkpoint {

struct GgufContent {
  // By offset, without overlap. Shapes are outermost first, as everywhere here; the file has them
  // the other way round.
  std::vector<Tensor> tensors;
  // An object: keys and values as they stand in the file. Arrays of strings (vocabularies) and long
  // arrays are checked and left out.
  JsonValue metadata;
};

// Reads from memory; `file` is the name that messages and tensors carry. Throws Error{io} naming
// file, key or tensor, and offset for anything that is not a sound file, and Error{unsupported} for
// another version, byte order, or type number. Both arguments must outlive the result.
GgufContent parse_gguf(std::span<const std::byte> bytes, std::string_view file);

class GgufFile final : public TensorSource {
 public:
  // Throws as parse_gguf.
  explicit GgufFile(const std::filesystem::path& path);
  // A file in memory that outlives this object; `location` is its name in messages.
  GgufFile(std::span<const std::byte> bytes, std::string location);

  const std::string& location() const noexcept override { return location_; }
  std::vector<std::string_view> names() const override;
  const Tensor* find(std::string_view name) override;

  const std::vector<Tensor>& tensors() const noexcept { return content_.tensors; }
  const JsonValue& metadata() const noexcept { return content_.metadata; }

 private:
  void index_names();

  std::optional<MappedFile> file_;
  std::string location_;
  GgufContent content_;
  std::unordered_map<std::string_view, const Tensor*> by_name_;
};

}  // namespace fusedmoe::checkpoint
