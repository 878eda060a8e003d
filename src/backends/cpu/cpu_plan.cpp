#include "backends/cpu/cpu_plan.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "backends/cpu/float_environment.h"
#include "backends/cpu/numa.h"
#include "backends/cpu/pack.h"
#include "backends/cpu/team.h"
#include "core/validate.h"
#include "fusedmoe/error.h"

namespace fusedmoe::cpu {
namespace {

// The scratch of a call, in the order of CpuPlan::requests_.
enum Scratch { kExpertOffsets, kActiveExperts, kSlotTables, kActivated, kThreads, kSums };

// Refuses a map of a call that does not fit the plan. marks: [num_local + 1] of scratch.
void check_map(std::span<const std::int32_t> map, std::int64_t num_experts, std::int64_t num_local,
               std::span<std::int32_t> marks) {
  const auto refuse = [&](const std::string& got) {
    throw Error(ErrorCode::invalid_argument,
                "context.expert_map: expected [num_experts=" + std::to_string(num_experts) +
                    "] with each of the plan's " + std::to_string(num_local) +
                    " local ids once and -1 elsewhere, got " + got + "; pass this rank's map");
  };
  if (static_cast<std::int64_t>(map.size()) != num_experts) {
    refuse(std::to_string(map.size()) + " entries");
  }
  std::fill(marks.begin(), marks.end(), -1);
  std::int64_t found = 0;
  for (std::int64_t global = 0; global < num_experts; ++global) {
    const std::int32_t local = map[global];
    if (local == -1) continue;
    const auto entry = [&] {  // put together only when something is wrong
      return "expert_map[" + std::to_string(global) + "] = " + std::to_string(local);
    };
    if (local < 0 || local >= num_local) refuse(entry());
    if (marks[local] >= 0) {
      refuse(entry() + ", as expert_map[" + std::to_string(marks[local]) + "]");
    }
    marks[local] = static_cast<std::int32_t>(global);
    ++found;
  }
  if (found != num_local) refuse(std::to_string(found) + " local experts");
}

// Where a plan's threads come from and what limits their number.
std::string threads_reason(const PlanSpec& spec) {
  const bool capped = spec.options.max_threads > 0;
  if (!spec.runner) return capped ? "options.max_threads" : thread_limit_reason();
  if (!capped) return "options.runner";
  return "options.max_threads, on options.runner";
}

}  // namespace

CpuPlan::CpuPlan(const PlanSpec& spec, const ExpertWeights& weights, const KernelChoice& kernels,
                 int threads)
    : spec_(spec),
      w13_format_(weights.w13.format),
      w2_format_(weights.w2.format),
      w13_bias_(!weights.w13_bias.empty()),
      w2_bias_(!weights.w2_bias.empty()),
      threads_(threads),
      isa_reason_(isa_reason(spec.options.isa)),
      threads_reason_(threads_reason(spec)) {
  const int nodes = static_cast<int>(numa_nodes().size());
  PackedLayout layout(spec, weights, kernels, nodes);
  if (spec.options.weight_storage != fusedmoe::WeightStorage::borrowed) {
    storage_ = std::make_unique<WeightStorage>(spec, weights, layout, spec.options.storage);
  }
  layer_ = {&spec_, kernels, std::move(layout), storage_.get(), &borrowed_};

  const MoeConfig& config = spec.config;
  const std::int64_t experts = spec.num_local_experts;
  // A token's sum is kept in output itself when that is fp32, and nowhere when it has one term.
  const bool sums = config.top_k > 1 && spec.output_dtype() != DType::f32;
  const std::int64_t intermediate =
      config.top_k * config.intermediate_size * bytes_per_element(layer_.compute_dtype());
  requests_ = {
      {.name = "expert_offsets", .fixed = 4 * (experts + 1)},
      {.name = "active_experts", .fixed = 4 * (experts + 1), .last = Stage::gemm2},
      {.name = "slot tables", .per_token = 8 * config.top_k, .last = Stage::combine},
      {.name = "activated intermediate",
       .per_token = intermediate,
       .first = Stage::gemm1,
       .last = Stage::gemm2,
       .in_workspace13 = true},
      {.name = "threads", .fixed = threads * thread_scratch_bytes(layer_), .first = Stage::gemm1},
  };
  if (sums) {
    requests_.push_back({.name = "sums",
                         .per_token = static_cast<std::int64_t>(sizeof(float)) * config.hidden_size,
                         .first = Stage::gemm2});
  }
  if (spec.options.counters) {
    rows_per_expert_ = std::vector<std::atomic<std::uint64_t>>(experts);
  }
}

// --- Weights ----------------------------------------------------------------------------------

void CpuPlan::check_refresh(const ExpertWeights& weights) const {
  if (spec_.num_local_experts == 0) return;
  const auto refuse = [](const char* name, const std::string& expected, const std::string& got) {
    throw Error(ErrorCode::invalid_argument, std::string(name) + ": expected " + expected +
                                                 ", as when the plan was built, got " + got +
                                                 "; build another plan for other weights");
  };
  if (weights.w13.format != w13_format_) {
    refuse("weights.w13.format", to_string(w13_format_), to_string(weights.w13.format));
  }
  if (weights.w2.format != w2_format_) {
    refuse("weights.w2.format", to_string(w2_format_), to_string(weights.w2.format));
  }
  const auto check_panels = [&](const char* name, const WeightTensor& tensor,
                                const PackedLayout::Panels& panels, const GemmKernel& kernel) {
    const PanelFormat format = panel_format(tensor, kernel);
    if (format.segments == panels.format.segments &&
        format.column_scales == panels.format.column_scales) {
      return;
    }
    refuse(name, "layout, type, group and zero points of scales", "others");
  };
  check_panels("weights.w13.scales", weights.w13, layer_.layout.w13, *layer_.kernels.gemm13);
  check_panels("weights.w2.scales", weights.w2, layer_.layout.w2, *layer_.kernels.gemm2);
  if (weights.w13_bias.empty() == w13_bias_) {
    refuse("weights.w13_bias", w13_bias_ ? "a bias" : "none", w13_bias_ ? "none" : "a bias");
  }
  if (weights.w2_bias.empty() == w2_bias_) {
    refuse("weights.w2_bias", w2_bias_ ? "a bias" : "none", w2_bias_ ? "none" : "a bias");
  }
}

void CpuPlan::write_weights(const ExpertWeights& weights,
                            std::span<const std::int64_t> local_experts) {
  if (storage_ == nullptr) {
    borrowed_ = weights;
    return;
  }
  const auto count = local_experts.empty() ? spec_.num_local_experts
                                           : static_cast<std::int64_t>(local_experts.size());
  std::vector<std::int64_t> locals(local_experts.begin(), local_experts.end());
  locals.resize(static_cast<std::size_t>(count));
  if (local_experts.empty()) std::iota(locals.begin(), locals.end(), 0);
  storage_->begin_write();
  if (weights.source) {
    for (const std::int64_t& local : locals) {
      ExpertWeights one = weights.source(local);
      one.source = nullptr;  // views are due, not another source
      check_weights(spec_, one, 1);
      check_refresh(one);
      pack(one, {&local, 1});
    }
  } else {
    pack(weights, locals);
  }
  storage_->end_write();
}

void CpuPlan::pack(const ExpertWeights& weights, std::span<const std::int64_t> locals) const {
  const std::int64_t panels = layer_.layout.w13.count + layer_.layout.w2.count;
  const std::int64_t total = panels * static_cast<std::int64_t>(locals.size());
  const Team team(runner(), threads_);
  team.run(team.size(), [&](int thread) {
    const std::int64_t end = total * (thread + 1) / team.size();
    for (std::int64_t i = total * thread / team.size(); i < end; ++i) {
      pack_panel(weights, i / panels, locals[static_cast<std::size_t>(i / panels)], i % panels);
    }
  });
}

// index: the panels of w13, then those of w2.
void CpuPlan::pack_panel(const ExpertWeights& weights, std::int64_t in_weights, std::int64_t local,
                         std::int64_t index) const {
  const PackedLayout& layout = storage_->layout();
  const bool first = index < layout.w13.count;
  const PackedLayout::Panels& panels = first ? layout.w13 : layout.w2;
  if (!first) index -= layout.w13.count;
  const PanelOutputs outputs = first ? w13_panel(spec_, weights, in_weights, index)
                                     : w2_panel(spec_, weights, in_weights, index);
  cpu::pack_panel(outputs, panels.format, 0, panels.inputs, storage_->panel(panels, local, index),
                  PanelUse::later);
  if (float* scales = storage_->scales(panels, local, index)) {
    column_scales(outputs, panels.format, scales);
  }
  if (float* bias = storage_->bias(panels, local, index)) {
    (first ? w13_bias_panel : w2_bias_panel)(spec_, weights, in_weights, index, bias);
  }
}

void CpuPlan::release_weights() {
  if (storage_ != nullptr) {
    storage_->release();
  } else {
    borrowed_ = {};
  }
}

// --- Running ----------------------------------------------------------------------------------

void CpuPlan::check_call(const ApplyCall& call) const {
  if (call.queue != nullptr) {
    throw Error(ErrorCode::invalid_argument,
                "context.queue: expected null for a plan on the CPU, got a stream or queue; pass "
                "context.runner to bring threads");
  }
  if (call.runner != nullptr) check_runner("context.runner", *call.runner);
  if (const auto bad = routing::find_bad_id(call.topk_ids, spec_.config.num_experts)) {
    throw Error(ErrorCode::invalid_argument,
                "topk_ids: expected -1 or an id below num_experts=" +
                    std::to_string(spec_.config.num_experts) + ", got " + std::to_string(bad->id) +
                    " at [" + std::to_string(bad->token) + ", " + std::to_string(bad->k) +
                    "]; mark slots to skip with -1");
  }
  if (call.map_of_call) {
    const std::int64_t local = spec_.num_local_experts;
    check_map(call.expert_map, spec_.config.num_experts, local,
              {reinterpret_cast<std::int32_t*>(call.scratch[kExpertOffsets]),
               static_cast<std::size_t>(local + 1)});
  }
  if (spec_.options.counters) {  // a call counts once, in however many chunks it runs
    calls_.fetch_add(1);
    tokens_.fetch_add(static_cast<std::uint64_t>(call.hidden.rows));
  }
}

CallState CpuPlan::permute(const ApplyCall& call) const {
  const std::int64_t slots = call.hidden.rows * spec_.config.top_k;
  const std::int64_t experts = spec_.num_local_experts;
  const auto table = [&](Scratch which, std::int64_t offset, std::int64_t count) {
    return std::span(reinterpret_cast<std::int32_t*>(call.scratch[which]) + offset,
                     static_cast<std::size_t>(count));
  };
  CallState state;
  state.call = &call;
  state.permutation = {table(kExpertOffsets, 0, experts + 1), table(kSlotTables, 0, slots),
                       table(kSlotTables, slots, slots)};
  routing::permute(call.topk_ids, spec_.config.num_experts, call.expert_map, experts,
                   state.permutation);
  const auto active = table(kActiveExperts, 0, experts);
  std::size_t num_active = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    const std::int32_t rows =
        state.permutation.expert_offsets[e + 1] - state.permutation.expert_offsets[e];
    if (rows == 0) continue;
    active[num_active++] = static_cast<std::int32_t>(e);
    if (!rows_per_expert_.empty()) rows_per_expert_[e].fetch_add(static_cast<std::uint64_t>(rows));
  }
  state.active_experts = active.first(num_active);
  state.activated = call.scratch[kActivated];
  state.thread_scratch = call.scratch[kThreads];
  if (call.output.dtype == DType::f32) {
    state.sums = static_cast<float*>(call.output.data);
    state.sums_stride = call.output.row_stride;
  } else if (spec_.config.top_k > 1) {
    state.sums = reinterpret_cast<float*>(call.scratch[kSums]);
    state.sums_stride = spec_.config.hidden_size;
  }
  return state;
}

