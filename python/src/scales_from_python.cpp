#include "scales_from_python.h"

#include <nanobind/stl/string.h>

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

constexpr std::array kScaleLayouts = {"none", "tensor", "channel", "group", "block"};
constexpr std::array kScaleParts = {"one", "halves", "interleaved"};
constexpr std::array kScaleTypes = {"f32", "f16", "bf16", "e8m0", "e4m3"};

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

// Dense, or the transposed view of a dense one: that is the other order.
struct Ordered {
  Array array;
  bool turned = false;
};

Ordered dense_scales(const std::string& name, nb::handle object, std::vector<nb::object>& owners) {
  Ordered scales{to_array(name.c_str(), object)};
  if (scales.array.num_dims == 3 && !scales.array.contiguous()) {
    Array other = scales.array;
    std::swap(other.shape[1], other.shape[2]);
    std::swap(other.stride[1], other.stride[2]);
    if (other.contiguous()) scales = {std::move(other), true};
  }
  (void)to_bytes(name.c_str(), scales.array);
  owners.push_back(scales.array.owner);
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

}  // namespace

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

nb::object from_scales(const WeightScales& from) {
  if (from.layout == ScaleLayout::none) return nb::none();
  return nb::module_::import_("fusedmoe.config")
      .attr("WeightScales")(
          nb::arg("layout") = to_string(from.layout), nb::arg("type") = to_string(from.type),
          nb::arg("group_size") = from.group_size, nb::arg("block_n") = from.block_n,
          nb::arg("block_k") = from.block_k, nb::arg("transposed") = from.transposed,
          nb::arg("parts") = kScaleParts.at(static_cast<std::size_t>(from.parts)),
          nb::arg("zero_points") =
              from.zero_points != nullptr ? nb::object(nb::bool_(true)) : nb::none());
}

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

}  // namespace fusedmoe::python
