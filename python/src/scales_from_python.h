// WeightScales of Python as a view of the library, held to the shapes and dtypes that format and
// layout imply. The tensor's data are read in tensor_from_python.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "array.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::python {

// Fills tensor.scales; the rest of `tensor` is there. Appends what keeps the memory alive to
// `owners`. Throws Error{invalid_argument} naming `name`.scales or a part of it.
void read_scales(const std::string& name, nb::handle object, WeightTensor& tensor,
                 std::vector<nb::object>& owners);

// The other way, without data; None without scales.
nb::object from_scales(const WeightScales& scales);

// Shapes as Python keeps them: of the scales of a tensor (and of its zero points), and of its
// global scales. Empty where there are none.
std::vector<std::int64_t> scale_dims(const WeightTensor& tensor);
std::vector<std::int64_t> global_dims(const WeightTensor& tensor);

// What an array may be: its own dtype, or the bits of it.
struct Dtypes {
  Element own, bits;
};

// Throws Error{invalid_argument} for other dtypes.
void check_dtype(const std::string& name, const Dtypes& expected, const Array& array);
// What to do about a dtype that is refused.
const char* remedy_of(Element element);

// "[4, 3]".
std::string dims_text(const std::vector<std::int64_t>& dims);

// An array without gaps on the CPU.
Array dense(const std::string& name, nb::handle object, std::vector<nb::object>& owners);

}  // namespace fusedmoe::python
