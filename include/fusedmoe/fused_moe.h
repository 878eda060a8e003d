// The plan: one MoE layer built once from fixed weights and applied to whatever tokens arrive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fusedmoe/config.h"
#include "fusedmoe/error.h"
#include "fusedmoe/execution.h"
#include "fusedmoe/export.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"
#include "fusedmoe/workspace.h"

namespace fusedmoe {

struct Support {
  bool ok = false;
  std::string reason = {};  // why not; empty when ok
};

// Since the plan was built or reset_counters() was called.
struct Counters {
  std::uint64_t calls = 0;
  std::uint64_t tokens = 0;
  std::vector<std::uint64_t> rows_per_expert = {};  // [num_local_experts]
};

enum class RefreshWait : std::uint8_t {
  wait = 0,  // until running applies have ended
  no_wait,   // throw busy when one is running
};

class FUSEDMOE_EXPORT FusedMoe {
 public:
  // Whether create would accept these, and if not, why; reads shapes and formats, never weights.
  static Support supports(const MoeConfig& config, const ExpertWeights& weights,
                          const PlanOptions& options = {});

  // Builds a plan. Throws invalid_argument or unsupported with the reason that supports() gives,
  // out_of_memory, or whatever weights.source throws. Peak memory is the packed weights plus one
  // expert. Safe from any thread.
  static FusedMoe create(const MoeConfig& config, const ExpertWeights& weights,
                         const PlanOptions& options = {});

  // What PlanOptions::storage must hold for WeightStorage::caller and adopt.
  static WorkspaceSize packed_weights_size(const MoeConfig& config, const ExpertWeights& weights,
                                           const PlanOptions& options = {});

  FusedMoe(FusedMoe&&) noexcept;
  FusedMoe& operator=(FusedMoe&&) noexcept;
  FusedMoe(const FusedMoe&) = delete;
  FusedMoe& operator=(const FusedMoe&) = delete;
  ~FusedMoe();

  // Scratch for one call: exact, a pure host function, non-decreasing in num_tokens.
  WorkspaceSize workspace_size(std::int64_t num_tokens) const;
  WorkspaceFormula workspace_formula() const noexcept;
  // Enough for any number of tokens: apply then works through them in chunks.
  WorkspaceSize min_workspace_size() const noexcept;
  // The same scratch as two spans, workspace13 first.
  struct TwoSpans {
    WorkspaceSize workspace13 = {};
    WorkspaceSize workspace2 = {};
  };
  TwoSpans workspace_sizes_13_2(std::int64_t num_tokens) const;

  // output[t] = sum over k of topk_weights[t, k] * expert(topk_ids[t, k])(hidden[t]).
  //
  //   output        [num_tokens, hidden_size], config.output_dtype; may be exactly `hidden`
  //   hidden        [num_tokens, hidden_size], config.dtype
  //   topk_weights  [num_tokens, top_k], f32, f16 or bf16
  //   topk_ids      [num_tokens, top_k], i32 or i64, global expert ids; -1 skips the slot
  //
  // Rows may be strided. Nothing is allocated, filled or waited for (but for a running refresh).
  // Any number of threads may call it at once, each with its own workspace. Throws
  // invalid_argument (nothing was written), workspace_too_small, busy (the workspace is in use) or
  // stale_weights. num_tokens = 0 succeeds and reads nothing.
  void apply(MatrixView output, ConstMatrixView hidden, ConstMatrixView topk_weights,
             ConstMatrixView topk_ids, Workspace workspace = {},
             const ApplyContext& context = {}) const;

  // Reads all weights again, into the same memory. Shapes and formats must be those of create.
  // Waits for running applies, or throws busy. A refresh that fails while writing leaves the plan
  // stale until one succeeds; a refused argument changes nothing. Safe from any thread.
  void refresh(const ExpertWeights& weights, RefreshWait wait = RefreshWait::wait);
  // The same for some experts: weights hold one expert per entry of local_experts, in that order.
  // Counts as having seen the owner's version. With StalePolicy::refresh a later bump reads the
  // tensors of the last create or refresh again, all of them.
  void refresh_experts(std::span<const std::int64_t> local_experts, const ExpertWeights& weights,
                       RefreshWait wait = RefreshWait::wait);
  // Gives the memory of own packed weights back (sleep). Until refresh(), apply throws.
  void release_weights(RefreshWait wait = RefreshWait::wait);
  // Starts at 1 and counts successful refreshes.
  std::uint64_t weights_version() const noexcept;

  // What was chosen and why, one line per stage.
  std::string describe() const;
  // Needs PlanOptions::counters; otherwise all zero.
  Counters counters() const;
  void reset_counters();
  // Faults that a device found without stopping, as ids out of range; throws Error{device}. The
  // CPU checks ids before it starts and never has any.
  void check_faults() const;

  const MoeConfig& config() const noexcept;
  const Device& device() const noexcept;
  std::int64_t num_local_experts() const noexcept;
  // Bytes of packed weights, 0 when borrowed.
  std::int64_t weight_bytes() const noexcept;
  int num_threads() const noexcept;

 private:
  struct Impl;
  explicit FusedMoe(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// One line per backend: whether plans can be built there, and if not, why.
struct DeviceInfo {
  std::string name;
  bool available = false;
  std::string reason = {};  // why not, or what it is
};
FUSEDMOE_EXPORT std::vector<DeviceInfo> list_devices();

}  // namespace fusedmoe
