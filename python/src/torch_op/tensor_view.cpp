#include "torch_op/tensor_view.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <optional>

#include "fusedmoe/error.h"

namespace fusedmoe::torch_op {
namespace {

[[noreturn]] void refuse(const char* name, const std::string& expected, const std::string& got,
                         const std::string& remedy) {
  throw Error(ErrorCode::invalid_argument,
              std::string(name) + ": expected " + expected + ", got " + got + "; " + remedy);
}

std::int32_t dtype_of(const Tensor& tensor) {
  std::int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

std::optional<DType> to_dtype(std::int32_t dtype) {
  static const std::array<std::int32_t, 9> kTorch = {
      aoti_torch_dtype_float32(), aoti_torch_dtype_float16(), aoti_torch_dtype_bfloat16(),
      aoti_torch_dtype_int32(),   aoti_torch_dtype_int64(),   aoti_torch_dtype_float64(),
      aoti_torch_dtype_int8(),    aoti_torch_dtype_int16(),   aoti_torch_dtype_uint8()};
  const auto* const found = std::find(kTorch.begin(), kTorch.end(), dtype);
  if (found == kTorch.end()) return std::nullopt;
  return static_cast<DType>(found - kTorch.begin());  // in the order of DType
}

std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(tensor.size(i));
  }
  return text + "]";
}

void check_on_cpu(const char* name, const Tensor& tensor) {
  if (tensor.is_cpu()) return;
  refuse(name, "a tensor on the CPU", "one on another device", "move it, or build a plan there");
}

// What the stable ABI has no direct way to. The call takes the handle over.
AOTITorchError call_with(const Tensor& tensor, const char* name, StableIValue& result) {
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor.get(), &handle));
  result = torch::stable::detail::from(handle);
  return torch_call_dispatcher(name, "", &result, TORCH_ABI_VERSION);
}

// 137 ns on a 2.6 GHz Zen 4, most of it the dispatcher's search for the name.
std::optional<std::int64_t> version_of(const Tensor& tensor) {
  StableIValue result{};
  // It throws inside PyTorch for tensors made in inference mode.
  if (call_with(tensor, "aten::_version", result) != AOTI_TORCH_SUCCESS) return std::nullopt;
  return torch::stable::detail::to<std::int64_t>(result);
}

}  // namespace

MatrixView to_matrix(const char* name, const Tensor& tensor) {
  check_on_cpu(name, tensor);
  const std::optional<DType> dtype = to_dtype(dtype_of(tensor));
  if (!dtype) refuse(name, "a floating-point or integer dtype", "another", "cast it");
  if (tensor.dim() != 2) refuse(name, "2 dimensions", shape_text(tensor), "reshape it");
  const std::int64_t rows = tensor.size(0);
  const std::int64_t columns = tensor.size(1);
  if (columns > 1 && rows > 0 && tensor.stride(1) != 1) {
    refuse(name, "a contiguous last dimension",
           shape_text(tensor) + " with stride " + std::to_string(tensor.stride(1)),
           "pass .contiguous()");
  }
  // The stride of a single row says nothing.
  return {tensor.data_ptr(), *dtype, rows, columns, rows > 1 ? tensor.stride(0) : columns};
}

std::span<const std::int32_t> to_map(const char* name, const Tensor& tensor) {
  if (dtype_of(tensor) != aoti_torch_dtype_int32() || tensor.dim() != 1) {
    refuse(name, "int32 [num_experts]", "another dtype or shape", "cast it");
  }
  const std::span<std::byte> bytes = to_bytes(name, tensor);
  return {reinterpret_cast<const std::int32_t*>(bytes.data()), bytes.size() / sizeof(std::int32_t)};
}

std::span<std::byte> to_bytes(const char* name, const Tensor& tensor) {
  check_on_cpu(name, tensor);
  if (!tensor.is_contiguous()) {
    refuse(name, "contiguous memory", shape_text(tensor) + " with gaps", "pass .contiguous()");
  }
  const auto bytes =
      static_cast<std::size_t>(tensor.numel()) * static_cast<std::size_t>(tensor.element_size());
  return {static_cast<std::byte*>(tensor.data_ptr()), bytes};
}

Tensor alias_of(const Tensor& tensor) {
  StableIValue result{};
  STABLE_TORCH_ERROR_CODE_CHECK(call_with(tensor, "aten::detach", result));
  return torch::stable::detail::to<Tensor>(result);
}

Fingerprint Fingerprint::of(const Tensor& tensor) {
  Fingerprint print;
  print.data = tensor.data_ptr();
  print.version = version_of(tensor);
  print.dtype = dtype_of(tensor);
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &print.device_type));
  print.device_index = tensor.get_device_index();
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  print.sizes.assign(sizes.begin(), sizes.end());
  print.strides.assign(strides.begin(), strides.end());
  return print;
}

bool Fingerprint::fits(const Tensor& tensor, bool contents) const {
  if (tensor.data_ptr() != data || dtype_of(tensor) != dtype) return false;
  std::int32_t type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  if (type != device_type || tensor.get_device_index() != device_index) return false;
  const auto now = tensor.sizes();
  const auto steps = tensor.strides();
  if (!std::equal(now.begin(), now.end(), sizes.begin(), sizes.end()) ||
      !std::equal(steps.begin(), steps.end(), strides.begin(), strides.end())) {
    return false;
  }
  // Not asked where there was none: that throws and catches an exception inside PyTorch.
  return !contents || !version || version_of(tensor) == version;
}

bool Fingerprint::same_shape(const Fingerprint& other) const {
  return dtype == other.dtype && device_type == other.device_type &&
         device_index == other.device_index && sizes == other.sizes && strides == other.strides;
}

}  // namespace fusedmoe::torch_op
