// A plan on the CPU: kernels chosen once, weights packed or borrowed, and the order of one call:
// permute, gemm1 with activation, gemm2 with combine.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "backends/cpu/grouped_gemm.h"
#include "backends/cpu/weight_storage.h"
#include "core/backend.h"

namespace fusedmoe::cpu {

class CpuPlan final : public BackendPlan {
 public:
  CpuPlan(const PlanSpec& spec, const ExpertWeights& weights, const KernelChoice& kernels,
          int threads);

  std::span<const ScratchRequest> scratch_requests() const override { return requests_; }
  void check_call(const ApplyCall& call) const override;
  void apply(const ApplyCall& call) const override;
  void check_refresh(const ExpertWeights& weights) const override;
  void write_weights(const ExpertWeights& weights,
                     std::span<const std::int64_t> local_experts) override;
  void adopt_weights() override { storage_->check_adoptable(); }
  void release_weights() override;
  std::int64_t weight_bytes() const override { return storage_ ? storage_->bytes() : 0; }
  int num_threads() const override { return threads_; }
  std::string describe() const override;
  Counters counters() const override;
  void reset_counters() override;

 private:
  // The plan's own runner, or null for the pool. Whoever calls shares it: nothing ever writes it.
  const ThreadRunner* runner() const { return spec_.runner ? &*spec_.runner : nullptr; }
  CallState permute(const ApplyCall& call) const;
  // Experts 0 .. locals.size() of `weights` into those local ids.
  void pack(const ExpertWeights& weights, std::span<const std::int64_t> locals) const;
  void pack_panel(const ExpertWeights& weights, std::int64_t in_weights, std::int64_t local,
                  std::int64_t index) const;

  PlanSpec spec_;
  WeightFormat w13_format_, w2_format_;
  bool w13_bias_, w2_bias_;
  int threads_;
  // Why there are no better ones: of the environment that the plan was made in.
  std::string isa_reason_, threads_reason_;
  std::unique_ptr<WeightStorage> storage_;  // null = borrowed
  ExpertWeights borrowed_;
  Layer layer_;
  std::vector<ScratchRequest> requests_;

  mutable std::atomic<std::uint64_t> calls_{0};
  mutable std::atomic<std::uint64_t> tokens_{0};
  mutable std::vector<std::atomic<std::uint64_t>> rows_per_expert_;  // empty = off
};

}  // namespace fusedmoe::cpu
