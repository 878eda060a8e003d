// Small texts that several verbs print.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fusedmoe/config.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::tool {

// "48 KiB", "1.5 GiB"
inline std::string bytes_text(std::int64_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return fmt::format("{} bytes", bytes);
  double value = static_cast<double>(bytes) / 1024;
  int unit = 0;
  while (value >= 1024 && unit < 3) {
    value /= 1024;
    ++unit;
  }
  // Three digits are enough for people, and whole numbers need no point.
  const bool whole = value == static_cast<double>(static_cast<std::int64_t>(value));
  return whole || value >= 100 ? fmt::format("{:.0f} {}", value, kUnits[unit])
                               : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

// "bf16" as in the names of formats and on the command line, where the library says "bfloat16".
inline std::string dtype_name(DType dtype) {
  return dtype == DType::f32    ? "f32"
         : dtype == DType::f16  ? "f16"
         : dtype == DType::bf16 ? "bf16"
                                : to_string(dtype);
}

inline const char* mode_name(ComputeMode mode) { return mode == ComputeMode::a16 ? "a16" : "a8"; }

// "bf16", or "bf16+f32" when matrices differ; empty = none.
inline std::string formats_text(const std::vector<WeightFormat>& formats) {
  std::string text;
  for (const WeightFormat format : formats) {
    text += (text.empty() ? "" : "+") + std::string(to_string(format));
  }
  return text;
}

}  // namespace fusedmoe::tool
