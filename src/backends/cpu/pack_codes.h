// The codes of a panel, out of the caller's layouts into the order in which a kernel reads them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "backends/cpu/panel_format.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cpu {

// An output of a panel: a row of a tensor of the caller; null = padding, zeros.
struct PanelOutput {
  const WeightTensor* tensor = nullptr;
  std::int64_t expert = 0;  // counts within the tensor
  std::int64_t n = 0;
};
using PanelOutputs = std::array<PanelOutput, kPanelOutputs>;

// Whether a panel is multiplied at once, and belongs into the caches, or later.
enum class PanelUse { now, later };

// to: k0 .. k0+k of the panel, format.code_bytes(k) bytes; k0 is a multiple of the format's period.
void pack_codes(const PanelOutputs& outputs, const PanelFormat& format, std::int64_t k0,
                std::int64_t k, std::byte* to, PanelUse use);

// to: [count][32] elements of 1, 2 or 4 bytes, elements first .. first + count of 32 rows; null
// rows are zeros.
void pack_columns(const std::array<const std::byte*, kPanelOutputs>& rows, std::int64_t bytes,
                  std::int64_t first, std::int64_t count, std::byte* to);

}  // namespace fusedmoe::cpu
