// What the torch operators take from a fusedmoe.FusedMoe: passed as an address between the two
// extension modules of one package, which are always built together.
#pragma once

#include <memory>

#include "fusedmoe/fused_moe.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::python {

struct NativePlan {
  std::shared_ptr<FusedMoe> plan;
  // Shapes, layouts and addresses that it read last; without source, when there was one.
  ExpertWeights weights;
};

}  // namespace fusedmoe::python
