// From numbers to weight formats and back: what fusedmoe/_quantize.py makes arrays of.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "bindings.h"
#include "fields.h"
#include "formats/check.h"
#include "formats/float_bits.h"
#include "formats/format.h"
#include "formats/quantize.h"
#include "scales_from_python.h"
#include "tensor_from_python.h"

namespace fusedmoe::python {
namespace {

constexpr const char* kName = "tensor";

// A one-dimensional NumPy array that owns the vector; None for an empty one.
template <class T, class Element = T>
nb::object to_numpy(std::vector<T> values) {
  if (values.empty()) return nb::none();
  auto* const held = new std::vector<T>(std::move(values));
  const nb::capsule owner(
      held, [](void* vector) noexcept { delete static_cast<std::vector<T>*>(vector); });
  return nb::cast(
      nb::ndarray<nb::numpy, Element, nb::ndim<1>>(held->data(), {held->size()}, owner));
}

// [experts, outputs, inputs] as dense f32.
std::vector<float> to_floats(const Array& array) {
  check_on_cpu(kName, array);
  const bool known = array.element == Element::f32 || array.element == Element::f16 ||
                     array.element == Element::bf16;
  if (!known || array.num_dims != 3) {
    refuse(kName, "float32, float16 or bfloat16 [experts, outputs, inputs]", array.text(),
           array.num_dims != 3 ? "reshape it" : "cast it");
  }
  std::vector<float> values;
  values.reserve(static_cast<std::size_t>(array.size()));
  const auto* const data = static_cast<const std::byte*>(array.data);
  for (std::int64_t e = 0; e < array.shape[0]; ++e) {
    for (std::int64_t n = 0; n < array.shape[1]; ++n) {
      for (std::int64_t k = 0; k < array.shape[2]; ++k) {
        const std::byte* at =
            data +
            array.element_bytes * (e * array.stride[0] + n * array.stride[1] + k * array.stride[2]);
        if (array.element == Element::f32) {
          float value;
          std::memcpy(&value, at, sizeof value);
          values.push_back(value);
        } else {
          std::uint16_t bits;
          std::memcpy(&bits, at, sizeof bits);
          values.push_back(array.element == Element::f16 ? f16_to_f32(bits) : bf16_to_f32(bits));
        }
      }
    }
  }
  return values;
}

nb::tuple quantize_array(nb::handle values, nb::handle description, bool zero_points) {
  std::vector<nb::object> owners;
  const Array array = to_array(kName, values);
  const WeightTensor tensor = to_tensor(kName, description, Device::cpu(), owners);
  QuantizedStack stack;
  {
    const nb::gil_scoped_release release;
    const std::vector<float> floats = to_floats(array);
    check_weight_tensor(kName, tensor, true);
    if (zero_points && !format_info(tensor.format).scales.zero_points) {
      refuse("zero_points", std::string("False for ") + to_string(tensor.format), "True",
             "its codes are signed");
    }
    stack = quantize(floats, tensor, {.zero_points = zero_points});
  }
  return nb::make_tuple(to_numpy<std::byte, std::uint8_t>(std::move(stack.data)),
                        to_numpy<std::byte, std::uint8_t>(std::move(stack.scales)),
                        to_numpy(std::move(stack.zero_points)), to_numpy(std::move(stack.global)),
                        scale_dims(tensor), global_dims(tensor));
}

nb::object dequantize_array(nb::handle object) {
  std::vector<nb::object> owners;
  const WeightTensor tensor = to_tensor(kName, object, Device::cpu(), owners);
  std::vector<float> values;
  {
    const nb::gil_scoped_release release;
    check_weight_tensor(kName, tensor, false);
    values = dequantize(tensor);
  }
  return to_numpy(std::move(values)).attr("reshape")(tensor.experts, tensor.outputs, tensor.inputs);
}

}  // namespace

void bind_quantize(nb::module_& module) {
  // fusedmoe/_quantize.py makes the functions of the package of these.
  module.def("_quantize", &quantize_array, nb::arg("values"), nb::arg("description"),
             nb::arg("zero_points"),
             nb::sig("def _quantize(values: Array, description: WeightTensor, zero_points: bool) "
                     "-> tuple[Any, ...]"));
  module.def("_dequantize", &dequantize_array, nb::arg("tensor"),
             nb::sig("def _dequantize(tensor: WeightTensor | Array) -> Any"));
  module.def(
      "_default_scales",
      [](nb::handle format) {
        const WeightScales scales = default_scales(to_enum<WeightFormat>("format", format));
        return nb::make_tuple(to_string(scales.layout), to_string(scales.type), scales.group_size);
      },
      nb::arg("format"), nb::sig("def _default_scales(format: str) -> tuple[str, str, int]"));
}

}  // namespace fusedmoe::python
