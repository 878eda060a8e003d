// The functions of the C ABI but for those of a plan (c_api_plan.cpp): status, names, devices,
// expert maps, owning workspaces and routing. Each converts, calls the C++ API and reports.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <string>
#include <vector>

#include "core/c_api_call.h"
#include "fusedmoe/fusedmoe.h"

using fusedmoe::ConstMatrixView;
using fusedmoe::Device;
using fusedmoe::ErrorCode;
using fusedmoe::MatrixView;
using fusedmoe::RoutingConfig;
using fusedmoe::WorkspaceBuffer;
using fusedmoe::WorkspacePool;
using fusedmoe::WorkspaceSize;
using fusedmoe::c_api::guarded;
using fusedmoe::c_api::need_pointer;
using fusedmoe::c_api::TextOut;

namespace {

// Fixed, so that reporting an error cannot fail.
constinit thread_local char t_last_error[1024] = "";

template <class Enum>
const char* name_of(std::int32_t value, Enum last) noexcept {
  if (value < 0 || value > static_cast<std::int32_t>(last)) return "unknown";
  return to_string(static_cast<Enum>(value));
}

using RouteFunction = void (*)(const RoutingConfig&, ConstMatrixView, MatrixView, MatrixView);

fusedmoe_status route_with(RouteFunction function, const fusedmoe_routing_config* config,
                           const fusedmoe_const_matrix* logits, const fusedmoe_matrix* topk_weights,
                           const fusedmoe_matrix* topk_ids) noexcept {
  using namespace fusedmoe::c_api;
  return guarded([&] {
    const auto routing = to_routing({"config"}, config);
    const auto from = to_matrix({"logits"}, logits);
    const auto weights = to_matrix({"topk_weights"}, topk_weights);
    function(routing, from, weights, to_matrix({"topk_ids"}, topk_ids));
  });
}

}  // namespace

fusedmoe_status fusedmoe::c_api::report(ErrorCode code, const char* text) noexcept {
  std::snprintf(t_last_error, sizeof t_last_error, "%s", text);
  return static_cast<fusedmoe_status>(code);
}

// ---- status and names ----------------------------------------------------------------------

const char* fusedmoe_last_error(void) { return t_last_error; }

const char* fusedmoe_status_name(fusedmoe_status status) {
  return status == FUSEDMOE_OK ? "ok" : name_of(status, ErrorCode::internal);
}

const char* fusedmoe_version(void) { return fusedmoe::version(); }

const char* fusedmoe_dtype_name(int32_t dtype) { return name_of(dtype, fusedmoe::DType::u8); }

const char* fusedmoe_activation_name(int32_t activation) {
  return name_of(activation, fusedmoe::Activation::relu2);
}

const char* fusedmoe_gate_up_layout_name(int32_t layout) {
  return name_of(layout, fusedmoe::GateUpLayout::interleaved);
}

const char* fusedmoe_gate_up_order_name(int32_t order) {
  return name_of(order, fusedmoe::GateUpOrder::up_gate);
}

const char* fusedmoe_weight_format_name(int32_t format) {
  return name_of(format, fusedmoe::WeightFormat::q6_k);
}

const char* fusedmoe_weight_layout_name(int32_t layout) {
  return name_of(layout, fusedmoe::WeightLayout::kn);
}

const char* fusedmoe_score_function_name(int32_t function) {
  return name_of(function, fusedmoe::ScoreFunction::softplus_sqrt);
}

const char* fusedmoe_renormalise_name(int32_t rule) {
  return name_of(rule, fusedmoe::Renormalise::max_sum_epsilon);
}

const char* fusedmoe_group_score_name(int32_t score) {
  return name_of(score, fusedmoe::GroupScore::best);
}

int64_t fusedmoe_dtype_bytes(int32_t dtype) {
  const bool known = dtype >= 0 && dtype <= static_cast<int32_t>(fusedmoe::DType::u8);
  return known ? fusedmoe::bytes_per_element(static_cast<fusedmoe::DType>(dtype)) : 0;
}

int32_t fusedmoe_activation_is_gated(int32_t activation) {
  const bool known =
      activation >= 0 && activation <= static_cast<int32_t>(fusedmoe::Activation::relu2);
  return known && fusedmoe::is_gated(static_cast<fusedmoe::Activation>(activation)) ? 1 : 0;
}

fusedmoe_status fusedmoe_version_bump(uint64_t* counter) {
  return guarded([&] {
    need_pointer({"counter"}, counter);
    if (reinterpret_cast<std::uintptr_t>(counter) % alignof(std::atomic<std::uint64_t>) != 0) {
      fusedmoe::c_api::refuse({"counter"}, "an 8-byte aligned counter", "another address",
                              "align it");
    }
    std::atomic_ref<std::uint64_t>(*counter).fetch_add(1);
  });
}

