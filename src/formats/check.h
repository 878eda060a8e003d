// Whether a tensor is what its format means: layout, strides, scales. Whether it fits a layer is
// checked in core/validate.cpp.
#pragma once

#include <cstdint>
#include <string>

#include "fusedmoe/error.h"
#include "fusedmoe/weights.h"

namespace fusedmoe {

// Beyond this a size is a mistake, and products of two stay far inside 64 bits.
inline constexpr std::int64_t kMaxSize = std::int64_t{1} << 31;
// Elements beyond any memory: below it 64 bits hold every offset in bytes.
inline constexpr std::int64_t kMaxElements = std::int64_t{1} << 56;
inline bool in_memory(std::int64_t count, std::int64_t stride) {
  return stride <= kMaxElements / count;
}

[[noreturn]] inline void refuse(const std::string& argument, const std::string& expected,
                                const std::string& got, const std::string& remedy,
                                ErrorCode code = ErrorCode::invalid_argument) {
  throw Error(code, argument + ": expected " + expected + ", got " + got + "; " + remedy);
}

template <class Enum>
void check_enum(const char* name, Enum value, Enum last) {
  if (static_cast<int>(value) <= static_cast<int>(last)) return;
  refuse(name, "0 to " + std::to_string(static_cast<int>(last)),
         std::to_string(static_cast<int>(value)), "use an enumerator");
}

// "[experts, outputs, inputs]" as stored.
std::string shape_text(const WeightTensor& tensor);

// Throws Error{invalid_argument} about `name` or a part of it. shapes_only: the memory itself will
// not be read and may be null.
void check_weight_tensor(const std::string& name, const WeightTensor& tensor, bool shapes_only);

}  // namespace fusedmoe
