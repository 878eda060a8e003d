// WorkspaceBuffer and WorkspacePool.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "array.h"
#include "bindings.h"
#include "fusedmoe/fused_moe.h"
#include "native_plan.h"
#include "workspace_argument.h"

namespace fusedmoe::python {
namespace {

WorkspaceSize to_size(nb::handle size) {
  WorkspaceSize result{0, 64};
  if (nb::try_cast(size, result.bytes)) return result;
  if (PyTuple_Check(size.ptr()) != 0 && nb::len(size) == 2 && nb::try_cast(size[0], result.bytes) &&
      nb::try_cast(size[1], result.alignment)) {
    return result;
  }
  refuse("size", "a WorkspaceSize or a number of bytes", nb::cast<std::string>(nb::repr(size)),
         "pass plan.workspace_size(max_tokens)");
}

std::span<std::byte> to_span(const char* name, nb::handle object) {
  if (nb::isinstance<WorkspaceBuffer>(object)) {
    return nb::cast<const WorkspaceBuffer&>(object).span();
  }
  return to_bytes(name, to_array(name, object, Access::write));
}

}  // namespace

nb::object from_size(const WorkspaceSize& size) {
  return nb::module_::import_("fusedmoe.config").attr("WorkspaceSize")(size.bytes, size.alignment);
}

Workspace to_workspace(nb::handle workspace, nb::handle workspace13) {
  if (nb::isinstance<Lane>(workspace)) {
    if (!workspace13.is_none()) {
      refuse("workspace13", "None beside a lane, which is the whole workspace", "another",
             "pass one of them");
    }
    return nb::cast<const Lane&>(workspace).workspace;
  }
  if (workspace13.is_none()) {
    return workspace.is_none() ? Workspace() : Workspace(to_span("workspace", workspace));
  }
  if (workspace.is_none()) return {to_span("workspace13", workspace13)};
  return {to_span("workspace13", workspace13), to_span("workspace", workspace)};
}

void bind_workspace(nb::module_& module) {
  nb::class_<WorkspaceBuffer>(
      module, "WorkspaceBuffer",
      "Owning scratch on a device; one serves all layers, one call at a time.\n\n"
      "``size``: a WorkspaceSize or a number of bytes. Not for concurrent use of its own members.")
      .def(
          "__init__",
          [](WorkspaceBuffer* self, nb::handle size, const std::string& device) {
            new (self) WorkspaceBuffer(parse_device(device), to_size(size));
          },
          nb::arg("size") = 0, nb::arg("device") = "cpu",
          nb::sig("def __init__(self, size: WorkspaceSize | int = 0, device: str = 'cpu') -> None"))
      .def(
          "reserve", [](WorkspaceBuffer& self, nb::handle size) { self.reserve(to_size(size)); },
          nb::arg("size"), nb::sig("def reserve(self, size: WorkspaceSize | int) -> None"),
          "Grow to at least ``size``; never shrinks, contents are not kept.\n\n"
          "Raises WorkspaceTooSmall with need and have once locked, OutOfMemory when there is "
          "none.")
      .def("lock", &WorkspaceBuffer::lock,
           "From now on growth raises: an engine calls it after warm-up.")
      .def_prop_ro("locked", &WorkspaceBuffer::locked)
      .def_prop_ro("bytes", &WorkspaceBuffer::bytes)
      .def_prop_ro("device", [](const WorkspaceBuffer& self) { return to_string(self.device()); });

  nb::class_<Lane>(module, "Lane",
                   "One lane of a WorkspacePool: a workspace, for one call at a time.");
  nb::class_<WorkspacePool>(
      module, "WorkspacePool",
      "One buffer per lane (micro-batch, stream), each as large as the largest plan that "
      "registered.\n\nSafe from any thread.")
      .def(
          "__init__",
          [](WorkspacePool* self, int num_lanes, const std::string& device) {
            new (self) WorkspacePool(parse_device(device), num_lanes);
          },
          nb::arg("num_lanes"), nb::arg("device") = "cpu")
      .def(
          "register_plan",
          [](WorkspacePool& self, const NativePlan& plan, std::int64_t max_tokens) {
            self.register_plan(*plan.plan, max_tokens);
          },
          nb::arg("plan"), nb::arg("max_tokens"),
          "Make every lane large enough for ``plan`` at ``max_tokens``.\n\n"
          "Raises WorkspaceTooSmall once locked.")
      .def("lock", &WorkspacePool::lock,
           "Allocate what is registered and refuse growth from now on.")
      .def(
          "lane", [](WorkspacePool& self, int index) { return Lane{self.lane(index)}; },
          nb::arg("index"), nb::keep_alive<0, 1>(),
          "The lane's workspace; allocates it when it is not there yet.")
      .def_prop_ro("num_lanes", &WorkspacePool::num_lanes)
      .def_prop_ro("bytes_per_lane", &WorkspacePool::bytes_per_lane);
}

}  // namespace fusedmoe::python
