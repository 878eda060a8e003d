// Structs of the C ABI -> structs of the C++ API, with every check that the C++ types make
// unnecessary there: null, struct_size, enum ranges, reserved fields, array lengths.
#include "core/c_api_convert.h"

#include <span>
#include <string>
#include <vector>

namespace fusedmoe::c_api {
namespace {

static_assert(FUSEDMOE_ERROR_INTERNAL == static_cast<int>(ErrorCode::internal));
static_assert(FUSEDMOE_DTYPE_U8 == static_cast<int>(DType::u8));
static_assert(FUSEDMOE_ACTIVATION_RELU2 == static_cast<int>(Activation::relu2));
static_assert(FUSEDMOE_GATE_UP_INTERLEAVED == static_cast<int>(GateUpLayout::interleaved));
static_assert(FUSEDMOE_GATE_UP_UP_FIRST == static_cast<int>(GateUpOrder::up_gate));
static_assert(FUSEDMOE_DEVICE_XPU == static_cast<int>(DeviceKind::xpu));
static_assert(FUSEDMOE_MODE_A8 == static_cast<int>(ComputeMode::a8));
static_assert(FUSEDMOE_STORAGE_ADOPT == static_cast<int>(WeightStorage::adopt));
static_assert(FUSEDMOE_STALE_REFRESH == static_cast<int>(StalePolicy::refresh));
static_assert(FUSEDMOE_REFRESH_NO_WAIT == static_cast<int>(RefreshWait::no_wait));
static_assert(FUSEDMOE_FORMAT_Q6_K == static_cast<int>(WeightFormat::q6_k));
static_assert(FUSEDMOE_WEIGHT_LAYOUT_KN == static_cast<int>(WeightLayout::kn));
static_assert(FUSEDMOE_SCALE_LAYOUT_BLOCK == static_cast<int>(ScaleLayout::block));
static_assert(FUSEDMOE_SCALE_PARTS_INTERLEAVED == static_cast<int>(ScaleParts::interleaved));
static_assert(FUSEDMOE_SCALE_E4M3 == static_cast<int>(ScaleType::e4m3));
static_assert(FUSEDMOE_SCORE_SOFTPLUS_SQRT == static_cast<int>(ScoreFunction::softplus_sqrt));
static_assert(FUSEDMOE_RENORMALISE_MAX_SUM_EPSILON ==
              static_cast<int>(Renormalise::max_sum_epsilon));
static_assert(FUSEDMOE_GROUP_SCORE_BEST == static_cast<int>(GroupScore::best));

// The ABI's structs have no hidden padding: an older struct's padding would be a newer one's field.
static_assert(sizeof(void*) != 8 ||
              (sizeof(fusedmoe_activation_config) == 32 && sizeof(fusedmoe_moe_config) == 72 &&
               sizeof(fusedmoe_device) == 24 && sizeof(fusedmoe_expert_map) == 40 &&
               sizeof(fusedmoe_plan_options) == 80 && sizeof(fusedmoe_weight_scales) == 72 &&
               sizeof(fusedmoe_weight_tensor) == 72 && sizeof(fusedmoe_bias_tensor) == 40 &&
               sizeof(fusedmoe_expert_weights) == 88 && sizeof(fusedmoe_matrix) == 48 &&
               sizeof(fusedmoe_const_matrix) == 48 && sizeof(fusedmoe_workspace) == 40 &&
               sizeof(fusedmoe_thread_runner) == 32 && sizeof(fusedmoe_apply_context) == 40 &&
               sizeof(fusedmoe_routing_config) == 64));

template <class View, class Struct>
View to_view(const Path& path, const Struct* from, void (*init)(Struct*)) {
  Struct c;
  init(&c);
  read_struct(path, from, offsetof(Struct, row_stride), c);
  need_zero(path, c.reserved);
  return View(c.data, to_dtype({"dtype", &path}, c.dtype), c.rows, c.columns,
              c.row_stride == 0 ? c.columns : c.row_stride);
}

}  // namespace

void refuse(const Path& path, const std::string& expected, const std::string& got,
            const std::string& remedy) {
  throw Error(ErrorCode::invalid_argument,
              path.text() + ": expected " + expected + ", got " + got + "; " + remedy);
}

void need_pointer(const Path& path, const void* pointer) {
  if (pointer == nullptr) refuse(path, "a pointer", "NULL", "pass one");
}

void need_array(const Path& path, const void* data, const char* count_name, std::int64_t count) {
  if (count < 0) {
    refuse({count_name, path.parent}, "0 or more", std::to_string(count), "pass the count");
  }
  if (data == nullptr && count > 0) {
    refuse(path, "a pointer (" + std::string(count_name) + " is " + std::to_string(count) + ")",
           "NULL", "pass one, or the count 0");
  }
}

void need_range(const Path& path, std::int64_t value, std::int64_t first, std::int64_t last,
                const char* values) {
  if (value >= first && value <= last) return;
  refuse(path, std::to_string(first) + ".." + std::to_string(last), std::to_string(value),
         "use " + std::string(values));
}

bool to_bool(const Path& path, std::int32_t value) {
  need_range(path, value, 0, 1, "0 or 1");
  return value != 0;
}

void need_zero(const Path& parent, std::int32_t reserved) {
  need_range({"reserved", &parent}, reserved, 0, 0, "0, as the init function does");
}

DType to_dtype(const Path& path, std::int32_t value) {
  return to_enum(path, value, DType::u8, "a FUSEDMOE_DTYPE_* value");
}

void check_struct_size(const Path& path, const void* data, std::size_t head, std::size_t known,
                       std::size_t alignment) {
  std::size_t size = 0;
  std::memcpy(&size, data, sizeof size);
  const Path field{"struct_size", &path};
  const char* remedy = "call the struct's init function first";
  if (size < head) refuse(field, "at least " + std::to_string(head), std::to_string(size), remedy);
  if (size > kMaxStructSize) {
    refuse(field, "at most " + std::to_string(kMaxStructSize), std::to_string(size), remedy);
  }
  if (size % alignment != 0) {
    refuse(field, "a multiple of " + std::to_string(alignment), std::to_string(size), remedy);
  }
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (std::size_t i = known; i < size; ++i) {
    if (bytes[i] != 0) {
      refuse(field, std::to_string(known) + ", or zero bytes behind that",
             std::to_string(size) + " with byte " + std::to_string(i) + " set",
             "this library is older than the header and does not know that field");
    }
  }
}

MoeConfig to_config(const Path& path, const fusedmoe_moe_config* from) {
  fusedmoe_moe_config c;
  fusedmoe_moe_config_init(&c);
  read_struct(path, from, offsetof(fusedmoe_moe_config, activation), c);
  MoeConfig config;
  config.hidden_size = c.hidden_size;
  config.intermediate_size = c.intermediate_size;
  config.num_experts = c.num_experts;
  config.top_k = c.top_k;
  if (c.activation != nullptr) {
    const Path inner{"activation", &path};
    fusedmoe_activation_config a;
    fusedmoe_activation_config_init(&a);
    read_struct(inner, c.activation, offsetof(fusedmoe_activation_config, limit), a);
    need_zero(inner, a.reserved);
    config.activation.kind =
        to_enum({"kind", &inner}, a.kind, Activation::relu2, "a FUSEDMOE_ACTIVATION_* value");
    config.activation.alpha = a.alpha;
    config.activation.limit = a.limit;
    config.activation.beta = a.beta;
    config.activation.linear_beta = a.linear_beta;
  }
  config.dtype = to_dtype({"dtype", &path}, c.dtype);
  if (c.output_dtype != FUSEDMOE_DTYPE_UNSET) {
    config.output_dtype = to_dtype({"output_dtype", &path}, c.output_dtype);
  }
  config.gate_up_layout = to_enum({"gate_up_layout", &path}, c.gate_up_layout,
                                  GateUpLayout::interleaved, "a FUSEDMOE_GATE_UP_* value");
  config.gate_up_order = to_enum({"gate_up_order", &path}, c.gate_up_order, GateUpOrder::up_gate,
                                 "a FUSEDMOE_GATE_UP_*_FIRST value");
  if (c.clamp_limit != 0.0F) config.clamp_limit = c.clamp_limit;
  config.apply_router_weight_on_input =
      to_bool({"apply_router_weight_on_input", &path}, c.apply_router_weight_on_input);
  return config;
}

Device to_device(const Path& path, const fusedmoe_device* from) {
  if (from == nullptr) return {};
  fusedmoe_device c;
  fusedmoe_device_init(&c);
  read_struct(path, from, offsetof(fusedmoe_device, platform), c);
  Device device;
  device.kind = to_enum({"kind", &path}, c.kind, DeviceKind::xpu, "a FUSEDMOE_DEVICE_* value");
  device.index = c.index;
  if (c.platform != nullptr) device.platform = c.platform;
  return device;
}

ExpertMap to_expert_map(const Path& path, const fusedmoe_expert_map* from) {
  if (from == nullptr) return {};
  fusedmoe_expert_map c;
  fusedmoe_expert_map_init(&c);
  read_struct(path, from, offsetof(fusedmoe_expert_map, map), c);
  need_zero(path, c.reserved);
  need_range({"kind", &path}, c.kind, 0, FUSEDMOE_EXPERT_MAP_EXPLICIT,
             "a FUSEDMOE_EXPERT_MAP_* value");
  if (c.kind == FUSEDMOE_EXPERT_MAP_LINEAR) return ExpertMap::linear(c.rank, c.size);
  if (c.kind == FUSEDMOE_EXPERT_MAP_ROUND_ROBIN) return ExpertMap::round_robin(c.rank, c.size);
  if (c.kind == FUSEDMOE_EXPERT_MAP_IDENTITY) return {};
  const Path map{"map", &path};
  need_array(map, c.map, "map_size", c.map_size);
  return ExpertMap::explicit_map(std::vector<std::int32_t>(c.map, c.map + c.map_size));
}

ThreadRunner to_runner(const Path& path, const fusedmoe_thread_runner* from) {
  fusedmoe_thread_runner c;
  fusedmoe_thread_runner_init(&c);
  read_struct(path, from, sizeof c, c);
  if (c.run == nullptr) refuse({"run", &path}, "a function", "NULL", "pass one, or no runner");
  if (c.num_threads < 1) {
    refuse({"num_threads", &path}, "at least 1", std::to_string(c.num_threads),
           "pass how many bodies it keeps busy");
  }
  return {c.run, c.self, c.num_threads, to_bool({"gang", &path}, c.gang)};
}

OptionsHolder::OptionsHolder(const Path& path, const fusedmoe_plan_options* from) {
  if (from == nullptr) return;
  fusedmoe_plan_options c;
  fusedmoe_plan_options_init(&c);
  read_struct(path, from, offsetof(fusedmoe_plan_options, device), c);
  options.device = to_device({"device", &path}, c.device);
  options.expert_map = to_expert_map({"expert_map", &path}, c.expert_map);
  if (c.isa != nullptr) options.isa = c.isa;
  options.mode = to_enum({"mode", &path}, c.mode, ComputeMode::a8, "a FUSEDMOE_MODE_* value");
  need_range({"batch_invariant", &path}, c.batch_invariant, -1, 1, "0, 1 or -1 (unset)");
  if (c.batch_invariant >= 0) options.batch_invariant = c.batch_invariant == 1;
  options.max_threads = c.max_threads;
  options.weight_storage = to_enum({"weight_storage", &path}, c.weight_storage,
                                   WeightStorage::adopt, "a FUSEDMOE_STORAGE_* value");
  need_array({"storage", &path}, c.storage, "storage_bytes", c.storage_bytes);
  options.storage =
      std::span(static_cast<std::byte*>(c.storage), static_cast<std::size_t>(c.storage_bytes));
  options.on_stale =
      to_enum({"on_stale", &path}, c.on_stale, StalePolicy::refresh, "a FUSEDMOE_STALE_* value");
  options.counters = to_bool({"counters", &path}, c.counters);
  if (c.runner != nullptr) {
    runner = to_runner({"runner", &path}, c.runner);
    options.runner = &runner;
  }
}

RoutingConfig to_routing(const Path& path, const fusedmoe_routing_config* from) {
  fusedmoe_routing_config c;
  fusedmoe_routing_config_init(&c);
  read_struct(path, from, offsetof(fusedmoe_routing_config, selection_bias), c);
  need_zero(path, c.reserved);
  RoutingConfig config;
  if (c.score_function != FUSEDMOE_SCORE_UNSET) {
    config.score_function = to_enum({"score_function", &path}, c.score_function,
                                    ScoreFunction::softplus_sqrt, "a FUSEDMOE_SCORE_* value");
  }
  config.top_k = c.top_k;
  if (c.selection_bias != nullptr) {
    config.selection_bias = to_matrix({"selection_bias", &path}, c.selection_bias);
  }
  config.renormalise = to_enum({"renormalise", &path}, c.renormalise, Renormalise::max_sum_epsilon,
                               "a FUSEDMOE_RENORMALISE_* value");
  config.epsilon = c.epsilon;
  config.num_groups = c.num_groups;
  config.topk_group = c.topk_group;
  config.group_score = to_enum({"group_score", &path}, c.group_score, GroupScore::best,
                               "a FUSEDMOE_GROUP_SCORE_* value");
  config.scaling_factor = c.scaling_factor;
  return config;
}

MatrixView to_matrix(const Path& path, const fusedmoe_matrix* from) {
  return to_view<MatrixView>(path, from, fusedmoe_matrix_init);
}

ConstMatrixView to_matrix(const Path& path, const fusedmoe_const_matrix* from) {
  return to_view<ConstMatrixView>(path, from, fusedmoe_const_matrix_init);
}

Workspace to_workspace(const Path& path, const fusedmoe_workspace* from) {
  if (from == nullptr) return {};
  fusedmoe_workspace c;
  fusedmoe_workspace_init(&c);
  read_struct(path, from, offsetof(fusedmoe_workspace, workspace13), c);
  need_array({"workspace2", &path}, c.workspace2, "workspace2_bytes", c.workspace2_bytes);
  need_array({"workspace13", &path}, c.workspace13, "workspace13_bytes", c.workspace13_bytes);
  const std::span second(static_cast<std::byte*>(c.workspace2),
                         static_cast<std::size_t>(c.workspace2_bytes));
  if (c.workspace13 == nullptr) return Workspace(second);
  return Workspace(std::span(static_cast<std::byte*>(c.workspace13),
                             static_cast<std::size_t>(c.workspace13_bytes)),
                   second);
}

ContextHolder::ContextHolder(const Path& path, const fusedmoe_apply_context* from) {
  if (from == nullptr) return;
  fusedmoe_apply_context c;
  fusedmoe_apply_context_init(&c);
  read_struct(path, from, offsetof(fusedmoe_apply_context, runner), c);
  if (c.runner != nullptr) {
    runner = to_runner({"runner", &path}, c.runner);
    context.runner = &runner;
  }
  context.queue = c.queue;
  need_array({"expert_map", &path}, c.expert_map, "expert_map_size", c.expert_map_size);
  context.expert_map = std::span(c.expert_map, static_cast<std::size_t>(c.expert_map_size));
}

fusedmoe_activation_config from_activation(const ActivationConfig& activation) {
  fusedmoe_activation_config c;
  fusedmoe_activation_config_init(&c);
  c.kind = static_cast<std::int32_t>(activation.kind);
  c.alpha = activation.alpha;
  c.limit = activation.limit;
  c.beta = activation.beta;
  c.linear_beta = activation.linear_beta;
  return c;
}

void write_config(const Path& path, const MoeConfig& from,
                  const fusedmoe_activation_config& activation, fusedmoe_moe_config* into) {
  fusedmoe_moe_config c;
  fusedmoe_moe_config_init(&c);
  c.hidden_size = from.hidden_size;
  c.intermediate_size = from.intermediate_size;
  c.num_experts = from.num_experts;
  c.top_k = from.top_k;
  c.activation = &activation;
  c.dtype = static_cast<std::int32_t>(from.dtype);
  if (from.output_dtype) c.output_dtype = static_cast<std::int32_t>(*from.output_dtype);
  c.gate_up_layout = static_cast<std::int32_t>(from.gate_up_layout);
  c.gate_up_order = static_cast<std::int32_t>(from.gate_up_order);
  c.clamp_limit = from.clamp_limit.value_or(0.0F);
  c.apply_router_weight_on_input = from.apply_router_weight_on_input ? 1 : 0;
  write_struct(path, c, offsetof(fusedmoe_moe_config, activation), into);
}

void write_device(const Path& path, const Device& from, const char* platform,
                  fusedmoe_device* into) {
  fusedmoe_device c;
  fusedmoe_device_init(&c);
  c.kind = static_cast<std::int32_t>(from.kind);
  c.index = from.index;
  if (!from.platform.empty()) c.platform = platform;
  write_struct(path, c, offsetof(fusedmoe_device, platform), into);
}

void write_workspace(const Path& path, const Workspace& from, fusedmoe_workspace* into) {
  fusedmoe_workspace c;
  fusedmoe_workspace_init(&c);
  c.workspace2 = from.workspace2.data();
  c.workspace2_bytes = static_cast<std::int64_t>(from.workspace2.size());
  c.workspace13 = from.workspace13.data();
  c.workspace13_bytes = static_cast<std::int64_t>(from.workspace13.size());
  write_struct(path, c, offsetof(fusedmoe_workspace, workspace13), into);
}

}  // namespace fusedmoe::c_api
