#include "from_python.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <string>
#include <utility>

#include "checkpoint_layer.h"
#include "fusedmoe/error.h"

namespace fusedmoe::python {
namespace {

std::string join(const char* first, const char* second) { return std::string(first) + second; }

// The enumerator that the library spells so; its names end where to_string knows no more.
template <class Enum>
Enum to_enum(const std::string& name, nb::handle object) {
  const std::string text = to_text(object);
  std::string all;
  for (int i = 0;; ++i) {
    const std::string known = to_string(static_cast<Enum>(i));
    if (known == "unknown") break;
    if (text == known) return static_cast<Enum>(i);
    all += (i > 0 ? ", " : "") + known;
  }
  refuse(name, "one of " + all, "'" + text + "'", "spell it so");
}

// The same for enumerations that are only words here.
template <class Enum, std::size_t kCount>
Enum to_enum(const std::string& name, nb::handle object,
             const std::array<const char*, kCount>& names) {
  const std::string text = to_text(object);
  std::string all;
  for (std::size_t i = 0; i < kCount; ++i) {
    if (text == names[i]) return static_cast<Enum>(i);
    all += std::string(i > 0 ? ", " : "") + names[i];
  }
  refuse(name, "one of " + all, "'" + text + "'", "spell it so");
}

// A number of that attribute; says which attribute when it is none.
template <class T>
T number(nb::handle object, const char* owner, const char* attribute) {
  const nb::object value = object.attr(attribute);
  T result{};
  if (!nb::try_cast(value, result)) {
    refuse(std::string(owner) + "." + attribute,
           std::is_floating_point_v<T> ? "a number" : "a 64-bit integer",
           nb::cast<std::string>(nb::repr(value)), "pass one");
  }
  return result;
}

DType to_dtype(const std::string& name, nb::handle object) {
  std::string text = to_text(nb::hasattr(object, "name") ? object.attr("name") : object);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const std::string full = to_string(dtype);
    const std::string brief = full == "float32" ? "f32" : full == "float16" ? "f16" : "bf16";
    if (text == full || text == "torch." + full || text == brief) return dtype;
  }
  if (PyType_Check(object.ptr()) != 0) {  // numpy.float32
    text = to_text(object.attr("__name__"));
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      if (text == to_string(dtype)) return dtype;
    }
  }
  refuse(name, "f32, f16 or bf16", "'" + text + "'", "or torch's or NumPy's name of one of them");
}

constexpr std::array kModes = {"a16", "a8"};
constexpr std::array kStorages = {"own", "borrowed", "caller", "adopt"};
constexpr std::array kPolicies = {"raise", "refresh"};
constexpr std::array kWeightLayouts = {"nk", "kn"};
constexpr std::array kScaleLayouts = {"none", "tensor", "channel", "group", "block"};
constexpr std::array kScaleTypes = {"f32", "f16", "bf16", "e8m0", "e4m3"};

ActivationConfig to_activation(nb::handle object) {
  ActivationConfig activation;
  if (PyUnicode_Check(object.ptr()) != 0) {
    activation.kind = to_enum<Activation>("config.activation", object);
    return activation;
  }
  constexpr const char* kName = "config.activation";
  activation.kind = to_enum<Activation>("config.activation.kind", object.attr("kind"));
  activation.alpha = number<float>(object, kName, "alpha");
  activation.limit = number<float>(object, kName, "limit");
  activation.beta = number<float>(object, kName, "beta");
  activation.linear_beta = number<float>(object, kName, "linear_beta");
  return activation;
}

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
  scales.group_size = number<std::int64_t>(object, name.c_str(), "group_size");
  scales.block_n = number<std::int64_t>(object, name.c_str(), "block_n");
  scales.block_k = number<std::int64_t>(object, name.c_str(), "block_k");
  scales.transposed = nb::cast<bool>(object.attr("transposed"));
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
    scales.globals_per_expert = array.num_dims == 2 ? array.shape[1] : 1;
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

// A Python callable that any thread may drop, and that may be copied without the GIL.
std::shared_ptr<nb::object> share(nb::object object) {
  return {new nb::object(std::move(object)), [](nb::object* held) {
            if (Py_IsInitialized() == 0) return;  // at exit: leak rather than crash
            const nb::gil_scoped_acquire gil;
            delete held;
          }};
}

}  // namespace

