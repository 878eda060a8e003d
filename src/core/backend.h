// What core asks of a device: the interface that every folder under backends/ implements.
// core validates, chooses and chunks; a backend packs and computes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/workspace_layout.h"
#include "fusedmoe/config.h"
#include "fusedmoe/execution.h"
#include "fusedmoe/fused_moe.h"
#include "fusedmoe/weights.h"

namespace fusedmoe {

// A request for a plan that core has validated.
struct PlanSpec {
  MoeConfig config;
  PlanOptions options;
  std::vector<std::int32_t> expert_map;  // [num_experts]; empty = identity
  std::int64_t num_local_experts = 0;
  std::optional<ThreadRunner> runner;  // what options.runner pointed to; that is null here

  DType output_dtype() const { return config.output_dtype.value_or(config.dtype); }
  bool gated() const { return is_gated(config.activation.kind); }
  // Rows of w13: gate and up, or up alone.
  std::int64_t w13_outputs() const { return config.intermediate_size * (gated() ? 2 : 1); }
};

// One chunk of tokens of a call that core has validated.
struct ApplyCall {
  MatrixView output;                         // [num_tokens, hidden_size]
  ConstMatrixView hidden;                    // [num_tokens, hidden_size]
  ConstMatrixView topk_weights;              // [num_tokens, top_k]
  ConstMatrixView topk_ids;                  // [num_tokens, top_k]
  std::span<const std::int32_t> expert_map;  // [num_experts]; empty = identity
  bool map_of_call = false;                  // it came with the call and is not checked yet
  std::span<std::byte* const> scratch;       // where each of scratch_requests() was placed
  const ThreadRunner* runner = nullptr;      // of the call's context
  void* queue = nullptr;
};

// Weights on a device and the kernels that were chosen for them.
class BackendPlan {
 public:
  BackendPlan() = default;
  BackendPlan(const BackendPlan&) = delete;
  BackendPlan& operator=(const BackendPlan&) = delete;
  virtual ~BackendPlan() = default;

  virtual std::span<const ScratchRequest> scratch_requests() const = 0;
  // Throws invalid_argument for ids out of range and maps that do not fit, where the host can see
  // them; called once per call with all its tokens, before anything is written to output. The
  // scratch may be used.
  virtual void check_call(const ApplyCall& call) const = 0;
  virtual void apply(const ApplyCall& call) const = 0;

  // Throws when weights, sound by themselves, are not of the formats that the plan was made for.
  virtual void check_refresh(const ExpertWeights& weights) const = 0;
  // Reads all weights (local_experts empty) or those of some local experts, into the same memory.
  // May throw midway; core then marks the plan stale.
  virtual void write_weights(const ExpertWeights& weights,
                             std::span<const std::int64_t> local_experts) = 0;
  // Takes `storage` as it is; throws when it was not packed by an equal plan.
  virtual void adopt_weights() = 0;
  virtual void release_weights() = 0;

  virtual std::int64_t weight_bytes() const = 0;
  virtual int num_threads() const = 0;
  virtual std::string describe() const = 0;
  virtual Counters counters() const = 0;
  virtual void reset_counters() = 0;
  virtual void check_faults() const {}
};

class Backend {
 public:
  Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;
  virtual ~Backend() = default;

  virtual DeviceKind kind() const = 0;
  virtual DeviceInfo info() const = 0;
  // Throws Error{unsupported or invalid_argument} with the reason when a plan cannot be built.
  virtual void check_support(const PlanSpec& spec, const ExpertWeights& weights) const = 0;
  virtual WorkspaceSize packed_weights_size(const PlanSpec& spec,
                                            const ExpertWeights& weights) const = 0;
  // The weights of the plan are not there yet: write_weights or adopt_weights brings them.
  virtual std::unique_ptr<BackendPlan> create(const PlanSpec& spec,
                                              const ExpertWeights& weights) const = 0;
  virtual std::byte* allocate(const Device& device, WorkspaceSize size) const = 0;
  virtual void deallocate(const Device& device, std::byte* data, WorkspaceSize size) const = 0;
};

// The backend of a device; throws unsupported with the reason when this build has none.
const Backend& backend_for(const Device& device);

}  // namespace fusedmoe
