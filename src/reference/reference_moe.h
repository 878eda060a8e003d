// The oracle: the layer as a plain fp64 loop over decoded weights. No speed, no sharing with the
// backends beyond the definitions in formats/ and activations/.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fusedmoe/config.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"

namespace fusedmoe {

// Value at (row, column) of a view of activations, router weights or biases.
double element(const ConstMatrixView& view, std::int64_t row, std::int64_t column);

// [num_tokens, hidden_size]. expert_map: [num_experts], local id or -1; empty = identity.
// Weights whole or as a source. Slots with id -1 or a non-local id contribute nothing.
std::vector<double> reference_moe(const MoeConfig& config, const ExpertWeights& weights,
                                  const ConstMatrixView& hidden,        // [num_tokens, hidden_size]
                                  const ConstMatrixView& topk_weights,  // [num_tokens, top_k]
                                  const ConstMatrixView& topk_ids,      // [num_tokens, top_k]
                                  std::span<const std::int32_t> expert_map = {});

// How large each element of reference_moe is where nothing cancels: roots of sums of squares
// instead of sums, all the way, but for an id that a token has twice. [num_tokens, hidden_size].
// For layers of a few elements, whose result may happen to be almost zero; elsewhere it has about
// its size.
std::vector<double> reference_scale(const MoeConfig& config, const ExpertWeights& weights,
                                    const ConstMatrixView& hidden,
                                    const ConstMatrixView& topk_weights,
                                    const ConstMatrixView& topk_ids,
                                    std::span<const std::int32_t> expert_map = {});

}  // namespace fusedmoe
