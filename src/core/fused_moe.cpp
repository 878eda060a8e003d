// FusedMoe: choose a backend, validate, lay out the scratch, run chunk by chunk. What a device does
// with a chunk is in backends/<device>/.
#include "fusedmoe/fused_moe.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "core/backend.h"
#include "core/translate.h"
#include "core/validate.h"
#include "core/weights_state.h"
#include "core/workspace_layout.h"
#include "core/workspace_use.h"
#include "fusedmoe/error.h"

namespace fusedmoe {
namespace {

constexpr std::int64_t kAlignment = 64;  // a cache line, and the widest vector
constexpr std::size_t kMaxSpans = 16;

// Scratch that one call allocates for itself, when the caller lends none.
class CallScratch {
 public:
  CallScratch(const Backend& backend, const Device& device, WorkspaceSize size)
      : backend_(backend), device_(device), size_(size), data_(backend.allocate(device, size)) {}
  CallScratch(const CallScratch&) = delete;
  CallScratch& operator=(const CallScratch&) = delete;
  ~CallScratch() { backend_.deallocate(device_, data_, size_); }
  std::span<std::byte> span() const { return {data_, static_cast<std::size_t>(size_.bytes)}; }

 private:
  const Backend& backend_;
  const Device& device_;
  WorkspaceSize size_;
  std::byte* data_;
};

// Tokens that `bytes` serve, at most `limit`.
std::int64_t tokens_in(const WorkspaceFormula& formula, std::int64_t bytes, std::int64_t limit) {
  if (bytes < formula.fixed) return 0;
  if (formula.per_token == 0) return limit;
  return std::min(limit, (bytes - formula.fixed) / formula.per_token);
}

template <class View>
View rows_of(const View& view, std::int64_t begin, std::int64_t count) {
  using Byte = std::conditional_t<std::is_same_v<View, MatrixView>, std::byte, const std::byte>;
  auto* data =
      static_cast<Byte*>(view.data) + begin * view.row_stride * bytes_per_element(view.dtype);
  return {data, view.dtype, count, view.columns, view.row_stride};
}

}  // namespace

// Hidden: the class around it is exported, this is not.
struct [[gnu::visibility("hidden")]] FusedMoe::Impl {
  PlanSpec spec;
  const Backend* backend;
  std::unique_ptr<BackendPlan> plan;
  WorkspaceLayout layout;
  mutable WeightsState weights;

  Impl(PlanSpec checked, const Backend& chosen, std::unique_ptr<BackendPlan> built)
      : spec(std::move(checked)),
        backend(&chosen),
        plan(std::move(built)),
        layout(plan->scratch_requests(), kAlignment),
        weights(spec.options.on_stale) {}