// ---- devices and expert maps ---------------------------------------------------------------

fusedmoe_status fusedmoe_num_devices(int64_t* count) {
  return guarded([&] {
    need_pointer({"count"}, count);
    *count = static_cast<std::int64_t>(fusedmoe::list_devices().size());
  });
}

fusedmoe_status fusedmoe_device_info(int64_t index, int32_t* available, char* name,
                                     size_t name_bytes, size_t* name_needed, char* reason,
                                     size_t reason_bytes, size_t* reason_needed) {
  return guarded([&] {
    need_pointer({"available"}, available);
    const TextOut name_out("name", name, name_bytes, name_needed);
    const TextOut reason_out("reason", reason, reason_bytes, reason_needed);
    const std::vector<fusedmoe::DeviceInfo> infos = fusedmoe::list_devices();
    fusedmoe::c_api::need_range({"index"}, index, 0, static_cast<std::int64_t>(infos.size()) - 1,
                                "an index below fusedmoe_num_devices()");
    const fusedmoe::DeviceInfo& info = infos[static_cast<std::size_t>(index)];
    *available = info.available ? 1 : 0;
    name_out.put(info.name);
    reason_out.put(info.reason);
  });
}

fusedmoe_status fusedmoe_device_to_text(const fusedmoe_device* device, char* text,
                                        size_t text_bytes, size_t* text_needed) {
  return guarded([&] {
    need_pointer({"device"}, device);
    const TextOut out("text", text, text_bytes, text_needed);
    out.put(to_string(fusedmoe::c_api::to_device({"device"}, device)));
  });
}

fusedmoe_status fusedmoe_device_parse(const char* text, fusedmoe_device* device, char* platform,
                                      size_t platform_bytes) {
  return guarded([&] {
    need_pointer({"text"}, text);
    need_pointer({"device"}, device);
    const TextOut out("platform", platform, platform_bytes, nullptr);
    const Device parsed = fusedmoe::parse_device(text);
    const std::string& name = parsed.platform;
    if (!name.empty() && platform_bytes <= name.size()) {
      fusedmoe::c_api::refuse({"platform_bytes"}, "at least " + std::to_string(name.size() + 1),
                              std::to_string(platform_bytes), "pass a larger buffer");
    }
    fusedmoe::c_api::write_device({"device"}, parsed, platform, device);
    if (!name.empty()) out.put(name);
  });
}

fusedmoe_status fusedmoe_expert_map_resolve(const fusedmoe_expert_map* map, int64_t num_experts,
                                            int32_t* table) {
  return guarded([&] {
    need_pointer({"map"}, map);
    need_pointer({"table"}, table);
    const auto resolved = fusedmoe::c_api::to_expert_map({"map"}, map).resolve(num_experts);
    std::copy(resolved.begin(), resolved.end(), table);
  });
}

// ---- owning workspaces ---------------------------------------------------------------------

fusedmoe_status fusedmoe_workspace_buffer_create(const fusedmoe_device* device, int64_t bytes,
                                                 int64_t alignment,
                                                 fusedmoe_workspace_buffer** buffer) {
  return guarded([&] {
    need_pointer({"buffer"}, buffer);
    *buffer = nullptr;
    *buffer = new fusedmoe_workspace_buffer{WorkspaceBuffer(
        fusedmoe::c_api::to_device({"device"}, device), WorkspaceSize{bytes, alignment})};
  });
}

void fusedmoe_workspace_buffer_destroy(fusedmoe_workspace_buffer* buffer) { delete buffer; }

fusedmoe_status fusedmoe_workspace_buffer_reserve(fusedmoe_workspace_buffer* buffer, int64_t bytes,
                                                  int64_t alignment) {
  return guarded([&] {
    need_pointer({"buffer"}, buffer);
    buffer->buffer.reserve({bytes, alignment});
  });
}

fusedmoe_status fusedmoe_workspace_buffer_lock(fusedmoe_workspace_buffer* buffer) {
  return guarded([&] {
    need_pointer({"buffer"}, buffer);
    buffer->buffer.lock();
  });
}

fusedmoe_status fusedmoe_workspace_buffer_locked(const fusedmoe_workspace_buffer* buffer,
                                                 int32_t* locked) {
  return guarded([&] {
    need_pointer({"buffer"}, buffer);
    need_pointer({"locked"}, locked);
    *locked = buffer->buffer.locked() ? 1 : 0;
  });
}

