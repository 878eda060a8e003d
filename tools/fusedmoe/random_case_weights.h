// Weights of a random case: formats, where their scales lie, and what else there is to store. The
// rest of a case is in random_case.cpp.
#pragma once

#include <cstdint>

#include "random_case.h"
#include "random_draw.h"

namespace fusedmoe::tool {

// Formats, and the mode that they may allow. Before the sizes: some come in blocks that must be
// whole.
void draw_formats(RandomCase& drawn, Draw& draw, const SizeLimits& limits);
// What inputs of a matrix of that format are a multiple of.
std::int64_t multiple_of(WeightFormat format);
// Everything else, after the sizes.
void draw_weights(RandomCase& drawn, Draw& draw);
// Where there is no such plan, the case is one of mode a16.
bool supports_a8(const RandomCase& drawn);

}  // namespace fusedmoe::tool
