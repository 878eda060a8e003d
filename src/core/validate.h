// Every check of what a caller gives, with messages that name argument, got, expected and remedy.
#pragma once

#include <cstdint>
#include <span>

#include "core/backend.h"
#include "fusedmoe/config.h"
#include "fusedmoe/execution.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"
#include "fusedmoe/workspace.h"

namespace fusedmoe {

// Checks config and options, resolves the expert map, copies the runner.
PlanSpec make_spec(const MoeConfig& config, const PlanOptions& options);

// Checks shapes, formats, strides and biases of weights that hold num_experts experts. shapes_only:
// the memory itself will not be read and may be null.
void check_weights(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t num_experts,
                   bool shapes_only = false);

// Checks an engine's threads, given as `argument`.
void check_runner(const char* argument, const ThreadRunner& runner);

// Checks the tensors of a call against the layer, and the given workspace against overlap.
void check_tensors(const PlanSpec& spec, const MatrixView& output, const ConstMatrixView& hidden,
                   const ConstMatrixView& topk_weights, const ConstMatrixView& topk_ids,
                   const Workspace& workspace);

}  // namespace fusedmoe
