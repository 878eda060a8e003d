// The weights of one layer of a checkpoint: views into mapped files, which they keep alive.
#pragma once

#include <memory>

#include "checkpoint/checkpoint.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::python {

struct CheckpointWeights {
  std::shared_ptr<const checkpoint::Checkpoint> checkpoint;
  ExpertWeights weights;
};

}  // namespace fusedmoe::python
