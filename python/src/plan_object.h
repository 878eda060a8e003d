// fusedmoe.FusedMoe: a plan and the Python objects whose memory it may read again.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "native_plan.h"

namespace fusedmoe::python {

struct PlanObject : NativePlan {
  std::vector<nanobind::object> weight_owners;  // empty for weights that were packed for good
  std::vector<nanobind::object> option_owners;  // storage
  nanobind::object version_owner;               // asked at every call
  bool reads_again = false;                     // borrows, or refreshes by itself
};

}  // namespace fusedmoe::python
