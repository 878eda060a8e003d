// Attributes of the dataclasses of fusedmoe/config.py, by name, with errors that say which.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstddef>
#include <string>
#include <type_traits>

#include "array.h"

namespace fusedmoe::python {

// The enumerator that the library spells so; its names end where to_string knows no more.
template <class Enum>
Enum to_enum(const std::string& name, nb::handle object) {
  const std::string text = to_text(object);
  std::string all;
  for (int i = 0;; ++i) {
    const std::string known = to_string(static_cast<Enum>(i));
    if (known == "unknown") break;
    if (text == known) return static_cast<Enum>(i);
    all += (i > 0 ? ", " : "") + known;
  }
  refuse(name, "one of " + all, "'" + text + "'", "spell it so");
}

// The same for enumerations that are only words here.
template <class Enum, std::size_t kCount>
Enum to_enum(const std::string& name, nb::handle object,
             const std::array<const char*, kCount>& names) {
  const std::string text = to_text(object);
  std::string all;
  for (std::size_t i = 0; i < kCount; ++i) {
    if (text == names[i]) return static_cast<Enum>(i);
    all += std::string(i > 0 ? ", " : "") + names[i];
  }
  refuse(name, "one of " + all, "'" + text + "'", "spell it so");
}

// A number of that attribute; says which attribute when it is none.
template <class T>
T number(nb::handle object, const char* owner, const char* attribute) {
  const nb::object value = object.attr(attribute);
  T result{};
  if (!nb::try_cast(value, result)) {
    refuse(std::string(owner) + "." + attribute,
           std::is_floating_point_v<T> ? std::string("a number")
                                       : "an integer of " + std::to_string(8 * sizeof(T)) + " bits",
           nb::cast<std::string>(nb::repr(value)), "pass one");
  }
  return result;
}

inline bool boolean(nb::handle object, const char* owner, const char* attribute) {
  const nb::object value = object.attr(attribute);
  if (value.is(Py_True) || value.is(Py_False)) return value.is(Py_True);
  refuse(std::string(owner) + "." + attribute, "True or False",
         nb::cast<std::string>(nb::repr(value)), "pass bool(...) of it");
}

}  // namespace fusedmoe::python
