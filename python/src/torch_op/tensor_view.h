// torch tensors through PyTorch's stable ABI as views of the library.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fusedmoe/tensor.h"

namespace fusedmoe::torch_op {

using Tensor = torch::stable::Tensor;

// Throws Error{invalid_argument} naming `name` for what is no 2-D tensor on the CPU with a
// contiguous last dimension, or has a dtype that no view has.
MatrixView to_matrix(const char* name, const Tensor& tensor);

// The entries of an expert map: int32 [num_experts], contiguous, on the CPU.
std::span<const std::int32_t> to_map(const char* name, const Tensor& tensor);

// The bytes of a contiguous tensor of any dtype on the CPU.
std::span<std::byte> to_bytes(const char* name, const Tensor& tensor);

// Another tensor on the same memory: keeps it when `tensor` is given other memory
// (`tensor.data = other`), so that nothing new can lie there.
Tensor alias_of(const Tensor& tensor);

// What can change about a tensor without its owner telling: compared before each call.
struct Fingerprint {
  const void* data = nullptr;
  // PyTorch's count of in-place changes; `x.data.copy_()` is not among them. Tensors made in
  // inference mode have none.
  std::optional<std::int64_t> version = {};
  std::int32_t dtype = 0;
  std::int32_t device_type = 0;
  std::int32_t device_index = 0;
  std::vector<std::int64_t> sizes = {};
  std::vector<std::int64_t> strides = {};

  static Fingerprint of(const Tensor& tensor);
  // Allocates nothing. `contents`: whether in-place changes count.
  bool fits(const Tensor& tensor, bool contents) const;
  // Everything but where it lies and how often it changed.
  bool same_shape(const Fingerprint& other) const;
};

}  // namespace fusedmoe::torch_op
