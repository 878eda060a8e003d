// How far a result may be from the oracle: one table, and the two errors that it bounds.
#pragma once

#include <cstdint>
#include <span>

#include "fusedmoe/config.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"

namespace fusedmoe {

struct Errors {
  double rel_l2 = 0;     // ||got - expected|| / ||expected||
  double max_error = 0;  // max |got - expected| / max |expected|
};

// expected: [rows * columns] of got. Infinite as soon as one value is finite on one side only, or
// NaN on one side only; where both sides agree on NaN or infinity they count as equal.
// scale: what reference_scale gives; then errors are relative to it where it is larger.
Errors compare(const ConstMatrixView& got, std::span<const double> expected,
               std::span<const double> scale = {});

// compute: the dtype of the activated intermediate; output: of the result.
Errors tolerance(WeightFormat format, DType compute, DType output, ComputeMode mode);

inline bool within(const Errors& errors, const Errors& limit) {
  return errors.rel_l2 <= limit.rel_l2 && errors.max_error <= limit.max_error;
}

}  // namespace fusedmoe
