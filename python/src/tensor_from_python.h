// A WeightTensor of Python as a view of the library, with what only Python can check: the library
// sees addresses, Python sees arrays, whose dtypes and shapes must be what format and layout imply.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "array.h"
#include "fusedmoe/config.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::python {

// `object`: an array [experts, outputs, inputs] or a WeightTensor; None = an empty tensor. Appends
// what keeps the memory alive to `owners`. Throws Error{invalid_argument} naming `name` or a part
// of it.
WeightTensor to_tensor(const std::string& name, nb::handle object, const Device& device,
                       std::vector<nb::object>& owners);

// The other way, without data: format, layout, shape and how scales lie, or None for an empty one.
nb::object from_tensor(const WeightTensor& tensor);

}  // namespace fusedmoe::python
