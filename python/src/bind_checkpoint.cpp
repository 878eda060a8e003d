// Checkpoints: each MoE layer's config, weights and router as views into mapped files.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "array.h"
#include "bindings.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/layer_routing.h"
#include "checkpoint_layer.h"
#include "from_python.h"
#include "tensor_from_python.h"

namespace fusedmoe::python {
namespace {

using checkpoint::Checkpoint;
using checkpoint::MoeLayer;

struct CheckpointObject {
  std::shared_ptr<const Checkpoint> checkpoint;
};

struct LayerObject {
  std::shared_ptr<const Checkpoint> checkpoint;
  const MoeLayer* layer;
};

// A read-only array of the layer's memory; bf16 as a TensorView, since NumPy has no such type.
nb::object to_array_object(const ConstMatrixView& view, const nb::object& owner) {
  if (view.data == nullptr) return nb::none();
  const std::array<std::size_t, 2> shape = {static_cast<std::size_t>(view.rows),
                                            static_cast<std::size_t>(view.columns)};
  const std::array<std::int64_t, 2> strides = {view.row_stride, 1};
  const auto bits = static_cast<std::uint8_t>(8 * bytes_per_element(view.dtype));
  const bool plain = view.dtype != DType::bf16;
  const nb::dlpack::dtype dtype{static_cast<std::uint8_t>(plain ? nb::dlpack::dtype_code::Float
                                                                : nb::dlpack::dtype_code::UInt),
                                bits, 1};
  const nb::ndarray<nb::numpy, nb::ro> array(view.data, 2, shape.data(), owner, strides.data(),
                                             dtype);
  if (plain) return nb::cast(array);
  return nb::module_::import_("fusedmoe.config").attr("TensorView")(array, "bf16");
}

nb::object routing_of(const LayerObject& self, const nb::object& owner) {
  const std::optional<RoutingConfig> config = checkpoint::routing_config(*self.layer);
  if (!config) return nb::none();
  return nb::module_::import_("fusedmoe.config")
      .attr("RoutingConfig")(
          nb::arg("top_k") = config->top_k,
          nb::arg("score_function") = to_string(*config->score_function),
          nb::arg("selection_bias") = to_array_object(config->selection_bias, owner),
          nb::arg("renormalise") = to_string(config->renormalise),
          nb::arg("epsilon") = config->epsilon, nb::arg("num_groups") = config->num_groups,
          nb::arg("topk_group") = config->topk_group,
          nb::arg("group_score") = to_string(config->group_score),
          nb::arg("scaling_factor") = config->scaling_factor);
}

std::vector<std::int32_t> resolve(nb::handle map, std::int64_t num_experts) {
  return nb::isinstance<ExpertMap>(map) ? nb::cast<const ExpertMap&>(map).resolve(num_experts)
                                        : to_map("expert_map", map);
}

}  // namespace

void bind_checkpoint(nb::module_& module) {
  nb::class_<CheckpointWeights>(
      module, "CheckpointWeights",
      "The experts of a layer in mapped files, read when a plan is built: pass it to "
      "FusedMoe.create.")
      .def(
          "local",
          [](const CheckpointWeights& self, nb::handle expert_map) {
            return CheckpointWeights{
                self.checkpoint,
                local_experts(self.weights, resolve(expert_map, self.weights.w13.experts))};
          },
          nb::arg("expert_map"),
          nb::sig("def local(self, expert_map: ExpertMap | Sequence[int] | Array) -> "
                  "CheckpointWeights"),
          "The experts of one rank: what a plan with that expert_map takes.")
      .def_prop_ro(
          "w13", [](const CheckpointWeights& self) { return from_tensor(self.weights.w13); },
          nb::sig("def w13(self) -> WeightTensor"),
          "Format, layout, shape and how scales lie, without data; the gate alone beside w13_up.")
      .def_prop_ro(
          "w13_up", [](const CheckpointWeights& self) { return from_tensor(self.weights.w13_up); },
          nb::sig("def w13_up(self) -> WeightTensor | None"))
      .def_prop_ro(
          "w2", [](const CheckpointWeights& self) { return from_tensor(self.weights.w2); },
          nb::sig("def w2(self) -> WeightTensor"))
      .def("__copy__", [](nb::handle self) { return nb::borrow(self); })
      .def("__deepcopy__", [](nb::handle self, nb::handle) { return nb::borrow(self); });

  nb::class_<LayerObject>(module, "CheckpointLayer", "One MoE layer of a checkpoint.")
      .def_prop_ro(
          "index", [](const LayerObject& self) { return self.layer->index; },
          "Of the layer in the model.")
      .def_prop_ro(
          "config", [](const LayerObject& self) { return from_config(self.layer->config); },
          nb::sig("def config(self) -> MoeConfig"))
      .def_prop_ro("weights",
                   [](const LayerObject& self) {
                     return CheckpointWeights{self.checkpoint, self.layer->weights};
                   })
      .def_prop_ro(
          "routing",
          [](nb::handle self) {
            return routing_of(nb::cast<const LayerObject&>(self), nb::borrow(self));
          },
          nb::sig("def routing(self) -> RoutingConfig | None"),
          "None for routers that are not in the library: ids and weights are the caller's.")
      .def_prop_ro(
          "router_weight",
          [](nb::handle self) {
            return to_array_object(nb::cast<const LayerObject&>(self).layer->router_weight,
                                   nb::borrow(self));
          },
          nb::sig("def router_weight(self) -> Array"), "[num_experts, hidden_size]")
      .def_prop_ro(
          "router_logit_bias",
          [](nb::handle self) {
            return to_array_object(nb::cast<const LayerObject&>(self).layer->router_logit_bias,
                                   nb::borrow(self));
          },
          nb::sig("def router_logit_bias(self) -> Array | None"), "[1, num_experts] or None")
      .def_prop_ro(
          "bytes", [](const LayerObject& self) { return self.layer->bytes; },
          "Of the experts' tensors.")
      .def_prop_ro(
          "formats",
          [](const LayerObject& self) {
            std::vector<std::string> names;
            for (const WeightFormat format : self.layer->formats) {
              names.emplace_back(to_string(format));
            }
            return names;
          },
          "Each once, w13 first.")
      .def_prop_ro(
          "notes", [](const LayerObject& self) { return self.layer->notes; },
          "What a user should know, though nothing is wrong.");

  nb::class_<CheckpointObject>(module, "Checkpoint",
                               "A model's checkpoint: a sequence of its MoE layers, ascending.")
      .def_prop_ro("family", [](const CheckpointObject& self) { return self.checkpoint->family(); })
      .def("__len__", [](const CheckpointObject& self) { return self.checkpoint->layers().size(); })
      .def(
          "__getitem__",
          [](const CheckpointObject& self, std::int64_t index) {
            const auto& layers = self.checkpoint->layers();
            const auto count = static_cast<std::int64_t>(layers.size());
            if (index < -count || index >= count) throw nb::index_error("no such layer");
            return LayerObject{
                self.checkpoint,
                &layers[static_cast<std::size_t>(index < 0 ? index + count : index)]};
          },
          nb::arg("index"));

  module.def(
      "load_checkpoint",
      [](nb::handle path, const nb::object& config) {
        const auto text = [](nb::handle object) {
          return nb::cast<std::string>(nb::module_::import_("os").attr("fspath")(object));
        };
        const std::string folder = text(path);
        std::optional<std::filesystem::path> config_path;
        if (!config.is_none()) config_path = text(config);
        const nb::gil_scoped_release release;
        return CheckpointObject{
            std::make_shared<Checkpoint>(Checkpoint::open(folder, config_path))};
      },
      nb::arg("path"), nb::arg("config") = nb::none(),
      nb::sig("def load_checkpoint(path: str | os.PathLike[str], config: str | os.PathLike[str] | "
              "None = None) -> Checkpoint"),
      "Open a checkpoint folder, a .safetensors or a .gguf file. Files are mapped; weights are "
      "read when "
      "plans are built, one expert at a time.\n\n"
      "config: where config.json is, when it is not beside the weights. Raises IoError for what is "
      "broken and Unsupported for what is sound but not read.");
}

}  // namespace fusedmoe::python
