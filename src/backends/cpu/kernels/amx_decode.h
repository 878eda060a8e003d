// Panels of codes as the tiles of AMX-BF16 read them: steps of 32 k by 32 outputs, [16][32][2]
// bf16, each weight scaled in fp32 and rounded once.
#pragma once

#include <cstdint>

#include "backends/cpu/kernels/kernels.h"

namespace fusedmoe::cpu {

// What a decoder keeps from one call to the next of the same piece: what it made of the scales.
struct DecodeState {
  std::int64_t segment = -1;
  alignas(64) char memory[8192];
};

// Steps [begin, begin + count) of a piece, into `to`; zeros behind its last k. Called in ascending
// order of steps.
using DecodeSteps = void (*)(const GemmTile& tile, std::int64_t begin, std::int64_t count,
                             DecodeState& state, void* to);

// The function for a code; null for bf16, which tiles read where it lies.
DecodeSteps decode_steps(Code code) noexcept;

}  // namespace fusedmoe::cpu
