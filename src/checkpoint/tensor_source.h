// Named tensors of a checkpoint, whatever container holds them. safetensors.h reads one file,
// sharded.h several, gguf.h the other container.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fusedmoe::checkpoint {

// Element types as stored, named as in safetensors, and those that only GGUF has, named as in ggml:
// blocks of elements that share scales.
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
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q8_0,
  q8_1,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  q8_k,
  iq2_xxs,
  iq2_xs,
  iq3_xxs,
  iq1_s,
  iq4_nl,
  iq3_s,
  iq2_s,
  iq4_xs,
  iq1_m,
  tq1_0,
  tq2_0,
  mxfp4,
  nvfp4,
};

// "BF16" and so on.
const char* to_string(TensorType type) noexcept;
// A type of safetensors in exactly that spelling, or nothing.
std::optional<TensorType> parse_tensor_type(std::string_view name) noexcept;
// The type that ggml gives this number, or nothing.
std::optional<TensorType> ggml_tensor_type(std::uint32_t number) noexcept;

// What is stored as a whole: rows hold whole blocks.
struct TypeBlock {
  std::int64_t elements = 1;
  std::int64_t bytes = 1;
};
TypeBlock block_of(TensorType type) noexcept;
// Of a type of safetensors.
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
