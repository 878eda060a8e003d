// From the caller's layouts to panels: which rows make up a panel, and the copy. Used once per plan
// for packed weights, and for each use of a panel when weights are borrowed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "backends/cpu/kernels/kernels.h"
#include "core/backend.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cpu {

// Where the 32 outputs of a panel start in the caller's memory; null = padding, zeros.
struct PanelOutputs {
  std::array<const std::byte*, kPanelOutputs> output;
  // Bytes from one k to the next. Per output: gate and up may lie in tensors of their own.
  std::array<std::int64_t, kPanelOutputs> k_stride;
  int element_bytes;
};

// Panel `panel` of w13 or w2 of one expert. `expert` counts within `weights`.
PanelOutputs w13_panel(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t expert,
                       std::int64_t panel);
PanelOutputs w2_panel(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t expert,
                      std::int64_t panel);

// Whether a panel is multiplied at once, and belongs into the caches, or later.
enum class PanelUse { now, later };

// to: k0 .. k0+k of the panel in a kernel's layout, elements as they are; k0 is a multiple of
// k_multiple. Writes padded(k) * 32 elements.
void copy_panel(const PanelOutputs& panel, std::int64_t k0, std::int64_t k, PanelLayout layout,
                void* to, PanelUse use = PanelUse::now);

// The biases of a panel in its order, fp32, zeros for padding. False when there is no bias.
bool w13_bias_panel(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t expert,
                    std::int64_t panel, float* to);
bool w2_bias_panel(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t expert,
                   std::int64_t panel, float* to);

}  // namespace fusedmoe::cpu
