// The functions of the C ABI that build, apply, refresh and ask a plan.
#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>

#include "core/c_api_call.h"

using fusedmoe::Device;
using fusedmoe::Error;
using fusedmoe::ErrorCode;
using fusedmoe::FusedMoe;
using fusedmoe::WorkspaceSize;
using fusedmoe::c_api::guarded;
using fusedmoe::c_api::need_array;
using fusedmoe::c_api::need_pointer;
using fusedmoe::c_api::put_optional;
using fusedmoe::c_api::TextOut;

namespace {

fusedmoe::RefreshWait to_wait(std::int32_t wait) {
  return fusedmoe::c_api::to_enum({"wait"}, wait, fusedmoe::RefreshWait::no_wait,
                                  "a FUSEDMOE_REFRESH_* value");
}

}  // namespace

fusedmoe_status fusedmoe_supports(const fusedmoe_moe_config* config,
                                  const fusedmoe_expert_weights* weights,
                                  const fusedmoe_plan_options* options, int32_t* supported,
                                  char* reason, size_t reason_bytes, size_t* reason_needed) {
  using namespace fusedmoe::c_api;
  return guarded([&] {
    need_pointer({"supported"}, supported);
    const TextOut out("reason", reason, reason_bytes, reason_needed);
    fusedmoe::Support support;
    try {
      const auto layer = to_config({"config"}, config);
      const auto views = to_weights({"weights"}, weights);
      support = FusedMoe::supports(layer, views, OptionsHolder({"options"}, options).options);
    } catch (const Error& error) {
      // A struct that does not convert is an answer too: create refuses it with the same text.
      if (error.code() != ErrorCode::invalid_argument && error.code() != ErrorCode::unsupported) {
        throw;
      }
      support.reason = error.what();
    }
    *supported = support.ok ? 1 : 0;
    out.put(support.reason);
  });
}

fusedmoe_status fusedmoe_packed_weights_size(const fusedmoe_moe_config* config,
                                             const fusedmoe_expert_weights* weights,
                                             const fusedmoe_plan_options* options, int64_t* bytes,
                                             int64_t* alignment) {
  using namespace fusedmoe::c_api;
  return guarded([&] {
    need_pointer({"bytes"}, bytes);
    const auto layer = to_config({"config"}, config);
    const auto views = to_weights({"weights"}, weights);
    const WorkspaceSize size =
        FusedMoe::packed_weights_size(layer, views, OptionsHolder({"options"}, options).options);
    *bytes = size.bytes;
    put_optional(alignment, size.alignment);
  });
}

fusedmoe_status fusedmoe_plan_create(const fusedmoe_moe_config* config,
                                     const fusedmoe_expert_weights* weights,
                                     const fusedmoe_plan_options* options, fusedmoe_plan** plan) {
  using namespace fusedmoe::c_api;
  return guarded([&] {
    need_pointer({"plan"}, plan);
    *plan = nullptr;
    const auto layer = to_config({"config"}, config);
    const auto views = to_weights({"weights"}, weights);
    FusedMoe moe = FusedMoe::create(layer, views, OptionsHolder({"options"}, options).options);
    const fusedmoe_activation_config activation = from_activation(moe.config().activation);
    *plan = new fusedmoe_plan{std::move(moe), activation};
  });
}

void fusedmoe_plan_destroy(fusedmoe_plan* plan) { delete plan; }

fusedmoe_status fusedmoe_plan_workspace_size(const fusedmoe_plan* plan, int64_t num_tokens,
                                             int64_t* bytes, int64_t* alignment) {
  return guarded([&] {
    need_pointer({"plan"}, plan);
    need_pointer({"bytes"}, bytes);
    const WorkspaceSize size = plan->moe.workspace_size(num_tokens);
    *bytes = size.bytes;
    put_optional(alignment, size.alignment);
  });
}

fusedmoe_status fusedmoe_plan_workspace_formula(const fusedmoe_plan* plan, int64_t* fixed,
                                                int64_t* per_token, int64_t* alignment) {
  return guarded([&] {
    need_pointer({"plan"}, plan);
    need_pointer({"fixed"}, fixed);
    need_pointer({"per_token"}, per_token);
    const fusedmoe::WorkspaceFormula formula = plan->moe.workspace_formula();
    *fixed = formula.fixed;
    *per_token = formula.per_token;
    put_optional(alignment, formula.alignment);
  });
}

fusedmoe_status fusedmoe_plan_min_workspace_size(const fusedmoe_plan* plan, int64_t* bytes,
                                                 int64_t* alignment) {
  return guarded([&] {
    need_pointer({"plan"}, plan);
    need_pointer({"bytes"}, bytes);
    const WorkspaceSize size = plan->moe.min_workspace_size();
    *bytes = size.bytes;
    put_optional(alignment, size.alignment);
  });
}

fusedmoe_status fusedmoe_plan_workspace_sizes_13_2(const fusedmoe_plan* plan, int64_t num_tokens,
                                                   int64_t* workspace13_bytes,
                                                   int64_t* workspace2_bytes, int64_t* alignment) {
  return guarded([&] {
    need_pointer({"plan"}, plan);
    need_pointer({"workspace13_bytes"}, workspace13_bytes);
    need_pointer({"workspace2_bytes"}, workspace2_bytes);
    const FusedMoe::TwoSpans sizes = plan->moe.workspace_sizes_13_2(num_tokens);
    *workspace13_bytes = sizes.workspace13.bytes;
    *workspace2_bytes = sizes.workspace2.bytes;
    put_optional(alignment, std::max(sizes.workspace13.alignment, sizes.workspace2.alignment));
  });
}

