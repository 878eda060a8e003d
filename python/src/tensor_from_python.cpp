#include "tensor_from_python.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <utility>

#include "fields.h"
#include "formats/format.h"
#include "scales_from_python.h"

namespace fusedmoe::python {
namespace {

constexpr std::array kWeightLayouts = {"nk", "kn"};

std::optional<WeightFormat> format_of(Element element) {
  switch (element) {
    case Element::f32:
      return WeightFormat::f32;
    case Element::f16:
      return WeightFormat::f16;
    case Element::bf16:
      return WeightFormat::bf16;
    case Element::fp8_e4m3:
      return WeightFormat::fp8_e4m3;
    case Element::fp8_e5m2:
      return WeightFormat::fp8_e5m2;
    default:
      return std::nullopt;
  }
}

Dtypes dtypes_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::f32:
      return {Element::f32, Element::f32};
    case WeightFormat::f16:
      return {Element::f16, Element::u16};
    case WeightFormat::bf16:
      return {Element::bf16, Element::u16};
    case WeightFormat::fp8_e4m3:
    case WeightFormat::mxfp8:
      return {Element::fp8_e4m3, Element::u8};
    case WeightFormat::fp8_e5m2:
      return {Element::fp8_e5m2, Element::u8};
    case WeightFormat::mxfp4:
    case WeightFormat::nvfp4:
      return {Element::fp4_x2, Element::u8};
    case WeightFormat::int8:
      return {Element::i8, Element::i8};
    default:
      return {Element::u8, Element::u8};
  }
}

// Where rows and experts lie, as the strides of the array say. A transposed view becomes the other
// layout.
void place(const std::string& name, const Array& array, WeightTensor& tensor) {
  if (array.num_dims != 3) {
    refuse(name, "3 dimensions, [experts, outputs, inputs]", array.text(), "reshape it");
  }
  const bool nk = tensor.layout == WeightLayout::nk;
  std::int64_t rows = array.shape[1], columns = array.shape[2];
  std::int64_t row_stride = array.stride[1], column_stride = array.stride[2];
  if (columns > 1 && column_stride != 1 && (row_stride == 1 || rows == 1)) {
    std::swap(rows, columns);
    std::swap(row_stride, column_stride);
    tensor.layout = nk ? WeightLayout::kn : WeightLayout::nk;
  }
  const bool gaps = columns > 1 && column_stride != 1;
  const bool shared = (rows > 1 && row_stride <= 0) || (array.shape[0] > 1 && array.stride[0] <= 0);
  if (array.size() > 0 && (gaps || shared)) {
    refuse(name, "a tensor whose rows are contiguous and apart",
           array.text() + " with other strides", "pass .contiguous()");
  }
  tensor.experts = array.shape[0];
  tensor.outputs = tensor.layout == WeightLayout::nk ? rows : columns;
  tensor.inputs = tensor.layout == WeightLayout::nk ? columns : rows;
  tensor.row_stride = rows > 1 ? row_stride : 0;
  tensor.expert_stride = array.shape[0] > 1 ? array.stride[0] : 0;
  tensor.data = array.data;
}

// The same for formats that put several elements into their bytes: [experts, outputs, bytes of a
// row], the last one also as [blocks, bytes of a block].
void place_packed(const std::string& name, const Array& array, std::int64_t inputs,
                  WeightTensor& tensor) {
  const FormatInfo& format = format_info(tensor.format);
  const std::string bytes_of_row = std::to_string(format.block_bytes) + " for each " +
                                   std::to_string(format.block_elements) + " inputs";
  if (array.num_dims != 3 && array.num_dims != 4) {
    refuse(name, "[experts, outputs, bytes of a row], " + bytes_of_row, array.text(), "reshape it");
  }
  if (tensor.layout == WeightLayout::kn) {
    refuse(name + ".layout", std::string("nk for ") + format.name, "kn",
           "its elements share bytes along K: keep [experts, outputs, inputs]");
  }
  const bool four = array.num_dims == 4;
  const std::int64_t last = array.shape[four ? 3 : 2];
  const std::int64_t row_bytes = four ? array.shape[2] * last : last;
  if (inputs == 0) {
    if (row_bytes % format.block_bytes != 0) {
      refuse(name, "whole blocks in a row, " + bytes_of_row, array.text(), "state its shape");
    }
    inputs = row_bytes / format.block_bytes * format.block_elements;
  } else if (row_bytes != format.bytes(inputs)) {
    refuse(name,
           "uint8 " + dims_text({array.shape[0], array.shape[1], format.bytes(inputs)}) + " for " +
               std::to_string(inputs) + " inputs in " + format.name,
           array.text(), "pass the bytes of each row, " + bytes_of_row);
  }
  Array row = array;  // its last dimensions alone
  row.num_dims = array.num_dims - 2;
  for (int i = 0; i < row.num_dims; ++i) {
    row.shape[i] = array.shape[i + 2];
    row.stride[i] = array.stride[i + 2];
  }
  const auto elements = [&](std::int64_t stride) {
    if (stride <= 0 || stride % format.block_bytes != 0) return std::int64_t{-1};
    return stride / format.block_bytes * format.block_elements;
  };
  tensor.row_stride = array.shape[1] > 1 ? elements(array.stride[1]) : 0;
  tensor.expert_stride = array.shape[0] > 1 ? elements(array.stride[0]) : 0;
  if (array.size() > 0 &&
      (!row.contiguous() || tensor.row_stride < 0 || tensor.expert_stride < 0)) {
    refuse(name, "a tensor whose rows are contiguous and apart",
           array.text() + " with other strides", "pass .contiguous()");
  }
  tensor.experts = array.shape[0];
  tensor.outputs = array.shape[1];
  tensor.inputs = inputs;
  tensor.data = array.data;
}

