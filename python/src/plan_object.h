// fusedmoe.FusedMoe. What keeps tensors alive is in the weights that the library holds.
#pragma once

#include "native_plan.h"

namespace fusedmoe::python {

struct PlanObject : NativePlan {};

}  // namespace fusedmoe::python
