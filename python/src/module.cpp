// fusedmoe._core: the library in Python. What users import is in fusedmoe/__init__.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <exception>
#include <string>

#include "bindings.h"
#include "from_python.h"
#include "fusedmoe/error.h"
#include "fusedmoe/expert_map.h"
#include "fusedmoe/fused_moe.h"
#include "fusedmoe/version.h"

namespace fusedmoe::python {
namespace {

void raise_error(const Error& error) {
  const nb::object exception = nb::module_::import_("fusedmoe.errors")
                                   .attr("from_code")(to_string(error.code()), error.what());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
}

void bind_expert_map(nb::module_& module) {
  nb::class_<ExpertMap>(
      module, "ExpertMap",
      "Global expert id -> local expert id, -1 = not on this rank. The default holds every expert.")
      .def(nb::init<>())
      .def_static("linear", &ExpertMap::linear, nb::arg("rank"), nb::arg("size"),
                  "Contiguous ranges; the first ranks get one more where it does not divide.")
      .def_static("round_robin", &ExpertMap::round_robin, nb::arg("rank"), nb::arg("size"),
                  "Expert g is on rank g % size with local id g // size.")
      .def_static(
          "explicit_map",
          [](nb::handle map) { return ExpertMap::explicit_map(to_map("map", map)); },
          nb::arg("map"), nb::sig("def explicit_map(map: Sequence[int] | Array) -> ExpertMap"),
          "map[global id] = local id or -1; local ids are 0..n-1, each once.")
      .def("resolve", &ExpertMap::resolve, nb::arg("num_experts"),
           "The whole table. Raises InvalidArgument with the numbers.")
      .def_prop_ro("is_identity", &ExpertMap::is_identity);
}

void bind_version(nb::module_& module) {
  nb::class_<WeightsVersion>(
      module, "WeightsVersion",
      "A counter that the owner of weights bumps after changing them; plans built with it then "
      "raise StaleWeights, or refresh, as they were made.")
      .def(nb::init<>())
      .def(
          "bump", [](WeightsVersion& self) { return self.value.fetch_add(1) + 1; },
          "Count one change; returns the new value.")
      .def("__copy__", [](nb::handle self) { return nb::borrow(self); })
      .def("__deepcopy__", [](nb::handle self, nb::handle) { return nb::borrow(self); })
      .def_prop_ro("value", [](const WeightsVersion& self) { return self.value.load(); })
      .def_prop_ro(
          "address",
          [](const WeightsVersion& self) { return reinterpret_cast<std::uintptr_t>(&self.value); },
          "Of the std::atomic<uint64_t>, for owners in C and C++.");
}

}  // namespace
}  // namespace fusedmoe::python

NB_MODULE(_core, module) {
  using namespace fusedmoe;
  using namespace fusedmoe::python;
  nb::set_leak_warnings(false);  // a plan that lives to the end of the process is no fault to print
  module.doc() = "fusedmoe: one fused mixture-of-experts layer as a plan.";
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise_error(error);
    }
  });
  module.attr("__version__") = version();
  bind_expert_map(module);
  bind_version(module);
  bind_workspace(module);
  bind_plan(module);
  bind_routing(module);
  bind_checkpoint(module);
  bind_quantize(module);
  module.def(
      "list_devices",
      [] {
        nb::list devices;
        for (const DeviceInfo& device : list_devices()) {
          nb::dict entry;
          entry["name"] = device.name;
          entry["available"] = device.available;
          entry["reason"] = device.reason;
          devices.append(entry);
        }
        return devices;
      },
      nb::sig("def list_devices() -> list[dict[str, Any]]"),
      "One entry per backend: whether plans can be built there, and if not, why.");
}
