// One element of a matrix of routing, by its run-time dtype: f32, f16 and bf16 as float, i32 and
// i64 as int64. Through memcpy, so that data may have any alignment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "formats/float_bits.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::routing {

template <typename T>
T load_as(const void* data, std::int64_t index) noexcept {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(data) + index * std::int64_t{sizeof(T)},
              sizeof(T));
  return value;
}

template <typename T>
void store_as(void* data, std::int64_t index, T value) noexcept {
  std::memcpy(static_cast<std::byte*>(data) + index * std::int64_t{sizeof(T)}, &value, sizeof(T));
}

inline float load_float(const void* data, DType dtype, std::int64_t index) noexcept {
  switch (dtype) {
    case DType::f16:
      return f16_to_f32(load_as<std::uint16_t>(data, index));
    case DType::bf16:
      return bf16_to_f32(load_as<std::uint16_t>(data, index));
    default:
      return load_as<float>(data, index);
  }
}

inline void store_float(void* data, DType dtype, std::int64_t index, float value) noexcept {
  switch (dtype) {
    case DType::f16:
      return store_as(data, index, f32_to_f16(value));
    case DType::bf16:
      return store_as(data, index, f32_to_bf16(value));
    default:
      return store_as(data, index, value);
  }
}

inline std::int64_t load_id(const void* data, DType dtype, std::int64_t index) noexcept {
  return dtype == DType::i64 ? load_as<std::int64_t>(data, index)
                             : load_as<std::int32_t>(data, index);
}

inline void store_id(void* data, DType dtype, std::int64_t index, std::int64_t id) noexcept {
  if (dtype == DType::i64) return store_as(data, index, id);
  store_as(data, index, static_cast<std::int32_t>(id));
}

}  // namespace fusedmoe::routing
