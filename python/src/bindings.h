// One function for each part of the module; module.cpp calls them.
#pragma once

#include <nanobind/nanobind.h>

namespace fusedmoe::python {

void bind_workspace(nanobind::module_& module);
void bind_plan(nanobind::module_& module);
void bind_routing(nanobind::module_& module);
void bind_checkpoint(nanobind::module_& module);
void bind_quantize(nanobind::module_& module);

}  // namespace fusedmoe::python
