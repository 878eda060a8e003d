// What the torch operators take from a fusedmoe.FusedMoe: passed as an address between the two
// extension modules of one package, which are always built together.
#pragma once

#include <memory>

#include "fusedmoe/fused_moe.h"

namespace fusedmoe::python {

struct NativePlan {
  std::shared_ptr<FusedMoe> plan;
  std::shared_ptr<const void> storage_owner;  // of the caller's memory for packed weights
};

}  // namespace fusedmoe::python
