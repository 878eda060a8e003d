// ExpertWeights of Python as views of the library: layouts, strides, sources, versions.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "checkpoint_layer.h"
#include "fields.h"
#include "from_python.h"
#include "fusedmoe/error.h"

namespace fusedmoe::python {
namespace {

constexpr std::array kWeightLayouts = {"nk", "kn"};
constexpr std::array kScaleLayouts = {"none", "tensor", "channel", "group", "block"};
constexpr std::array kScaleParts = {"one", "halves", "interleaved"};
constexpr std::array kScaleTypes = {"f32", "f16", "bf16", "e8m0", "e4m3"};

std::string join(const char* first, const char* second) { return std::string(first) + second; }

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

std::optional<ScaleType> scale_type_of(Element element) {
  switch (element) {
    case Element::f32:
      return ScaleType::f32;
    case Element::f16:
      return ScaleType::f16;
    case Element::bf16:
      return ScaleType::bf16;
    case Element::e8m0:
    case Element::u8:
      return ScaleType::e8m0;
    case Element::fp8_e4m3:
      return ScaleType::e4m3;
    default:
      return std::nullopt;
  }
}

Array dense(const std::string& name, nb::handle object, std::vector<nb::object>& owners) {
  Array array = to_array(name.c_str(), object);
  (void)to_bytes(name.c_str(), array);
  owners.push_back(array.owner);
  return array;
}

WeightScales to_scales(const std::string& name, nb::handle object,
                       std::vector<nb::object>& owners) {
  WeightScales scales;
  scales.layout = to_enum<ScaleLayout>(name + ".layout", object.attr("layout"), kScaleLayouts);
  scales.parts = to_enum<ScaleParts>(name + ".parts", object.attr("parts"), kScaleParts);
  scales.group_size = number<std::int64_t>(object, name.c_str(), "group_size");
  scales.block_n = number<std::int64_t>(object, name.c_str(), "block_n");
  scales.block_k = number<std::int64_t>(object, name.c_str(), "block_k");
  scales.transposed = boolean(object, name.c_str(), "transposed");
  if (const nb::object data = object.attr("data"); !data.is_none()) {
    const Array array = dense(name + ".data", data, owners);
    scales.data = array.data;
    const nb::object type = object.attr("type");
    const std::optional<ScaleType> implied = scale_type_of(array.element);
    if (type.is_none() && !implied) {
      refuse(name + ".data", "f32, f16, bf16, e8m0 or e4m3", array.text(), "say its type");
    }
    scales.type = type.is_none() ? *implied : to_enum<ScaleType>(name + ".type", type, kScaleTypes);
  }
  if (const nb::object points = object.attr("zero_points"); !points.is_none()) {
    scales.zero_points = dense(name + ".zero_points", points, owners).data;
  }
  if (const nb::object global = object.attr("global_scales"); !global.is_none()) {
    const Array array = dense(name + ".global_scales", global, owners);
    if (array.element != Element::f32) {
      refuse(name + ".global_scales", "float32", array.text(), "cast it");
    }
    scales.global = static_cast<const float*>(array.data);
  }
  return scales;
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

WeightTensor to_tensor(const char* name, nb::handle object, const Device& device,
                       std::vector<nb::object>& owners) {
  WeightTensor tensor;
  if (object.is_none()) return tensor;
  static const nb::handle tensor_type =
      nb::object(nb::module_::import_("fusedmoe.config").attr("WeightTensor")).release();
  const bool described = object.type().is(tensor_type);
  const nb::object data = described ? nb::object(object.attr("data")) : nb::borrow(object);
  std::optional<WeightFormat> format;
  if (described) {
    tensor.layout =
        to_enum<WeightLayout>(join(name, ".layout"), object.attr("layout"), kWeightLayouts);
    if (const nb::object said = object.attr("format"); !said.is_none()) {
      format = to_enum<WeightFormat>(join(name, ".format"), said);
    }
  }
  const nb::object shape = described ? nb::object(object.attr("shape")) : nb::none();
  if (!data.is_none()) {
    Array array = to_array(name, data);
    owners.push_back(array.owner);
    if (!format) format = format_of(array.element);
    if (!format) {
      refuse(name, "a dtype that is a format of weights", array.text(),
             "say it: WeightTensor(data=..., format=...)");
    }
    if (shape.is_none()) {
      place(name, array, tensor);
    } else {  // packed: rows have to be dense
      tensor.data = to_bytes(name, array).data();
    }
    if (device.kind == DeviceKind::cpu && !array.device.empty()) {
      refuse(name, "memory of the CPU", array.text(), "move it, or build the plan on that device");
    }
  }
  if (!format) refuse(join(name, ".format"), "a format", "None", "a tensor without data states it");
  tensor.format = *format;
  if (!shape.is_none()) {
    std::vector<std::int64_t> sizes;
    if (!nb::try_cast(shape, sizes) || sizes.size() != 3) {
      refuse(join(name, ".shape"), "(experts, outputs, inputs)",
             nb::cast<std::string>(nb::repr(shape)), "state three sizes");
    }
    tensor.experts = sizes[0];
    tensor.outputs = sizes[1];
    tensor.inputs = sizes[2];
  } else if (data.is_none()) {
    refuse(join(name, ".shape"), "(experts, outputs, inputs)", "None",
           "a tensor without data states it");
  }
  if (described) {
    if (const nb::object scales = object.attr("scales"); !scales.is_none()) {
      tensor.scales = to_scales(join(name, ".scales"), scales, owners);
    }
  }
  return tensor;
}

BiasTensor to_bias(const char* name, nb::handle object, std::vector<nb::object>& owners) {
  if (object.is_none()) return {};
  const Array array = dense(name, object, owners);
  const MatrixView view = to_matrix(name, array);
  return {view.data, view.dtype, view.rows, view.columns};
}

struct Held {
  std::vector<nb::object> objects;
  Held* next = nullptr;
};

// What C++ has dropped and Python has not yet destroyed. The library drops owners inside its locks,
// on any thread: waiting for the GIL there could meet a fork, which holds it and waits for them.
std::atomic<Held*> g_dropped{nullptr};

int drop_all(void* /*unused*/) {  // with the GIL
  for (Held* held = g_dropped.exchange(nullptr); held != nullptr;) {
    Held* const next = held->next;
    delete held;
    held = next;
  }
  return 0;
}

void drop_later(Held* held) {
  held->next = g_dropped.load();
  while (!g_dropped.compare_exchange_weak(held->next, held)) {
  }
  // When Python's queue is full, the next one takes all with it.
  if (Py_IsInitialized() != 0) Py_AddPendingCall(&drop_all, nullptr);
}

}  // namespace

std::shared_ptr<const void> hold(std::vector<nb::object> objects) {
  drop_all(nullptr);
  return {new Held{std::move(objects)}, &drop_later};
}

ExpertWeights to_weights(nb::handle object, const Device& device) {
  if (nb::isinstance<CheckpointWeights>(object)) {
    ExpertWeights weights = nb::cast<const CheckpointWeights&>(object).weights;
    weights.owner = hold({nb::borrow(object)});
    return weights;
  }
  if (!nb::hasattr(object, "w13_bias")) {
    refuse("weights", "an ExpertWeights", to_text(object.type().attr("__name__")), "build one");
  }
  ExpertWeights weights;
  std::vector<nb::object> owners;
  weights.w13 = to_tensor("weights.w13", object.attr("w13"), device, owners);
  weights.w13_up = to_tensor("weights.w13_up", object.attr("w13_up"), device, owners);
  weights.w2 = to_tensor("weights.w2", object.attr("w2"), device, owners);
  weights.w13_bias = to_bias("weights.w13_bias", object.attr("w13_bias"), owners);
  weights.w2_bias = to_bias("weights.w2_bias", object.attr("w2_bias"), owners);
  weights.owner = hold(std::move(owners));
  if (const nb::object version = object.attr("version"); !version.is_none()) {
    if (!nb::isinstance<WeightsVersion>(version)) {
      refuse("weights.version", "a WeightsVersion", to_text(version.type().attr("__name__")),
             "build one and bump() it after each change");
    }
    weights.version = &nb::cast<WeightsVersion&>(version).value;
    weights.version_owner = hold({version});
  }
  if (const nb::object source = object.attr("source"); !source.is_none()) {
    struct Yielded {
      std::shared_ptr<const void> owner;  // of the callable
      nb::handle callable;
      // Between two calls the views of the first stay alive, as the source's contract asks.
      std::shared_ptr<const void> last;
    };
    auto yielded = std::make_shared<Yielded>(Yielded{hold({source}), source, nullptr});
    weights.source = [yielded, device](std::int64_t local_expert) {
      const nb::gil_scoped_acquire gil;
      ExpertWeights one = to_weights(yielded->callable(local_expert), device);
      yielded->last = one.owner;
      return one;
    };
  }
  return weights;
}

}  // namespace fusedmoe::python
