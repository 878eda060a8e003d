// From the caller's layouts to panels: which rows make up a panel, and the copy. Used once per plan
// for packed weights, and for each use of a panel when weights are borrowed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/pack_codes.h"
#include "backends/cpu/panel_format.h"
#include "core/backend.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cpu {

// Panel `panel` of w13 or w2 of one expert. `expert` counts within `weights`, which must outlive
// the result.
PanelOutputs w13_panel(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t expert,
                       std::int64_t panel);
PanelOutputs w2_panel(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t expert,
                      std::int64_t panel);

// to: k0 .. k0+k of a panel, format.bytes(k), as a panel of its own; k0 is a multiple of the
// format's period.
void pack_panel(const PanelOutputs& outputs, const PanelFormat& format, std::int64_t k0,
                std::int64_t k, std::byte* to, PanelUse use = PanelUse::now);
// to: [32] in the panel's order, what the epilogue multiplies by. False when there is nothing.
bool column_scales(const PanelOutputs& outputs, const PanelFormat& format, float* to);

// The biases of a panel in its order, fp32, zeros for padding. False when there is no bias.
bool w13_bias_panel(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t expert,
                    std::int64_t panel, float* to);
bool w2_bias_panel(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t expert,
                   std::int64_t panel, float* to);

}  // namespace fusedmoe::cpu