MoeConfig to_config(nb::handle object) {
  constexpr const char* kName = "config";
  if (!nb::hasattr(object, "hidden_size")) {
    refuse(kName, "a MoeConfig", to_text(object.type().attr("__name__")), "build one");
  }
  MoeConfig config;
  config.hidden_size = number<std::int64_t>(object, kName, "hidden_size");
  config.intermediate_size = number<std::int64_t>(object, kName, "intermediate_size");
  config.num_experts = number<std::int64_t>(object, kName, "num_experts");
  config.top_k = number<std::int64_t>(object, kName, "top_k");
  config.activation = to_activation(object.attr("activation"));
  config.dtype = to_dtype("config.dtype", object.attr("dtype"));
  if (const nb::object dtype = object.attr("output_dtype"); !dtype.is_none()) {
    config.output_dtype = to_dtype("config.output_dtype", dtype);
  }
  config.gate_up_layout =
      to_enum<GateUpLayout>("config.gate_up_layout", object.attr("gate_up_layout"));
  config.gate_up_order = to_enum<GateUpOrder>("config.gate_up_order", object.attr("gate_up_order"));
  if (!object.attr("clamp_limit").is_none()) {
    config.clamp_limit = number<float>(object, kName, "clamp_limit");
  }
  config.apply_router_weight_on_input = nb::cast<bool>(object.attr("apply_router_weight_on_input"));
  return config;
}

std::vector<std::int32_t> to_map(const char* name, nb::handle object) {
  std::vector<std::int32_t> map;
  if ((PyList_Check(object.ptr()) != 0 || PyTuple_Check(object.ptr()) != 0)) {
    if (nb::try_cast(object, map)) return map;
    refuse(name, "local ids as 32-bit integers", nb::cast<std::string>(nb::repr(object)),
           "-1 marks experts of other ranks");
  }
  const Array array = to_array(name, object);
  const MatrixView view = to_row(name, array);
  if ((view.dtype != DType::i32 && view.dtype != DType::i64) || !array.device.empty()) {
    refuse(name, "int32 or int64 [num_experts] on the CPU", array.text(), "cast or move it");
  }
  map.resize(static_cast<std::size_t>(view.columns));
  for (std::size_t i = 0; i < map.size(); ++i) {
    map[i] = view.dtype == DType::i32
                 ? static_cast<const std::int32_t*>(view.data)[i]
                 : static_cast<std::int32_t>(static_cast<const std::int64_t*>(view.data)[i]);
  }
  return map;
}

OwnedOptions to_options(nb::handle object) {
  OwnedOptions owned;
  if (object.is_none()) return owned;
  constexpr const char* kName = "options";
  if (!nb::hasattr(object, "weight_storage")) {
    refuse(kName, "a PlanOptions", to_text(object.type().attr("__name__")), "build one");
  }
  PlanOptions& options = owned.options;
  options.device = parse_device(to_text(object.attr("device")));
  if (const nb::object map = object.attr("expert_map"); !map.is_none()) {
    options.expert_map = nb::isinstance<ExpertMap>(map)
                             ? nb::cast<ExpertMap>(map)
                             : ExpertMap::explicit_map(to_map("options.expert_map", map));
  }
  options.mode = to_enum<ComputeMode>("options.mode", object.attr("mode"), kModes);
  if (const nb::object invariant = object.attr("batch_invariant"); !invariant.is_none()) {
    options.batch_invariant = nb::cast<bool>(invariant);
  }
  options.isa = to_text(object.attr("isa"));
  options.max_threads = number<int>(object, kName, "max_threads");
  options.runner =
      reinterpret_cast<const ThreadRunner*>(number<std::uintptr_t>(object, kName, "runner"));
  options.weight_storage =
      to_enum<WeightStorage>("options.weight_storage", object.attr("weight_storage"), kStorages);
  if (const nb::object storage = object.attr("storage"); !storage.is_none()) {
    const Array array = to_array("options.storage", storage, Access::write);
    options.storage = to_bytes("options.storage", array);
    owned.owners.push_back(array.owner);
  }
  options.on_stale = to_enum<StalePolicy>("options.on_stale", object.attr("on_stale"), kPolicies);
  options.counters = nb::cast<bool>(object.attr("counters"));
  return owned;
}

