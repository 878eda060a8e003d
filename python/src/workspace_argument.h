// The workspaces that Python knows, and anything that can be one.
#pragma once

#include <nanobind/nanobind.h>

#include "fusedmoe/workspace.h"

namespace fusedmoe::python {

// A lane of a pool: keeps the pool alive in Python, and is a workspace.
struct Lane {
  Workspace workspace;
};

// None (the call allocates), a WorkspaceBuffer, a lane, or a writable contiguous array.
Workspace to_workspace(nanobind::handle workspace, nanobind::handle workspace13);

// fusedmoe.config.WorkspaceSize.
nanobind::object from_size(const WorkspaceSize& size);

}  // namespace fusedmoe::python