void read_data(const std::string& name, nb::handle object, const Device& device,
               std::optional<WeightFormat> format, const std::vector<std::int64_t>& shape,
               WeightTensor& tensor, std::vector<nb::object>& owners) {
  const Array array = to_array(name.c_str(), object);
  owners.push_back(array.owner);
  if (!format) format = format_of(array.element);
  if (!format) {
    refuse(name, "a dtype that is a format of weights", array.text(),
           array.element == Element::fp8_e4m3fnuz || array.element == Element::fp8_e5m2fnuz
               ? remedy_of(array.element)
               : "say it: WeightTensor(data=..., format=...)");
  }
  tensor.format = *format;
  check_dtype(name, dtypes_of(*format), array);
  if (format_info(*format).block_elements > 1) {
    place_packed(name, array, shape.empty() ? 0 : shape[2], tensor);
  } else {
    place(name, array, tensor);
  }
  if (!shape.empty() &&
      (shape[0] != tensor.experts || shape[1] != tensor.outputs || shape[2] != tensor.inputs)) {
    refuse(name, "the data of " + dims_text(shape) + " (experts, outputs, inputs)", array.text(),
           "leave shape to the data, or state what it is");
  }
  if (device.kind == DeviceKind::cpu && !array.device.empty()) {
    refuse(name, "memory of the CPU", array.text(), "move it, or build the plan on that device");
  }
}

}  // namespace

WeightTensor to_tensor(const std::string& name, nb::handle object, const Device& device,
                       std::vector<nb::object>& owners) {
  WeightTensor tensor;
  if (object.is_none()) return tensor;
  static const nb::handle tensor_type =
      nb::object(nb::module_::import_("fusedmoe.config").attr("WeightTensor")).release();
  if (!object.type().is(tensor_type)) {
    read_data(name, object, device, std::nullopt, {}, tensor, owners);
    return tensor;
  }
  tensor.layout = to_enum<WeightLayout>(name + ".layout", object.attr("layout"), kWeightLayouts);
  std::optional<WeightFormat> format;
  if (const nb::object said = object.attr("format"); !said.is_none()) {
    format = to_enum<WeightFormat>(name + ".format", said);
  }
  std::vector<std::int64_t> shape;
  if (const nb::object said = object.attr("shape"); !said.is_none()) {
    if (!nb::try_cast(said, shape) || shape.size() != 3) {
      refuse(name + ".shape", "(experts, outputs, inputs)", nb::cast<std::string>(nb::repr(said)),
             "state three sizes");
    }
  }
  if (const nb::object data = object.attr("data"); !data.is_none()) {
    read_data(name, data, device, format, shape, tensor, owners);
  } else {
    const char* const remedy = "a tensor without data states it";
    if (!format) refuse(name + ".format", "a format", "None", remedy);
    if (shape.empty()) refuse(name + ".shape", "(experts, outputs, inputs)", "None", remedy);
    tensor.format = *format;
    tensor.experts = shape[0];
    tensor.outputs = shape[1];
    tensor.inputs = shape[2];
  }
  if (const nb::object scales = object.attr("scales"); !scales.is_none()) {
    read_scales(name, scales, tensor, owners);
  }
  return tensor;
}

nb::object from_tensor(const WeightTensor& tensor) {
  if (tensor.empty()) return nb::none();
  const nb::module_ config = nb::module_::import_("fusedmoe.config");
  return config.attr("WeightTensor")(
      nb::arg("format") = to_string(tensor.format),
      nb::arg("layout") = kWeightLayouts.at(static_cast<std::size_t>(tensor.layout)),
      nb::arg("shape") = nb::make_tuple(tensor.experts, tensor.outputs, tensor.inputs),
      nb::arg("scales") = from_scales(tensor.scales));
}

}  // namespace fusedmoe::python
