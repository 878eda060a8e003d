#include "tensor_from_python.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <utility>

#include "fields.h"
#include "formats/check.h"
#include "formats/format.h"
#include "formats/quantize.h"
#include "formats/scales.h"

namespace fusedmoe::python {
namespace {

constexpr std::array kWeightLayouts = {"nk", "kn"};
constexpr std::array kScaleLayouts = {"none", "tensor", "channel", "group", "block"};
constexpr std::array kScaleParts = {"one", "halves", "interleaved"};
constexpr std::array kScaleTypes = {"f32", "f16", "bf16", "e8m0", "e4m3"};

// --- Dtypes
// ---------------------------------------------------------------------------------------

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

// What an array of a format may be: its own dtype, or the bits of it.
struct Dtypes {
  Element own, bits;
};

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

Dtypes dtypes_of(ScaleType type) {
  switch (type) {
    case ScaleType::f32:
      return {Element::f32, Element::f32};
    case ScaleType::f16:
      return {Element::f16, Element::u16};
    case ScaleType::bf16:
      return {Element::bf16, Element::u16};
    case ScaleType::e8m0:
      return {Element::e8m0, Element::u8};
    case ScaleType::e4m3:
      return {Element::fp8_e4m3, Element::u8};
  }
  return {Element::other, Element::other};
}

const char* remedy_of(Element element) {
  return element == Element::fp8_e4m3fnuz || element == Element::fp8_e5m2fnuz
             ? "no format here: convert the values (float(), then to(float8_e4m3fn)); the same "
               "bits mean another number"
             : "convert it, or say the format that it is";
}

void check_dtype(const std::string& name, const Dtypes& expected, const Array& array) {
  if (array.element == expected.own || array.element == expected.bits) return;
  std::string names = to_string(expected.own);
  if (expected.bits != expected.own) names += std::string(" or ") + to_string(expected.bits);
  refuse(name, names, array.text(), remedy_of(array.element));
}

// --- Shapes
// ---------------------------------------------------------------------------------------

// Dimensions of one do not count: they change nothing about where an element lies.
std::vector<std::int64_t> squeezed(const std::vector<std::int64_t>& dims) {
  std::vector<std::int64_t> result;
  for (const std::int64_t size : dims) {
    if (size != 1) result.push_back(size);
  }
  return result;
}

std::vector<std::int64_t> dims_of(const Array& array) {
  return {array.shape.begin(), array.shape.begin() + array.num_dims};
}

bool fits(const std::vector<std::int64_t>& wanted, const Array& array) {
  return squeezed(wanted) == squeezed(dims_of(array));
}

// What the caller most likely means with scales of that shape.
std::string remedy_for(const WeightTensor& tensor, const Array& array) {
  WeightTensor other = tensor;
  WeightScales& scales = other.scales;
  const bool two = scales.parts != ScaleParts::one;
  const bool may_be_two =
      scales.layout == ScaleLayout::block || scales.layout == ScaleLayout::tensor;
  if (may_be_two && (two || tensor.outputs % 2 == 0)) {
    scales.parts = two ? ScaleParts::one : ScaleParts::halves;
    if (fits(scale_dims(other), array)) {
      return two ? "gate and up have scales of their own when they were quantised apart: give "
                   "both, or say parts='one'"
                 : "if gate and up were quantised apart, say parts='halves'";
    }
  }
  other = tensor;
  scales.transposed = !scales.transposed;
  if (fits(scale_dims(other), array)) {
    return std::string("say transposed=") + (scales.transposed ? "True" : "False");
  }
  return "check the layout of scales, and the sizes of groups or blocks";
}

void check_dims(const std::string& name, const std::vector<std::int64_t>& wanted, const char* dtype,
                const Array& array, const std::string& remedy) {
  if (fits(wanted, array)) return;
  refuse(name, std::string(dtype) + " " + dims_text(wanted), array.text(), remedy);
}

// --- Scales
// ---------------------------------------------------------------------------------------

// Dense, or the transposed view of a dense one: that is the other order.
struct Ordered {
  Array array;
  bool turned = false;
};

Ordered dense_scales(const std::string& name, nb::handle object, std::vector<nb::object>& owners) {
  Ordered scales{to_array(name.c_str(), object)};
  Array& array = scales.array;
  if (array.num_dims == 3 && !array.contiguous()) {
    std::swap(array.shape[1], array.shape[2]);
    std::swap(array.stride[1], array.stride[2]);
    scales.turned = true;
  }
  (void)to_bytes(name.c_str(), array);
  owners.push_back(array.owner);
  return scales;
}

ScaleType type_of(const std::string& name, const Array& array, const FormatInfo& format) {
  switch (array.element) {
    case Element::f32:
      return ScaleType::f32;
    case Element::f16:
      return ScaleType::f16;
    case Element::bf16:
      return ScaleType::bf16;
    case Element::e8m0:
      return ScaleType::e8m0;
    case Element::fp8_e4m3:
      return ScaleType::e4m3;
    case Element::u8:
      if (format.takes(ScaleType::e8m0)) return ScaleType::e8m0;
      if (format.takes(ScaleType::e4m3)) return ScaleType::e4m3;
      break;
    default:
      break;
  }
  refuse(name, "f32, f16, bf16, e8m0 or e4m3", array.text(),
         array.element == Element::fp8_e4m3fnuz ? remedy_of(array.element) : "say its type");
}

void read_scales(const std::string& tensor_name, nb::handle object, WeightTensor& tensor,
                 std::vector<nb::object>& owners) {
  const std::string name = tensor_name + ".scales";
  WeightScales& scales = tensor.scales;
  const FormatInfo& format = format_info(tensor.format);
  scales.layout = to_enum<ScaleLayout>(name + ".layout", object.attr("layout"), kScaleLayouts);
  scales.parts = to_enum<ScaleParts>(name + ".parts", object.attr("parts"), kScaleParts);
  scales.group_size = number<std::int64_t>(object, name.c_str(), "group_size");
  scales.block_n = number<std::int64_t>(object, name.c_str(), "block_n");
  scales.block_k = number<std::int64_t>(object, name.c_str(), "block_k");
  scales.transposed = boolean(object, name.c_str(), "transposed");
  scales.type = default_scales(tensor.format).type;
  const nb::object type = object.attr("type");
  if (!type.is_none()) scales.type = to_enum<ScaleType>(name + ".type", type, kScaleTypes);

  std::optional<Array> data, points, global;
  bool turned = false;
  if (const nb::object given = object.attr("data"); !given.is_none()) {
    Ordered ordered = dense_scales(name + ".data", given, owners);
    turned = ordered.turned;
    data = std::move(ordered.array);
    if (type.is_none()) scales.type = type_of(name + ".data", *data, format);
    scales.data = data->data;
  }
  if (const nb::object given = object.attr("zero_points"); given.is(Py_True)) {
    if (tensor.data != nullptr || scales.data != nullptr) {
      refuse(name + ".zero_points", "an array", "True", "only a tensor without data states it so");
    }
    static constexpr std::uint8_t kSome = 0;
    scales.zero_points = &kSome;  // never read
  } else if (!given.is_none()) {
    Ordered ordered = dense_scales(name + ".zero_points", given, owners);
    if (ordered.turned != turned) {
      refuse(name + ".zero_points", "strides in the order of those of the scales", "others",
             "pass .contiguous() of both");
    }
    points = std::move(ordered.array);
    scales.zero_points = points->data;
  }
  if (turned) scales.transposed = !scales.transposed;
  if (const nb::object given = object.attr("global_scales"); !given.is_none()) {
    global = dense(name + ".global_scales", given, owners);
    scales.global = static_cast<const float*>(global->data);
  }
  const bool sized = tensor.experts > 0 && tensor.outputs > 0 && tensor.inputs > 0;
  if (!sized || (!data && !points && !global)) return;  // the library says what is missing
  check_weight_tensor(tensor_name, tensor, true);       // sizes of groups before shapes
  const std::string remedy = data ? remedy_for(tensor, *data) : "";
  if (data) {
    check_dtype(name + ".data", dtypes_of(scales.type), *data);
    check_dims(name + ".data", scale_dims(tensor), to_string(data->element), *data, remedy);
  }
  if (points) {
    if (points->element != Element::u8) {
      refuse(name + ".zero_points", "uint8 " + dims_text(scale_dims(tensor)), points->text(),
             "cast them: values from 0 to 15, one in a byte");
    }
    check_dims(name + ".zero_points", scale_dims(tensor), "uint8", *points,
               "give one for each scale, one in a byte");
  }
  if (global) {
    if (global->element != Element::f32) {
      refuse(name + ".global_scales", "float32 " + dims_text(global_dims(tensor)), global->text(),
             "cast it");
    }
    check_dims(name + ".global_scales", global_dims(tensor), "float32", *global,
               "give one per expert, or two where gate and up have their own (parts)");
  }
}

// --- Data
// -----------------------------------------------------------------------------------------

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

std::string dims_text(const std::vector<std::int64_t>& dims) {
  std::string text;
  for (const std::int64_t size : dims) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

std::vector<std::int64_t> scale_dims(const WeightTensor& tensor) {
  const ScaleShape shape = scale_shape(tensor);
  switch (tensor.scales.layout) {
    case ScaleLayout::none:
      return {};
    case ScaleLayout::tensor:
      if (shape.rows == 1) return {tensor.experts};
      return {tensor.experts, shape.rows};
    case ScaleLayout::channel:
      return {tensor.experts, shape.rows};
    default:
      if (tensor.scales.transposed) return {tensor.experts, shape.columns, shape.rows};
      return {tensor.experts, shape.rows, shape.columns};
  }
}

std::vector<std::int64_t> global_dims(const WeightTensor& tensor) {
  const std::int64_t count = globals_per_expert(tensor);
  if (count == 0) return {};
  if (count == 1) return {tensor.experts};
  return {tensor.experts, count};
}

Array dense(const std::string& name, nb::handle object, std::vector<nb::object>& owners) {
  Array array = to_array(name.c_str(), object);
  (void)to_bytes(name.c_str(), array);
  owners.push_back(array.owner);
  return array;
}

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
  nb::object scales = nb::none();
  if (const WeightScales& from = tensor.scales; from.layout != ScaleLayout::none) {
    scales = config.attr("WeightScales")(
        nb::arg("layout") = to_string(from.layout), nb::arg("type") = to_string(from.type),
        nb::arg("group_size") = from.group_size, nb::arg("block_n") = from.block_n,
        nb::arg("block_k") = from.block_k, nb::arg("transposed") = from.transposed,
        nb::arg("parts") = kScaleParts.at(static_cast<std::size_t>(from.parts)),
        nb::arg("zero_points") =
            from.zero_points != nullptr ? nb::object(nb::bool_(true)) : nb::none());
  }
  return config.attr("WeightTensor")(
      nb::arg("format") = to_string(tensor.format),
      nb::arg("layout") = kWeightLayouts.at(static_cast<std::size_t>(tensor.layout)),
      nb::arg("shape") = nb::make_tuple(tensor.experts, tensor.outputs, tensor.inputs),
      nb::arg("scales") = scales);
}

}  // namespace fusedmoe::python