fusedmoe_status fusedmoe_workspace_buffer_view(const fusedmoe_workspace_buffer* buffer,
                                               fusedmoe_workspace* workspace) {
  return guarded([&] {
    need_pointer({"buffer"}, buffer);
    fusedmoe::c_api::write_workspace({"workspace"}, buffer->buffer, workspace);
  });
}

fusedmoe_status fusedmoe_workspace_buffer_device(const fusedmoe_workspace_buffer* buffer,
                                                 fusedmoe_device* device) {
  return guarded([&] {
    need_pointer({"buffer"}, buffer);
    const Device& from = buffer->buffer.device();
    fusedmoe::c_api::write_device({"device"}, from, from.platform.c_str(), device);
  });
}

fusedmoe_status fusedmoe_workspace_pool_create(const fusedmoe_device* device, int32_t num_lanes,
                                               fusedmoe_workspace_pool** pool) {
  return guarded([&] {
    need_pointer({"pool"}, pool);
    *pool = nullptr;
    *pool = new fusedmoe_workspace_pool{
        WorkspacePool(fusedmoe::c_api::to_device({"device"}, device), num_lanes)};
  });
}

void fusedmoe_workspace_pool_destroy(fusedmoe_workspace_pool* pool) { delete pool; }

fusedmoe_status fusedmoe_workspace_pool_register_plan(fusedmoe_workspace_pool* pool,
                                                      const fusedmoe_plan* plan,
                                                      int64_t max_tokens) {
  return guarded([&] {
    need_pointer({"pool"}, pool);
    need_pointer({"plan"}, plan);
    pool->pool.register_plan(plan->moe, max_tokens);
  });
}

fusedmoe_status fusedmoe_workspace_pool_lock(fusedmoe_workspace_pool* pool) {
  return guarded([&] {
    need_pointer({"pool"}, pool);
    pool->pool.lock();
  });
}

fusedmoe_status fusedmoe_workspace_pool_lane(fusedmoe_workspace_pool* pool, int32_t index,
                                             fusedmoe_workspace* workspace) {
  return guarded([&] {
    need_pointer({"pool"}, pool);
    need_pointer({"workspace"}, workspace);
    fusedmoe::c_api::write_workspace({"workspace"}, pool->pool.lane(index), workspace);
  });
}

fusedmoe_status fusedmoe_workspace_pool_num_lanes(const fusedmoe_workspace_pool* pool,
                                                  int32_t* num_lanes) {
  return guarded([&] {
    need_pointer({"pool"}, pool);
    need_pointer({"num_lanes"}, num_lanes);
    *num_lanes = pool->pool.num_lanes();
  });
}

fusedmoe_status fusedmoe_workspace_pool_bytes_per_lane(const fusedmoe_workspace_pool* pool,
                                                       int64_t* bytes) {
  return guarded([&] {
    need_pointer({"pool"}, pool);
    need_pointer({"bytes"}, bytes);
    *bytes = pool->pool.bytes_per_lane();
  });
}

// ---- routing -------------------------------------------------------------------------------

fusedmoe_status fusedmoe_route(const fusedmoe_routing_config* config,
                               const fusedmoe_const_matrix* logits,
                               const fusedmoe_matrix* topk_weights,
                               const fusedmoe_matrix* topk_ids) {
  return route_with(fusedmoe::route, config, logits, topk_weights, topk_ids);
}

fusedmoe_status fusedmoe_topk_softmax(const fusedmoe_routing_config* config,
                                      const fusedmoe_const_matrix* logits,
                                      const fusedmoe_matrix* topk_weights,
                                      const fusedmoe_matrix* topk_ids) {
  return route_with(fusedmoe::topk_softmax, config, logits, topk_weights, topk_ids);
}

fusedmoe_status fusedmoe_topk_sigmoid(const fusedmoe_routing_config* config,
                                      const fusedmoe_const_matrix* logits,
                                      const fusedmoe_matrix* topk_weights,
                                      const fusedmoe_matrix* topk_ids) {
  return route_with(fusedmoe::topk_sigmoid, config, logits, topk_weights, topk_ids);
}

fusedmoe_status fusedmoe_topk_softplus_sqrt(const fusedmoe_routing_config* config,
                                            const fusedmoe_const_matrix* logits,
                                            const fusedmoe_matrix* topk_weights,
                                            const fusedmoe_matrix* topk_ids) {
  return route_with(fusedmoe::topk_softplus_sqrt, config, logits, topk_weights, topk_ids);
}

fusedmoe_status fusedmoe_grouped_topk(const fusedmoe_routing_config* config,
                                      const fusedmoe_const_matrix* logits,
                                      const fusedmoe_matrix* topk_weights,
                                      const fusedmoe_matrix* topk_ids) {
  return route_with(fusedmoe::grouped_topk, config, logits, topk_weights, topk_ids);
}
