// Router logits -> topk_ids and topk_weights.
#include <nanobind/nanobind.h>

#include "array.h"
#include "bindings.h"
#include "from_python.h"
#include "fusedmoe/routing.h"

namespace fusedmoe::python {
namespace {

using Route = void (*)(const RoutingConfig&, ConstMatrixView, MatrixView, MatrixView);

void bind(nb::module_& module, const char* name, Route route, const char* signature,
          const char* doc) {
  module.def(
      name,
      [route](nb::handle config, nb::handle logits, nb::handle topk_weights, nb::handle topk_ids) {
        const OwnedRouting routing = to_routing(config);
        const auto matrix = [](const char* argument, nb::handle object, Access access) {
          const Array array = to_array(argument, object, access);
          check_on_cpu(argument, array);
          return to_matrix(argument, array);
        };
        const MatrixView in = matrix("logits", logits, Access::read);
        const MatrixView weights = matrix("topk_weights", topk_weights, Access::write);
        const MatrixView ids = matrix("topk_ids", topk_ids, Access::write);
        const nb::gil_scoped_release release;
        route(routing.config, in, weights, ids);
      },
      nb::arg("config"), nb::arg("logits"), nb::arg("topk_weights"), nb::arg("topk_ids"),
      nb::sig(signature), doc);
}

}  // namespace

void bind_routing(nb::module_& module) {
  bind(module, "route", &route,
       "def route(config: RoutingConfig, logits: Array, topk_weights: Array, topk_ids: Array) -> "
       "None",
       "Choose top_k experts for each token, on the calling thread.\n\n"
       "logits        [num_tokens, num_experts], f32, f16 or bf16\n"
       "topk_weights  [num_tokens, top_k], f32, f16 or bf16; written, rounded once\n"
       "topk_ids      [num_tokens, top_k], int32 or int64; written\n\n"
       "Experts of a row are in descending order of the biased score; ties go to the lower id. "
       "Raises InvalidArgument before anything is written.");
  bind(module, "topk_softmax", &topk_softmax,
       "def topk_softmax(config: RoutingConfig, logits: Array, topk_weights: Array, topk_ids: "
       "Array) -> None",
       "route() with a softmax over all experts, or over the chosen ones when "
       "config.score_function says softmax_of_chosen. Without groups.");
  bind(module, "topk_sigmoid", &topk_sigmoid,
       "def topk_sigmoid(config: RoutingConfig, logits: Array, topk_weights: Array, topk_ids: "
       "Array) -> None",
       "route() with sigmoid scores, without groups.");
  bind(module, "topk_softplus_sqrt", &topk_softplus_sqrt,
       "def topk_softplus_sqrt(config: RoutingConfig, logits: Array, topk_weights: Array, "
       "topk_ids: Array) -> None",
       "route() with sqrt(softplus) scores, without groups.");
  bind(module, "grouped_topk", &grouped_topk,
       "def grouped_topk(config: RoutingConfig, logits: Array, topk_weights: Array, topk_ids: "
       "Array) -> None",
       "route() with groups. Sigmoid unless config.score_function says otherwise.");
}

}  // namespace fusedmoe::python