void CpuPlan::apply(const ApplyCall& call) const {
  const CallState state = permute(call);
  const Team team(call.runner != nullptr ? call.runner : runner(), threads_);
  const int threads = useful_threads(layer_, state, team.size());
  if (team.gang()) {
    Barrier barrier(threads);
    team.run(threads, [&](int thread) {
      const FloatEnvironment environment;
      gemm1(layer_, state, thread, threads);
      barrier.wait();
      gemm2(layer_, state, thread, threads);
    });
    return;
  }
  team.run(threads, [&](int thread) {
    const FloatEnvironment environment;
    gemm1(layer_, state, thread, threads);
  });
  team.run(threads, [&](int thread) {
    const FloatEnvironment environment;
    gemm2(layer_, state, thread, threads);
  });
}

// --- Telling ----------------------------------------------------------------------------------

std::string CpuPlan::describe() const {
  const auto gemm = [&](const GemmKernel* kernel) -> std::string {
    return std::string(kernel->name) + " (" + kernel->recipe + ")";
  };
  std::string weights;
  if (storage_ == nullptr) {
    weights = "borrowed, read in place: each panel is packed into scratch when it is used";
  } else {
    weights = "packed into panels of " + std::to_string(kPanelOutputs) + " outputs, " +
              std::to_string(storage_->bytes()) + " bytes, " +
              (spec_.options.storage.empty() ? "own memory" : "the caller's memory");
  }
  const std::size_t nodes = numa_nodes().size();
  if (nodes > 1) weights += ", panels shared by " + std::to_string(nodes) + " NUMA nodes";
  const std::string reason = isa_reason_.empty() ? "" : " (" + isa_reason_ + ")";
  return std::string("device: cpu, instruction set ") + to_string(layer_.kernels.isa) + reason +
         ", threads " + std::to_string(threads_) + " (" + threads_reason_ + ")\n" +
         "weights: w13 " + fusedmoe::to_string(w13_format_) + ", w2 " +
         fusedmoe::to_string(w2_format_) + ", " + weights + "\n" +
         "permute: stable counting sort by local expert, on the caller's thread\n" +
         "gemm1: " + gemm(layer_.kernels.gemm13) +
         ", rows gathered from hidden as they are multiplied\n" +
         "activation: " + fusedmoe::to_string(spec_.config.activation.kind) +
         " in the epilogue of gemm1, kept as " + fusedmoe::to_string(layer_.compute_dtype()) +
         "\n" + "gemm2: " + gemm(layer_.kernels.gemm2) + "\n" +
         "combine: in the epilogue of gemm2, fp32, in ascending local expert; batch-invariant\n";
}

Counters CpuPlan::counters() const {
  Counters counters;
  counters.calls = calls_.load();
  counters.tokens = tokens_.load();
  counters.rows_per_expert.resize(spec_.num_local_experts, 0);
  for (std::size_t e = 0; e < rows_per_expert_.size(); ++e) {
    counters.rows_per_expert[e] = rows_per_expert_[e].load();
  }
  return counters;
}

void CpuPlan::reset_counters() {
  calls_.store(0);
  tokens_.store(0);
  for (auto& rows : rows_per_expert_) rows.store(0);
}

}  // namespace fusedmoe::cpu