OwnedWeights to_weights(nb::handle object, const Device& device) {
  OwnedWeights owned;
  if (nb::isinstance<CheckpointWeights>(object)) {
    owned.weights = nb::cast<const CheckpointWeights&>(object).weights;
    owned.owners.push_back(nb::borrow(object));
    return owned;
  }
  if (!nb::hasattr(object, "w13_bias")) {
    refuse("weights", "an ExpertWeights", to_text(object.type().attr("__name__")), "build one");
  }
  ExpertWeights& weights = owned.weights;
  weights.w13 = to_tensor("weights.w13", object.attr("w13"), device, owned.owners);
  weights.w13_up = to_tensor("weights.w13_up", object.attr("w13_up"), device, owned.owners);
  weights.w2 = to_tensor("weights.w2", object.attr("w2"), device, owned.owners);
  weights.w13_bias = to_bias("weights.w13_bias", object.attr("w13_bias"), owned.owners);
  weights.w2_bias = to_bias("weights.w2_bias", object.attr("w2_bias"), owned.owners);
  if (const nb::object version = object.attr("version"); !version.is_none()) {
    if (!nb::isinstance<WeightsVersion>(version)) {
      refuse("weights.version", "a WeightsVersion", to_text(version.type().attr("__name__")),
             "build one and bump() it after each change");
    }
    weights.version = &nb::cast<WeightsVersion&>(version).value;
    owned.version = version;
  }
  if (const nb::object source = object.attr("source"); !source.is_none()) {
    // Between two calls the views of the first stay alive, as the source's contract asks.
    struct Yielded {
      std::shared_ptr<nb::object> callable;
      std::shared_ptr<nb::object> last;
    };
    auto yielded = std::make_shared<Yielded>(Yielded{share(source), share(nb::none())});
    weights.source = [yielded, device](std::int64_t local_expert) {
      const nb::gil_scoped_acquire gil;
      nb::object one = (*yielded->callable)(local_expert);
      OwnedWeights views = to_weights(one, device);
      nb::list owners;
      for (const nb::object& owner : views.owners) owners.append(owner);
      *yielded->last = std::move(owners);
      return views.weights;
    };
  }
  return owned;
}

OwnedRouting to_routing(nb::handle object) {
  constexpr const char* kName = "config";
  if (!nb::hasattr(object, "score_function")) {
    refuse(kName, "a RoutingConfig", to_text(object.type().attr("__name__")), "build one");
  }
  OwnedRouting owned;
  RoutingConfig& config = owned.config;
  if (const nb::object score = object.attr("score_function"); !score.is_none()) {
    config.score_function = to_enum<ScoreFunction>("config.score_function", score);
  }
  config.top_k = number<std::int64_t>(object, kName, "top_k");
  if (const nb::object bias = object.attr("selection_bias"); !bias.is_none()) {
    const Array array = to_array("config.selection_bias", bias);
    config.selection_bias = array.num_dims == 2 ? to_matrix("config.selection_bias", array)
                                                : to_row("config.selection_bias", array);
    owned.owners.push_back(array.owner);
  }
  config.renormalise = to_enum<Renormalise>("config.renormalise", object.attr("renormalise"));
  config.epsilon = number<float>(object, kName, "epsilon");
  config.num_groups = number<std::int64_t>(object, kName, "num_groups");
  config.topk_group = number<std::int64_t>(object, kName, "topk_group");
  config.group_score = to_enum<GroupScore>("config.group_score", object.attr("group_score"));
  config.scaling_factor = number<float>(object, kName, "scaling_factor");
  return owned;
}

nb::object from_config(const MoeConfig& config) {
  const nb::module_ module = nb::module_::import_("fusedmoe.config");
  const auto brief = [](DType dtype) -> const char* {
    return dtype == DType::f32 ? "f32" : dtype == DType::f16 ? "f16" : "bf16";
  };
  const nb::object activation = module.attr("ActivationConfig")(
      nb::arg("kind") = to_string(config.activation.kind),
      nb::arg("alpha") = config.activation.alpha, nb::arg("limit") = config.activation.limit,
      nb::arg("beta") = config.activation.beta,
      nb::arg("linear_beta") = config.activation.linear_beta);
  return module.attr("MoeConfig")(
      nb::arg("hidden_size") = config.hidden_size,
      nb::arg("intermediate_size") = config.intermediate_size,
      nb::arg("num_experts") = config.num_experts, nb::arg("top_k") = config.top_k,
      nb::arg("activation") = activation, nb::arg("dtype") = brief(config.dtype),
      nb::arg("output_dtype") =
          config.output_dtype ? nb::object(nb::str(brief(*config.output_dtype))) : nb::none(),
      nb::arg("gate_up_layout") = to_string(config.gate_up_layout),
      nb::arg("gate_up_order") = to_string(config.gate_up_order),
      nb::arg("clamp_limit") =
          config.clamp_limit ? nb::object(nb::float_(*config.clamp_limit)) : nb::none(),
      nb::arg("apply_router_weight_on_input") = config.apply_router_weight_on_input);
}

}  // namespace fusedmoe::python
