// What a Python object says of its memory: NumPy arrays, torch tensors, anything with DLPack, and
// fusedmoe.TensorView. Nothing is copied; views for the library are made from it here.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "fusedmoe/tensor.h"

namespace fusedmoe::python {

namespace nb = nanobind;

enum class Element : std::uint8_t {
  f32,
  f16,
  bf16,
  f64,
  i64,
  i32,
  i16,
  i8,
  u8,
  u16,
  boolean,
  fp8_e4m3,
  fp8_e5m2,
  fp8_e4m3fnuz,  // no format: half the value of the same bits as e4m3
  fp8_e5m2fnuz,
  e8m0,
  fp4_x2,  // two elements in a byte
  other,
};
const char* to_string(Element element) noexcept;

struct Array {
  static constexpr int kMaxDims = 4;

  void* data = nullptr;
  Element element = Element::other;
  std::int64_t element_bytes = 0;
  int num_dims = 0;
  std::array<std::int64_t, kMaxDims> shape{};
  std::array<std::int64_t, kMaxDims> stride{};  // in elements
  std::string device = {};                      // empty = the CPU
  nb::object owner = {};                        // keeps the memory alive

  std::int64_t size() const;
  bool contiguous() const;
  // "bf16 [17, 8]" for messages.
  std::string text() const;
};

enum class Access : std::uint8_t { read, write };

// Throws Error{invalid_argument} naming `name` for what is no array, has more than four
// dimensions, or, for Access::write, is read-only.
Array to_array(const char* name, nb::handle object, Access access = Access::read);

// A 2-D array as a view of the library. Throws Error{invalid_argument} for other shapes, and for
// element types and strides that a view cannot say.
MatrixView to_matrix(const char* name, const Array& array);
// The same for a 1-D array, as one row.
MatrixView to_row(const char* name, const Array& array);

// Throws Error{invalid_argument} for memory that is not the CPU's.
void check_on_cpu(const char* name, const Array& array);

// The bytes of a contiguous array of any type, on the CPU.
std::span<std::byte> to_bytes(const char* name, const Array& array);

// str(object).
std::string to_text(nb::handle object);

[[noreturn]] void refuse(const std::string& name, const std::string& expected,
                         const std::string& got, const std::string& remedy);

}  // namespace fusedmoe::python
