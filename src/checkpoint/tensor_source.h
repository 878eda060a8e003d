// Named tensors of a checkpoint, whatever container holds them. safetensors.h reads one file,
// sharded.h several; a further container (GGUF) is one more class here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fusedmoe::checkpoint {

// Element types as stored, named as in safetensors.
enum class TensorType : std::uint8_t {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64,
};

// "BF16" and so on.
const char* to_string(TensorType type) noexcept;
// Exactly that spelling, or nothing.
std::optional<TensorType> parse_tensor_type(std::string_view name) noexcept;
std::int64_t bits_per_element(TensorType type) noexcept;

// A view; the source that gave it keeps the bytes and the file's name alive.
struct Tensor {
  std::string name;
  TensorType type = TensorType::u8;
  std::vector<std::int64_t> shape;
  const std::byte* data = nullptr;  // any alignment
  std::int64_t bytes = 0;
  std::int64_t offset = 0;  // of the first byte in its file
  std::string_view file;
};

// Not for concurrent use: find may map a file.
class TensorSource {
 public:
  TensorSource() = default;
  TensorSource(const TensorSource&) = delete;
  TensorSource& operator=(const TensorSource&) = delete;
  virtual ~TensorSource() = default;

  // The file that lists the tensors: what a message about a missing one names.
  virtual const std::string& location() const noexcept = 0;
  // Every name, once; valid as long as the source.
  virtual std::vector<std::string_view> names() const = 0;
  // Null when there is no such tensor. Throws Error{io} when its file is broken.
  virtual const Tensor* find(std::string_view name) = 0;
};

}  // namespace fusedmoe::checkpoint
