// Configs, options and routing: between the dataclasses of fusedmoe/config.py and the library.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <charconv>
#include <string>

#include "fields.h"
#include "from_python.h"
#include "fusedmoe/error.h"

namespace fusedmoe::python {
namespace {

constexpr std::array kModes = {"a16", "a8"};
constexpr std::array kStorages = {"own", "borrowed", "caller", "adopt"};
constexpr std::array kPolicies = {"raise", "refresh"};

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

// The double that a person would write for it: 1.702F is 1.7020000219 as a double.
double shortest(float value) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  double result = value;
  std::from_chars(text.data(), end, result);
  return result;
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
  config.apply_router_weight_on_input = boolean(object, kName, "apply_router_weight_on_input");
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
    const std::int64_t local = view.dtype == DType::i32
                                   ? static_cast<const std::int32_t*>(view.data)[i]
                                   : static_cast<const std::int64_t*>(view.data)[i];
    map[i] = static_cast<std::int32_t>(local);
    if (map[i] != local) {
      refuse(std::string(name) + "[" + std::to_string(i) + "]", "a local id or -1",
             std::to_string(local), "-1 marks experts of other ranks");
    }
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
    options.batch_invariant = boolean(object, kName, "batch_invariant");
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
    owned.storage_owner = hold({array.owner});
  }
  options.on_stale = to_enum<StalePolicy>("options.on_stale", object.attr("on_stale"), kPolicies);
  options.counters = boolean(object, kName, "counters");
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
      nb::arg("alpha") = shortest(config.activation.alpha),
      nb::arg("limit") = shortest(config.activation.limit),
      nb::arg("beta") = shortest(config.activation.beta),
      nb::arg("linear_beta") = shortest(config.activation.linear_beta));
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
          config.clamp_limit ? nb::object(nb::float_(shortest(*config.clamp_limit))) : nb::none(),
      nb::arg("apply_router_weight_on_input") = config.apply_router_weight_on_input);
}

}  // namespace fusedmoe::python
