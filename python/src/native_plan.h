// fusedmoe.FusedMoe of Python. The torch operators take it by its address: the two extension
// modules of one package are always built together. What keeps tensors alive is in the weights that
// the library holds.
#pragma once

#include <memory>

#include "fusedmoe/fused_moe.h"

namespace fusedmoe::python {

struct NativePlan {
  std::shared_ptr<FusedMoe> plan;
  std::shared_ptr<const void> storage_owner;  // of the caller's memory for packed weights
};

}  // namespace fusedmoe::python