  void write(const ExpertWeights& from, std::span<const std::int64_t> local_experts) {
    plan->write_weights(from, local_experts);
  }
  // Most tokens of one chunk: slots are 32-bit inside a chunk.
  std::int64_t max_chunk() const {
    return std::numeric_limits<std::int32_t>::max() / spec.config.top_k;
  }
  std::int64_t chunk_tokens(const Workspace& workspace, std::int64_t num_tokens) const;
  void check_alignment(const char* name, std::span<const std::byte> span) const;
};

FusedMoe::FusedMoe(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
FusedMoe::FusedMoe(FusedMoe&&) noexcept = default;
FusedMoe& FusedMoe::operator=(FusedMoe&&) noexcept = default;
FusedMoe::~FusedMoe() = default;

// --- Building ---------------------------------------------------------------------------------

Support FusedMoe::supports(const MoeConfig& config, const ExpertWeights& weights,
                           const PlanOptions& options) {
  return translate("supports", [&]() -> Support {
    try {
      const PlanSpec spec = make_spec(config, options);
      const Backend& backend = backend_for(options.device);
      check_weights(spec, weights, spec.num_local_experts,
                    options.weight_storage == WeightStorage::adopt);
      backend.check_support(spec, weights);
      return {true, {}};
    } catch (const Error& error) {
      return {false, error.what()};
    }
  });
}

FusedMoe FusedMoe::create(const MoeConfig& config, const ExpertWeights& weights,
                          const PlanOptions& options) {
  return translate("create", [&] {
    PlanSpec spec = make_spec(config, options);
    const Backend& backend = backend_for(options.device);
    check_weights(spec, weights, spec.num_local_experts,
                  options.weight_storage == WeightStorage::adopt);
    backend.check_support(spec, weights);
    std::unique_ptr<BackendPlan> plan = backend.create(spec, weights);
    auto impl = std::make_unique<Impl>(std::move(spec), backend, std::move(plan));
    impl->weights.update(RefreshWait::wait, &weights, [&] {
      if (options.weight_storage == WeightStorage::adopt) {
        impl->plan->adopt_weights();
      } else {
        impl->write(weights, {});
      }
    });
    return FusedMoe(std::move(impl));
  });
}

WorkspaceSize FusedMoe::packed_weights_size(const MoeConfig& config, const ExpertWeights& weights,
                                            const PlanOptions& options) {
  return translate("packed_weights_size", [&] {
    const PlanSpec spec = make_spec(config, options);
    const Backend& backend = backend_for(options.device);
    check_weights(spec, weights, spec.num_local_experts, true);
    return backend.packed_weights_size(spec, weights);
  });
}

// --- Workspace --------------------------------------------------------------------------------

WorkspaceSize FusedMoe::workspace_size(std::int64_t num_tokens) const {
  const WorkspaceFormula formula = impl_->layout.formula();
  const std::int64_t most =
      (std::numeric_limits<std::int64_t>::max() - formula.fixed) / formula.per_token;
  if (num_tokens < 0 || num_tokens > most) {
    throw Error(ErrorCode::invalid_argument, "num_tokens: expected 0 to " + std::to_string(most) +
                                                 ", got " + std::to_string(num_tokens) +
                                                 "; pass the number of rows of hidden");
  }
  return formula.size(num_tokens);
}

WorkspaceFormula FusedMoe::workspace_formula() const noexcept { return impl_->layout.formula(); }

WorkspaceSize FusedMoe::min_workspace_size() const noexcept {
  return impl_->layout.formula().size(1);
}

FusedMoe::TwoSpans FusedMoe::workspace_sizes_13_2(std::int64_t num_tokens) const {
  (void)workspace_size(num_tokens);  // checks num_tokens
  return {impl_->layout.formula13().size(num_tokens), impl_->layout.formula2().size(num_tokens)};
}

void FusedMoe::Impl::check_alignment(const char* name, std::span<const std::byte> span) const {
  const auto address = reinterpret_cast<std::uintptr_t>(span.data());
  if (span.empty() || address % kAlignment == 0) return;
  throw Error(ErrorCode::invalid_argument,
              std::string(name) + ": expected an address that is a multiple of " +
                  std::to_string(kAlignment) + " (workspace_size().alignment), got one that is " +
                  std::to_string(address % kAlignment) + " beyond; align it");
}

// How many tokens the workspace serves at once; throws when not even one.
std::int64_t FusedMoe::Impl::chunk_tokens(const Workspace& workspace,
                                          std::int64_t num_tokens) const {
  const auto size13 = static_cast<std::int64_t>(workspace.workspace13.size());
  const auto size2 = static_cast<std::int64_t>(workspace.workspace2.size());
  const std::int64_t limit = std::min(num_tokens, max_chunk());
  const bool two = size13 > 0;
  const std::int64_t tokens = two ? std::min(tokens_in(layout.formula13(), size13, limit),
                                             tokens_in(layout.formula2(), size2, limit))
                                  : tokens_in(layout.formula(), size2, limit);
  if (tokens >= 1) return tokens;
  const auto need = [&](std::int64_t n) {
    return two ? std::to_string(layout.formula13().size(n).bytes) + " + " +
                     std::to_string(layout.formula2().size(n).bytes)
               : std::to_string(layout.formula().size(n).bytes);
  };
  throw Error(ErrorCode::workspace_too_small,
              "workspace: expected at least " + need(1) + " bytes (" + need(num_tokens) +
                  " for num_tokens=" + std::to_string(num_tokens) + " in one piece), got " +
                  (two ? std::to_string(size13) + " + " : "") + std::to_string(size2) +
                  "; pass workspace_size(num_tokens), or at least min_workspace_size()");
}

// --- Running ----------------------------------------------------------------------------------

void FusedMoe::apply(MatrixView output, ConstMatrixView hidden, ConstMatrixView topk_weights,
                     ConstMatrixView topk_ids, Workspace workspace,
                     const ApplyContext& context) const {
  const Impl& impl = *impl_;
  const std::int64_t num_tokens = hidden.rows;
  if (num_tokens == 0 && output.rows == 0 && topk_weights.rows == 0 && topk_ids.rows == 0) return;
  check_tensors(impl.spec, output, hidden, topk_weights, topk_ids, workspace);

  const WeightsState::Lease lease(impl.weights, [&impl](const ExpertWeights& weights) {
    translate("refresh", [&] { impl.plan->write_weights(weights, {}); });
  });
  std::optional<CallScratch> own;
  if (workspace.allocate) {
    const std::int64_t tokens = std::min(num_tokens, impl.max_chunk());
    own.emplace(*impl.backend, impl.spec.options.device, impl.layout.formula().size(tokens));
    workspace = Workspace(own->span());
  }
  const std::int64_t chunk = impl.chunk_tokens(workspace, num_tokens);
  impl.check_alignment("workspace", workspace.workspace2);
  impl.check_alignment("workspace13", workspace.workspace13);
  const WorkspaceUse use13(workspace.workspace13);
  const WorkspaceUse use2(workspace.workspace2);

  std::array<std::byte*, kMaxSpans> addresses{};
  const std::span scratch(addresses.data(), impl.layout.num_spans());
  const auto call_for = [&](std::int64_t begin, std::int64_t count) {
    std::byte* span13 = workspace.workspace13.data();
    std::byte* span2 = workspace.workspace2.data();
    if (workspace.workspace13.empty()) {  // one span holds both arenas
      span13 = span2;
      span2 += impl.layout.formula13().size(std::min(chunk, num_tokens)).bytes;
    }
    impl.layout.place(span13, span2, std::min(chunk, num_tokens), scratch);
    return ApplyCall{rows_of(output, begin, count),
                     rows_of(hidden, begin, count),
                     rows_of(topk_weights, begin, count),
                     rows_of(topk_ids, begin, count),
                     context.expert_map.empty()
                         ? std::span<const std::int32_t>(impl.spec.expert_map)
                         : context.expert_map,
                     !context.expert_map.empty(),
                     scratch,
                     context.runner,
                     context.queue};
  };
  impl.plan->check_call(call_for(0, num_tokens));
  for (std::int64_t begin = 0; begin < num_tokens; begin += chunk) {
    impl.plan->apply(call_for(begin, std::min(chunk, num_tokens - begin)));
  }
}

// --- Weights ----------------------------------------------------------------------------------

void FusedMoe::refresh(const ExpertWeights& weights, RefreshWait wait) {
  Impl& impl = *impl_;
  translate("refresh", [&] {
    check_weights(impl.spec, weights, impl.spec.num_local_experts);
    impl.plan->check_refresh(weights);
    impl.weights.update(wait, &weights, [&] { impl.write(weights, {}); });
  });
}

void FusedMoe::refresh_experts(std::span<const std::int64_t> local_experts,
                               const ExpertWeights& weights, RefreshWait wait) {
  Impl& impl = *impl_;
  const std::int64_t count = impl.spec.num_local_experts;
  for (const std::int64_t expert : local_experts) {
    if (expert >= 0 && expert < count) continue;
    throw Error(ErrorCode::invalid_argument,
                "local_experts: expected local ids from 0 to " + std::to_string(count - 1) +
                    ", got " + std::to_string(expert) + "; map global ids through expert_map");
  }
  if (impl.spec.options.weight_storage == WeightStorage::borrowed) {
    throw Error(ErrorCode::unsupported,
                "refresh_experts: expected packed weights, got a plan that borrows them; it reads "
                "the caller's memory at every call: change it there, or call refresh");
  }
  const auto complete = [&] {
    if (impl.weights.usable()) return true;
    throw Error(ErrorCode::stale_weights,
                "refresh_experts: expected complete weights, got a plan whose weights were "
                "released or whose last refresh failed; call refresh with all of them first");
  };
  translate("refresh_experts", [&] {
    check_weights(impl.spec, weights, static_cast<std::int64_t>(local_experts.size()));
    impl.plan->check_refresh(weights);
    if (local_experts.empty()) {
      (void)complete();
      return;
    }
    impl.weights.update(
        wait, nullptr, [&] { impl.write(weights, local_experts); }, complete);
  });
}

void FusedMoe::release_weights(RefreshWait wait) {
  impl_->weights.release(wait, [&] { impl_->plan->release_weights(); });
}

std::uint64_t FusedMoe::weights_version() const noexcept { return impl_->weights.version(); }

// --- Telling ----------------------------------------------------------------------------------

std::string FusedMoe::describe() const {
  const PlanSpec& spec = impl_->spec;
  const WorkspaceFormula formula = impl_->layout.formula();
  std::string text =
      "layer: hidden_size " + std::to_string(spec.config.hidden_size) + ", intermediate_size " +
      std::to_string(spec.config.intermediate_size) + ", experts " +
      std::to_string(spec.num_local_experts) + " of " + std::to_string(spec.config.num_experts) +
      ", top_k " + std::to_string(spec.config.top_k) + ", " +
      to_string(spec.config.activation.kind) + ", hidden " + to_string(spec.config.dtype) +
      ", output " + to_string(spec.output_dtype()) + "\n";
  text += impl_->plan->describe();
  text += "workspace: " + std::to_string(formula.fixed) + " bytes + " +
          std::to_string(formula.per_token) + " per token\n";
  return text;
}

Counters FusedMoe::counters() const { return impl_->plan->counters(); }
void FusedMoe::reset_counters() { impl_->plan->reset_counters(); }
void FusedMoe::check_faults() const { impl_->plan->check_faults(); }
const MoeConfig& FusedMoe::config() const noexcept { return impl_->spec.config; }
const Device& FusedMoe::device() const noexcept { return impl_->spec.options.device; }
std::int64_t FusedMoe::num_local_experts() const noexcept { return impl_->spec.num_local_experts; }
std::int64_t FusedMoe::weight_bytes() const noexcept { return impl_->plan->weight_bytes(); }
int FusedMoe::num_threads() const noexcept { return impl_->plan->num_threads(); }

}  // namespace fusedmoe