fusedmoe_status fusedmoe_plan_apply(const fusedmoe_plan* plan, const fusedmoe_matrix* output,
                                    const fusedmoe_const_matrix* hidden,
                                    const fusedmoe_const_matrix* topk_weights,
                                    const fusedmoe_const_matrix* topk_ids,
                                    const fusedmoe_workspace* workspace,
                                    const fusedmoe_apply_context* context) {
  using namespace fusedmoe::c_api;
  return guarded([&] {
    need_pointer({"plan"}, plan);
    // In order of the parameters, so that of two mistakes the first is named.
    const auto to = to_matrix({"output"}, output);
    const auto from = to_matrix({"hidden"}, hidden);
    const auto slot_weights = to_matrix({"topk_weights"}, topk_weights);
    const auto slot_ids = to_matrix({"topk_ids"}, topk_ids);
    const auto scratch = to_workspace({"workspace"}, workspace);
    const ContextHolder holder({"context"}, context);
    plan->moe.apply(to, from, slot_weights, slot_ids, scratch, holder.context);
  });
}

fusedmoe_status fusedmoe_plan_refresh(fusedmoe_plan* plan, const fusedmoe_expert_weights* weights,
                                      int32_t wait) {
  return guarded([&] {
    need_pointer({"plan"}, plan);
    const auto views = fusedmoe::c_api::to_weights({"weights"}, weights);
    plan->moe.refresh(views, to_wait(wait));
  });
}

fusedmoe_status fusedmoe_plan_refresh_experts(fusedmoe_plan* plan, const int64_t* local_experts,
                                              int64_t count, const fusedmoe_expert_weights* weights,
                                              int32_t wait) {
  return guarded([&] {
    need_pointer({"plan"}, plan);
    need_array({"local_experts"}, local_experts, "count", count);
    const auto views = fusedmoe::c_api::to_weights({"weights"}, weights);
    plan->moe.refresh_experts(std::span(local_experts, static_cast<std::size_t>(count)), views,
                              to_wait(wait));
  });
}

fusedmoe_status fusedmoe_plan_release_weights(fusedmoe_plan* plan, int32_t wait) {
  return guarded([&] {
    need_pointer({"plan"}, plan);
    plan->moe.release_weights(to_wait(wait));
  });
}

fusedmoe_status fusedmoe_plan_weights_version(const fusedmoe_plan* plan, uint64_t* version) {
  return guarded([&] {
    need_pointer({"plan"}, plan);
    need_pointer({"version"}, version);
    *version = plan->moe.weights_version();
  });
}

fusedmoe_status fusedmoe_plan_describe(const fusedmoe_plan* plan, char* text, size_t text_bytes,
                                       size_t* text_needed) {
  return guarded([&] {
    need_pointer({"plan"}, plan);
    const TextOut out("text", text, text_bytes, text_needed);
    out.put(plan->moe.describe());
  });
}

fusedmoe_status fusedmoe_plan_counters(const fusedmoe_plan* plan, uint64_t* calls, uint64_t* tokens,
                                       uint64_t* rows_per_expert, int64_t capacity) {
  return guarded([&] {
    need_pointer({"plan"}, plan);
    need_array({"rows_per_expert"}, rows_per_expert, "capacity", capacity);
    const fusedmoe::Counters counters = plan->moe.counters();
    put_optional(calls, counters.calls);
    put_optional(tokens, counters.tokens);
    const auto& rows = counters.rows_per_expert;
    const std::size_t count = std::min(rows.size(), static_cast<std::size_t>(capacity));
    std::copy_n(rows.begin(), count, rows_per_expert);
  });
}

fusedmoe_status fusedmoe_plan_reset_counters(fusedmoe_plan* plan) {
  return guarded([&] {
    need_pointer({"plan"}, plan);
    plan->moe.reset_counters();
  });
}

fusedmoe_status fusedmoe_plan_check_faults(const fusedmoe_plan* plan) {
  return guarded([&] {
    need_pointer({"plan"}, plan);
    plan->moe.check_faults();
  });
}

fusedmoe_status fusedmoe_plan_config(const fusedmoe_plan* plan, fusedmoe_moe_config* config) {
  return guarded([&] {
    need_pointer({"plan"}, plan);
    fusedmoe::c_api::write_config({"config"}, plan->moe.config(), plan->activation, config);
  });
}

fusedmoe_status fusedmoe_plan_device(const fusedmoe_plan* plan, fusedmoe_device* device) {
  return guarded([&] {
    need_pointer({"plan"}, plan);
    const Device& from = plan->moe.device();
    fusedmoe::c_api::write_device({"device"}, from, from.platform.c_str(), device);
  });
}

fusedmoe_status fusedmoe_plan_num_local_experts(const fusedmoe_plan* plan, int64_t* count) {
  return guarded([&] {
    need_pointer({"plan"}, plan);
    need_pointer({"count"}, count);
    *count = plan->moe.num_local_experts();
  });
}

fusedmoe_status fusedmoe_plan_weight_bytes(const fusedmoe_plan* plan, int64_t* bytes) {
  return guarded([&] {
    need_pointer({"plan"}, plan);
    need_pointer({"bytes"}, bytes);
    *bytes = plan->moe.weight_bytes();
  });
}

fusedmoe_status fusedmoe_plan_num_threads(const fusedmoe_plan* plan, int32_t* count) {
  return guarded([&] {
    need_pointer({"plan"}, plan);
    need_pointer({"count"}, count);
    *count = plan->moe.num_threads();
  });
}
