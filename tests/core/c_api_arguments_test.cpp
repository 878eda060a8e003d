// What the C ABI refuses: null, struct_size, enum ranges, reserved fields, counts; each by name.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "c_api_layer.h"

namespace fusedmoe::c_api_test {
namespace {

using testing::AssertionFailure;
using testing::AssertionResult;
using testing::AssertionSuccess;

// invalid_argument with a text that starts with `start` (and holds `part`).
AssertionResult refused(fusedmoe_status status, const std::string& start,
                        const std::string& part = "") {
  const std::string text = outcome(status);
  if (status == FUSEDMOE_ERROR_INVALID_ARGUMENT && text.starts_with("invalid_argument: " + start) &&
      text.find(part) != std::string::npos) {
    return AssertionSuccess();
  }
  return AssertionFailure() << "expected '" << start << "' ... '" << part << "', got '" << text
                            << "'";
}

// Every struct that create reads, set and valid.
struct Full : Layer {
  fusedmoe_activation_config activation;
  fusedmoe_device device;
  fusedmoe_expert_map map;
  fusedmoe_weight_scales scales;
  fusedmoe_weight_tensor w13_gate;
  fusedmoe_weight_tensor w13_up;
  fusedmoe_bias_tensor w13_bias;
  fusedmoe_bias_tensor w2_bias;
  fusedmoe_thread_runner runner;
  std::vector<float> bias_data = std::vector<float>(kExperts * 2 * kIntermediate, 0.5F);

  Full() {
    fusedmoe_activation_config_init(&activation);
    fusedmoe_device_init(&device);
    fusedmoe_expert_map_init(&map);
    fusedmoe_weight_scales_init(&scales);
    w13_gate = w13;
    w13_gate.outputs = kIntermediate;
    w13_up = w13_gate;
    fusedmoe_bias_tensor_init(&w13_bias);
    w13_bias.data = bias_data.data();
    w13_bias.experts = kExperts;
    w13_bias.size = 2 * kIntermediate;
    w2_bias = w13_bias;
    w2_bias.size = kHidden;
    config.activation = &activation;
    options.device = &device;
    options.expert_map = &map;
    fusedmoe_thread_runner_init(&runner);
    runner.run = [](void*, int count, void (*body)(void*, int), void* argument) {
      for (int i = 0; i < count; ++i) body(argument, i);
    };
    runner.num_threads = 2;
    options.runner = &runner;
    w13_gate.scales = &scales;
    weights.w13 = &w13_gate;
    weights.w13_up = &w13_up;
    weights.w13_bias = &w13_bias;
    weights.w2_bias = &w2_bias;
  }
  fusedmoe_status try_create() const {
    fusedmoe_plan* plan = nullptr;
    const fusedmoe_status status = create(&plan);
    EXPECT_EQ(plan != nullptr, status == FUSEDMOE_OK);
    fusedmoe_plan_destroy(plan);
    return status;
  }
};

TEST(CApiArguments, AllStructsAtOnceAreAccepted) {
  const Full full;
  EXPECT_EQ(outcome(full.try_create()), "");
}

TEST(CApiArguments, CreateRefusesFieldsByName) {
  struct Case {
    const char* start;
    std::function<void(Full&)> spoil;
  };
  const std::vector<Case> cases = {
      {"config.activation.kind: expected 0..6, got 9", [](Full& f) { f.activation.kind = 9; }},
      {"config.activation.kind: expected 0..6, got -1", [](Full& f) { f.activation.kind = -1; }},
      {"config.activation.kind: expected 0..6, got 256", [](Full& f) { f.activation.kind = 256; }},
      {"config.activation.reserved: ", [](Full& f) { f.activation.reserved = 1; }},
      {"config.dtype: expected 0..8, got 9", [](Full& f) { f.config.dtype = 9; }},
      {"config.dtype: expected 0..8, got -1", [](Full& f) { f.config.dtype = -1; }},
      {"config.output_dtype: expected 0..8, got -2", [](Full& f) { f.config.output_dtype = -2; }},
      {"config.gate_up_layout: expected 0..1", [](Full& f) { f.config.gate_up_layout = 2; }},
      {"config.gate_up_order: expected 0..1", [](Full& f) { f.config.gate_up_order = 2; }},
      {"config.apply_router_weight_on_input: expected 0..1",
       [](Full& f) { f.config.apply_router_weight_on_input = 2; }},
      {"config.clamp_limit: ", [](Full& f) { f.config.clamp_limit = -1.0F; }},
      {"config.hidden_size: ", [](Full& f) { f.config.hidden_size = 0; }},
      {"config.top_k: ", [](Full& f) { f.config.top_k = -3; }},
      {"options.device.kind: expected 0..2", [](Full& f) { f.device.kind = 3; }},
      {"options.expert_map.kind: expected 0..3", [](Full& f) { f.map.kind = 4; }},
      {"options.expert_map.reserved: ", [](Full& f) { f.map.reserved = 7; }},
      {"options.expert_map.map: ",
       [](Full& f) {
         f.map.kind = FUSEDMOE_EXPERT_MAP_EXPLICIT;
         f.map.map_size = 4;
       }},
      {"options.expert_map.map_size: ",
       [](Full& f) {
         f.map.kind = FUSEDMOE_EXPERT_MAP_EXPLICIT;
         f.map.map_size = -1;
       }},
      {"options.mode: expected 0..1", [](Full& f) { f.options.mode = 2; }},
      {"options.batch_invariant: expected -1..1", [](Full& f) { f.options.batch_invariant = 2; }},
      {"options.weight_storage: expected 0..3", [](Full& f) { f.options.weight_storage = 4; }},
      {"options.storage: ", [](Full& f) { f.options.storage_bytes = 64; }},
      {"options.storage_bytes: ", [](Full& f) { f.options.storage_bytes = -1; }},
      {"options.on_stale: expected 0..1", [](Full& f) { f.options.on_stale = 2; }},
      {"options.counters: expected 0..1", [](Full& f) { f.options.counters = 2; }},
      {"options.runner.run: expected a function, got NULL",
       [](Full& f) { f.runner.run = nullptr; }},
      {"options.runner.num_threads: expected at least 1, got 0",
       [](Full& f) { f.runner.num_threads = 0; }},
      {"options.runner.gang: expected 0..1, got 2", [](Full& f) { f.runner.gang = 2; }},
      {"options.runner: expected num_threads <= 4096, got 4097; ",
       [](Full& f) {
         f.options.max_threads = 0;
         f.runner.num_threads = 4097;
       }},
      {"weights.w13: expected a pointer, got NULL", [](Full& f) { f.weights.w13 = nullptr; }},
      {"weights.w2: expected a pointer, got NULL", [](Full& f) { f.weights.w2 = nullptr; }},
      {"weights.w13.format: expected 0..12", [](Full& f) { f.w13_gate.format = 13; }},
      {"weights.w13.layout: expected 0..1", [](Full& f) { f.w13_gate.layout = 2; }},
      {"weights.w13.scales.type: expected 0..4", [](Full& f) { f.scales.type = 5; }},
      {"weights.w13.scales.layout: expected 0..4", [](Full& f) { f.scales.layout = 5; }},
      {"weights.w13.scales.transposed: expected 0..1", [](Full& f) { f.scales.transposed = 2; }},
      {"weights.w13.scales.parts: expected 0..2", [](Full& f) { f.scales.parts = 3; }},
      {"weights.w13_up.format: ", [](Full& f) { f.w13_up.format = -1; }},
      {"weights.w13_bias.dtype: ", [](Full& f) { f.w13_bias.dtype = 99; }},
      {"weights.w2_bias.reserved: ", [](Full& f) { f.w2_bias.reserved = 1; }},
      {"weights.version: ",
       [](Full& f) { f.weights.version = reinterpret_cast<const std::uint64_t*>(0x1001); }},
  };
  for (const Case& c : cases) {
    Full full;
    c.spoil(full);
    EXPECT_TRUE(refused(full.try_create(), c.start));
    // supports gives the same reason, as an answer.
    std::string text = fusedmoe_last_error();
    std::array<char, 1024> reason{};
    std::int32_t supported = -1;
    ASSERT_EQ(fusedmoe_supports(&full.config, &full.weights, &full.options, &supported,
                                reason.data(), reason.size(), nullptr),
              FUSEDMOE_OK);
    EXPECT_EQ(supported, 0);
    EXPECT_EQ(text, reason.data());
  }
}

TEST(CApiArguments, StructSizeOfEveryStruct) {
  struct Case {
    std::string name;
    std::function<std::size_t&(Full&)> size;
  };
  const std::vector<Case> cases = {
      {"config", [](Full& f) -> std::size_t& { return f.config.struct_size; }},
      {"config.activation", [](Full& f) -> std::size_t& { return f.activation.struct_size; }},
      {"options", [](Full& f) -> std::size_t& { return f.options.struct_size; }},
      {"options.device", [](Full& f) -> std::size_t& { return f.device.struct_size; }},
      {"options.expert_map", [](Full& f) -> std::size_t& { return f.map.struct_size; }},
      {"options.runner", [](Full& f) -> std::size_t& { return f.runner.struct_size; }},
      {"weights", [](Full& f) -> std::size_t& { return f.weights.struct_size; }},
      {"weights.w13", [](Full& f) -> std::size_t& { return f.w13_gate.struct_size; }},
      {"weights.w13.scales", [](Full& f) -> std::size_t& { return f.scales.struct_size; }},
      {"weights.w13_up", [](Full& f) -> std::size_t& { return f.w13_up.struct_size; }},
      {"weights.w2", [](Full& f) -> std::size_t& { return f.w2.struct_size; }},
      {"weights.w13_bias", [](Full& f) -> std::size_t& { return f.w13_bias.struct_size; }},
      {"weights.w2_bias", [](Full& f) -> std::size_t& { return f.w2_bias.struct_size; }},
  };
  for (const Case& c : cases) {
    Full full;
    std::size_t& size = c.size(full);
    const std::size_t right = size;
    const std::string field = c.name + ".struct_size: ";
    size = 0;
    EXPECT_TRUE(refused(full.try_create(), field + "expected at least ", "got 0"));
    size = right - 4;  // the end of no field of any version
    EXPECT_TRUE(refused(full.try_create(), field)) << c.name;
    size = std::numeric_limits<std::size_t>::max();
    EXPECT_TRUE(refused(full.try_create(), field + "expected at most 4096"));
    size = 4104;
    EXPECT_TRUE(refused(full.try_create(), field + "expected at most 4096"));
  }
}

TEST(CApiArguments, OlderStructsTakeDefaults) {
  // config up to top_k: the fields behind it are garbage of another struct.
  Layer layer;
  layer.config.struct_size = offsetof(fusedmoe_moe_config, activation);
  layer.config.activation = reinterpret_cast<const fusedmoe_activation_config*>(0x10);
  layer.config.dtype = 77;
  layer.config.clamp_limit = -3.0F;
  // options that end before max_threads, weights up to w2, tensors up to inputs.
  layer.options.struct_size = offsetof(fusedmoe_plan_options, mode);
  layer.options.mode = 55;
  layer.weights.struct_size = offsetof(fusedmoe_expert_weights, w13_up);
  layer.weights.w13_up = reinterpret_cast<const fusedmoe_weight_tensor*>(0x10);
  layer.w13.struct_size = offsetof(fusedmoe_weight_tensor, row_stride);
  layer.w13.row_stride = -9;
  layer.hidden.struct_size = offsetof(fusedmoe_const_matrix, row_stride);
  layer.hidden.row_stride = -9;
  const PlanPtr plan = make_plan(layer);
  ASSERT_NE(plan, nullptr) << fusedmoe_last_error();
  ASSERT_EQ(outcome(layer.apply(plan.get())), "");
  EXPECT_EQ(layer.output_data, layer.cpp_apply());
  layer.config.struct_size -= 8;  // without top_k
  fusedmoe_plan* none = nullptr;
  EXPECT_TRUE(refused(layer.create(&none), "config.struct_size: expected at least 40, got 32"));
}

TEST(CApiArguments, OptionsOfBeforeTheRunner) {
  static_assert(sizeof(void*) != 8 || offsetof(fusedmoe_plan_options, runner) == 72);
  Layer layer;
  layer.options.struct_size = offsetof(fusedmoe_plan_options, runner);
  layer.options.runner = reinterpret_cast<const fusedmoe_thread_runner*>(0x10);  // not ours
  layer.options.counters = 1;  // the last field that such a caller has
  const PlanPtr plan = make_plan(layer);
  ASSERT_NE(plan, nullptr) << fusedmoe_last_error();
  ASSERT_EQ(outcome(layer.apply(plan.get())), "");
  EXPECT_EQ(layer.output_data, layer.cpp_apply());
  std::uint64_t calls = 0;
  ASSERT_EQ(fusedmoe_plan_counters(plan.get(), &calls, nullptr, nullptr, 0), FUSEDMOE_OK);
  EXPECT_EQ(calls, 1U);
}

TEST(CApiArguments, NewerStructsNeedAZeroTail) {
  struct Newer {
    fusedmoe_moe_config config;
    std::int64_t unknown[3];
  };
  Layer layer;
  Newer newer{layer.config, {0, 0, 0}};
  newer.config.struct_size = sizeof newer;
  fusedmoe_plan* plan = nullptr;
  EXPECT_EQ(outcome(fusedmoe_plan_create(&newer.config, &layer.weights, nullptr, &plan)), "");
  fusedmoe_plan_destroy(plan);
  newer.unknown[2] = std::int64_t{1} << 56;
  EXPECT_TRUE(refused(fusedmoe_plan_create(&newer.config, &layer.weights, nullptr, &plan),
                      "config.struct_size: expected 72, or zero bytes behind that, got 96"));
  EXPECT_EQ(plan, nullptr);
  // A struct that is filled: no more than the caller has room for, and its tail stays.
  plan = make_plan(layer).release();
  newer.unknown[2] = 0;
  EXPECT_EQ(outcome(fusedmoe_plan_config(plan, &newer.config)), "");
  EXPECT_EQ(newer.config.struct_size, sizeof newer);
  fusedmoe_moe_config older;
  std::memset(&older, 0x5A, sizeof older);
  older.struct_size = offsetof(fusedmoe_moe_config, activation);
  EXPECT_EQ(outcome(fusedmoe_plan_config(plan, &older)), "");
  EXPECT_EQ(older.struct_size, offsetof(fusedmoe_moe_config, activation));
  EXPECT_EQ(older.top_k, Layer::kTopK);
  EXPECT_EQ(older.dtype, 0x5A5A5A5A);
  older.struct_size = 16;
  EXPECT_TRUE(refused(fusedmoe_plan_config(plan, &older), "config.struct_size: "));
  fusedmoe_plan_destroy(plan);
}

TEST(CApiArguments, ApplyRefusesByName) {
  Layer layer;
  const PlanPtr plan = make_plan(layer);
  ASSERT_NE(plan, nullptr) << fusedmoe_last_error();
  const auto apply = [&](const fusedmoe_matrix* output, const fusedmoe_const_matrix* hidden,
                         const fusedmoe_const_matrix* topk_weights,
                         const fusedmoe_const_matrix* topk_ids) {
    return fusedmoe_plan_apply(plan.get(), output, hidden, topk_weights, topk_ids, nullptr,
                               nullptr);
  };
  const Layer& l = layer;
  EXPECT_TRUE(refused(
      fusedmoe_plan_apply(nullptr, &l.output, &l.hidden, &l.topk_weights, &l.topk_ids, nullptr, {}),
      "plan: expected a pointer, got NULL"));
  EXPECT_TRUE(refused(apply(nullptr, &l.hidden, &l.topk_weights, &l.topk_ids), "output: "));
  EXPECT_TRUE(refused(apply(&l.output, nullptr, &l.topk_weights, &l.topk_ids), "hidden: "));
  EXPECT_TRUE(refused(apply(&l.output, &l.hidden, nullptr, &l.topk_ids), "topk_weights: "));
  EXPECT_TRUE(refused(apply(&l.output, &l.hidden, &l.topk_weights, nullptr), "topk_ids: "));

  const auto spoil = [&](auto fusedmoe_const_matrix::*field, auto value, const char* start) {
    const fusedmoe_const_matrix good = layer.topk_ids;
    layer.topk_ids.*field = value;
    EXPECT_TRUE(refused(layer.apply(plan.get()), start));
    layer.topk_ids = good;
  };
  spoil(&fusedmoe_const_matrix::struct_size, std::size_t{8}, "topk_ids.struct_size: ");
  spoil(&fusedmoe_const_matrix::dtype, 9, "topk_ids.dtype: expected 0..8, got 9");
  spoil(&fusedmoe_const_matrix::reserved, 1, "topk_ids.reserved: ");
  spoil(&fusedmoe_const_matrix::dtype, FUSEDMOE_DTYPE_I16 + 0, "topk_ids: ");
  spoil(&fusedmoe_const_matrix::columns, std::int64_t{3}, "topk_ids: ");
  spoil(&fusedmoe_const_matrix::row_stride, std::int64_t{1}, "topk_ids");
  spoil(&fusedmoe_const_matrix::data, static_cast<const void*>(nullptr), "topk_ids");
  layer.topk_ids_data[3] = 4;
  EXPECT_TRUE(refused(layer.apply(plan.get()), "topk_ids"));
  EXPECT_EQ(layer.output_data, std::vector<std::uint16_t>(layer.output_data.size(), 0xFFFF));
  layer.topk_ids_data[3] = 0;

  fusedmoe_workspace workspace;
  fusedmoe_workspace_init(&workspace);
  workspace.struct_size = 16;
  EXPECT_TRUE(refused(layer.apply(plan.get(), &workspace), "workspace.struct_size: "));
  fusedmoe_workspace_init(&workspace);
  workspace.workspace2_bytes = 64;
  EXPECT_TRUE(refused(layer.apply(plan.get(), &workspace), "workspace.workspace2: "));
  workspace.workspace2_bytes = -1;
  EXPECT_TRUE(refused(layer.apply(plan.get(), &workspace), "workspace.workspace2_bytes: "));
  workspace.workspace2_bytes = 0;
  workspace.workspace13_bytes = 64;
  EXPECT_TRUE(refused(layer.apply(plan.get(), &workspace), "workspace.workspace13: "));

  fusedmoe_thread_runner runner;
  fusedmoe_thread_runner_init(&runner);
  fusedmoe_apply_context context;
  fusedmoe_apply_context_init(&context);
  context.runner = &runner;
  EXPECT_TRUE(refused(layer.apply(plan.get(), nullptr, &context), "context.runner.run: "));
  runner.run = [](void*, int count, void (*body)(void*, int), void* argument) {
    for (int i = 0; i < count; ++i) body(argument, i);
  };
  runner.num_threads = 0;
  EXPECT_TRUE(refused(layer.apply(plan.get(), nullptr, &context), "context.runner.num_threads: "));
  runner.num_threads = 1;
  runner.gang = 2;
  EXPECT_TRUE(refused(layer.apply(plan.get(), nullptr, &context), "context.runner.gang: "));
  runner.struct_size = 0;
  EXPECT_TRUE(refused(layer.apply(plan.get(), nullptr, &context), "context.runner.struct_size: "));
  context.runner = nullptr;
  context.expert_map_size = 4;
  EXPECT_TRUE(refused(layer.apply(plan.get(), nullptr, &context), "context.expert_map: "));
  context.struct_size = 1;
  EXPECT_TRUE(refused(layer.apply(plan.get(), nullptr, &context), "context.struct_size: "));
  EXPECT_EQ(outcome(layer.apply(plan.get())), "");
}

TEST(CApiArguments, NullOfEveryFunction) {
  const Layer layer;
  const PlanPtr owner = make_plan(layer);
  fusedmoe_plan* plan = owner.get();
  ASSERT_NE(plan, nullptr) << fusedmoe_last_error();
  std::int64_t number = 0;
  std::int32_t flag = 0;
  std::uint64_t version = 0;
  std::size_t needed = 0;
  std::array<char, 8> text{};
  fusedmoe_plan* none = nullptr;
  fusedmoe_device device;
  fusedmoe_device_init(&device);
  fusedmoe_workspace view;
  fusedmoe_workspace_init(&view);

  EXPECT_TRUE(refused(fusedmoe_plan_create(nullptr, &layer.weights, nullptr, &none), "config: "));
  EXPECT_TRUE(refused(fusedmoe_plan_create(&layer.config, nullptr, nullptr, &none), "weights: "));
  EXPECT_TRUE(refused(layer.create(nullptr), "plan: "));
  EXPECT_TRUE(
      refused(fusedmoe_supports(nullptr, nullptr, nullptr, nullptr, {}, 0, {}), "supported: "));
  EXPECT_EQ(fusedmoe_supports(nullptr, nullptr, nullptr, &flag, text.data(), text.size(), &needed),
            FUSEDMOE_OK);
  EXPECT_EQ(flag, 0);
  EXPECT_STREQ(text.data(), "config:");
  EXPECT_TRUE(
      refused(fusedmoe_supports(&layer.config, &layer.weights, nullptr, &flag, nullptr, 5, nullptr),
              "reason: "));
  EXPECT_TRUE(refused(
      fusedmoe_packed_weights_size(&layer.config, &layer.weights, nullptr, nullptr, nullptr),
      "bytes: "));
  EXPECT_TRUE(refused(fusedmoe_plan_workspace_size(nullptr, 1, &number, nullptr), "plan: "));
  EXPECT_TRUE(refused(fusedmoe_plan_workspace_size(plan, 1, nullptr, nullptr), "bytes: "));
  EXPECT_TRUE(refused(fusedmoe_plan_workspace_size(plan, -1, &number, nullptr), "num_tokens: "));
  EXPECT_TRUE(refused(fusedmoe_plan_workspace_formula(plan, nullptr, &number, nullptr), "fixed: "));
  EXPECT_TRUE(
      refused(fusedmoe_plan_workspace_formula(plan, &number, nullptr, nullptr), "per_token: "));
  EXPECT_TRUE(refused(fusedmoe_plan_min_workspace_size(plan, nullptr, nullptr), "bytes: "));
  EXPECT_TRUE(refused(fusedmoe_plan_workspace_sizes_13_2(plan, 1, nullptr, &number, nullptr),
                      "workspace13_bytes: "));
  EXPECT_TRUE(refused(fusedmoe_plan_workspace_sizes_13_2(plan, 1, &number, nullptr, nullptr),
                      "workspace2_bytes: "));
  EXPECT_TRUE(refused(fusedmoe_plan_refresh(nullptr, &layer.weights, 0), "plan: "));
  EXPECT_TRUE(refused(fusedmoe_plan_refresh(plan, nullptr, 0), "weights: "));
  EXPECT_TRUE(refused(fusedmoe_plan_refresh(plan, &layer.weights, 2), "wait: expected 0..1"));
  EXPECT_TRUE(refused(fusedmoe_plan_refresh_experts(plan, nullptr, 1, &layer.weights, 0),
                      "local_experts: "));
  EXPECT_TRUE(
      refused(fusedmoe_plan_refresh_experts(plan, nullptr, -1, &layer.weights, 0), "count: "));
  EXPECT_TRUE(refused(fusedmoe_plan_release_weights(nullptr, 0), "plan: "));
  EXPECT_TRUE(refused(fusedmoe_plan_release_weights(plan, -1), "wait: expected 0..1, got -1"));
  EXPECT_TRUE(refused(fusedmoe_plan_weights_version(nullptr, &version), "plan: "));
  EXPECT_TRUE(refused(fusedmoe_plan_weights_version(plan, nullptr), "version: "));
  EXPECT_TRUE(refused(fusedmoe_plan_describe(nullptr, text.data(), 8, nullptr), "plan: "));
  EXPECT_TRUE(refused(fusedmoe_plan_describe(plan, nullptr, 8, nullptr), "text: "));
  EXPECT_TRUE(refused(fusedmoe_plan_counters(plan, {}, {}, nullptr, 1), "rows_per_expert: "));
  EXPECT_TRUE(refused(fusedmoe_plan_counters(plan, {}, {}, nullptr, -1), "capacity: "));
  EXPECT_TRUE(refused(fusedmoe_plan_counters(nullptr, {}, {}, nullptr, 0), "plan: "));
  EXPECT_TRUE(refused(fusedmoe_plan_reset_counters(nullptr), "plan: "));
  EXPECT_TRUE(refused(fusedmoe_plan_check_faults(nullptr), "plan: "));
  EXPECT_TRUE(refused(fusedmoe_plan_config(plan, nullptr), "config: "));
  EXPECT_TRUE(refused(fusedmoe_plan_device(plan, nullptr), "device: "));
  EXPECT_TRUE(refused(fusedmoe_plan_num_local_experts(plan, nullptr), "count: "));
  EXPECT_TRUE(refused(fusedmoe_plan_weight_bytes(plan, nullptr), "bytes: "));
  EXPECT_TRUE(refused(fusedmoe_plan_num_threads(plan, nullptr), "count: "));

  EXPECT_TRUE(refused(fusedmoe_num_devices(nullptr), "count: "));
  EXPECT_TRUE(refused(fusedmoe_device_info(0, nullptr, {}, 0, {}, {}, 0, {}), "available: "));
  EXPECT_TRUE(refused(fusedmoe_device_info(-1, &flag, {}, 0, {}, {}, 0, {}), "index: "));
  EXPECT_TRUE(refused(fusedmoe_device_info(99, &flag, {}, 0, {}, {}, 0, {}), "index: "));
  EXPECT_TRUE(refused(fusedmoe_device_to_text(nullptr, text.data(), 8, nullptr), "device: "));
  EXPECT_TRUE(refused(fusedmoe_device_parse(nullptr, &device, nullptr, 0), "text: "));
  EXPECT_TRUE(refused(fusedmoe_device_parse("cpu", nullptr, nullptr, 0), "device: "));
  EXPECT_TRUE(refused(fusedmoe_expert_map_resolve(nullptr, 4, &flag), "map: "));
  fusedmoe_expert_map map;
  fusedmoe_expert_map_init(&map);
  EXPECT_TRUE(refused(fusedmoe_expert_map_resolve(&map, 4, nullptr), "table: "));
  EXPECT_TRUE(refused(fusedmoe_version_bump(nullptr), "counter: "));
  EXPECT_TRUE(refused(fusedmoe_version_bump(reinterpret_cast<std::uint64_t*>(0x1004)),
                      "counter: expected an 8-byte aligned counter"));

  fusedmoe_workspace_buffer* buffer = nullptr;
  EXPECT_TRUE(refused(fusedmoe_workspace_buffer_create(nullptr, 0, 1, nullptr), "buffer: "));
  EXPECT_TRUE(refused(fusedmoe_workspace_buffer_create(nullptr, -1, 1, &buffer), "size: "));
  EXPECT_TRUE(refused(fusedmoe_workspace_buffer_create(nullptr, 1, 3, &buffer), "size: "));
  EXPECT_EQ(buffer, nullptr);
  EXPECT_TRUE(refused(fusedmoe_workspace_buffer_reserve(nullptr, 1, 1), "buffer: "));
  EXPECT_TRUE(refused(fusedmoe_workspace_buffer_lock(nullptr), "buffer: "));
  EXPECT_TRUE(refused(fusedmoe_workspace_buffer_locked(nullptr, &flag), "buffer: "));
  EXPECT_TRUE(refused(fusedmoe_workspace_buffer_view(nullptr, &view), "buffer: "));
  EXPECT_TRUE(refused(fusedmoe_workspace_buffer_device(nullptr, &device), "buffer: "));
  ASSERT_EQ(outcome(fusedmoe_workspace_buffer_create(nullptr, 64, 64, &buffer)), "");
  EXPECT_TRUE(refused(fusedmoe_workspace_buffer_locked(buffer, nullptr), "locked: "));
  EXPECT_TRUE(refused(fusedmoe_workspace_buffer_view(buffer, nullptr), "workspace: "));
  view.struct_size = 8;
  EXPECT_TRUE(refused(fusedmoe_workspace_buffer_view(buffer, &view), "workspace.struct_size: "));
  fusedmoe_workspace_buffer_destroy(buffer);

  fusedmoe_workspace_pool* pool = nullptr;
  EXPECT_TRUE(refused(fusedmoe_workspace_pool_create(nullptr, 1, nullptr), "pool: "));
  EXPECT_TRUE(refused(fusedmoe_workspace_pool_create(nullptr, 0, &pool), "num_lanes: "));
  EXPECT_EQ(pool, nullptr);
  EXPECT_TRUE(refused(fusedmoe_workspace_pool_register_plan(nullptr, plan, 1), "pool: "));
  EXPECT_TRUE(refused(fusedmoe_workspace_pool_lock(nullptr), "pool: "));
  EXPECT_TRUE(refused(fusedmoe_workspace_pool_lane(nullptr, 0, &view), "pool: "));
  EXPECT_TRUE(refused(fusedmoe_workspace_pool_num_lanes(nullptr, &flag), "pool: "));
  EXPECT_TRUE(refused(fusedmoe_workspace_pool_bytes_per_lane(nullptr, &number), "pool: "));
  ASSERT_EQ(outcome(fusedmoe_workspace_pool_create(nullptr, 1, &pool)), "");
  EXPECT_TRUE(refused(fusedmoe_workspace_pool_register_plan(pool, nullptr, 1), "plan: "));
  EXPECT_TRUE(refused(fusedmoe_workspace_pool_lane(pool, 0, nullptr), "workspace: "));
  EXPECT_TRUE(refused(fusedmoe_workspace_pool_num_lanes(pool, nullptr), "num_lanes: "));
  EXPECT_TRUE(refused(fusedmoe_workspace_pool_bytes_per_lane(pool, nullptr), "bytes: "));
  fusedmoe_workspace_pool_destroy(pool);

  // Destroying nothing is fine.
  fusedmoe_plan_destroy(nullptr);
  fusedmoe_workspace_buffer_destroy(nullptr);
  fusedmoe_workspace_pool_destroy(nullptr);
}

TEST(CApiArguments, RoutingRefusesByName) {
  const std::vector<float> logits_data(8, 0.5F);
  std::vector<float> weights_data(4);
  std::vector<std::int32_t> ids_data(4);
  const fusedmoe_const_matrix logits =
      fusedmoe_const_matrix_of(logits_data.data(), FUSEDMOE_DTYPE_F32, 2, 4);
  const fusedmoe_matrix weights = fusedmoe_matrix_of(weights_data.data(), FUSEDMOE_DTYPE_F32, 2, 2);
  const fusedmoe_matrix ids = fusedmoe_matrix_of(ids_data.data(), FUSEDMOE_DTYPE_I32, 2, 2);
  fusedmoe_routing_config config;
  const auto reset = [&] {
    fusedmoe_routing_config_init(&config);
    config.top_k = 2;
  };
  const auto softmax = [&] { return fusedmoe_topk_softmax(&config, &logits, &weights, &ids); };
  reset();
  EXPECT_EQ(outcome(softmax()), "");
  EXPECT_TRUE(refused(fusedmoe_topk_softmax(nullptr, &logits, &weights, &ids), "config: "));
  EXPECT_TRUE(refused(fusedmoe_topk_softmax(&config, nullptr, &weights, &ids), "logits: "));
  EXPECT_TRUE(refused(fusedmoe_topk_softmax(&config, &logits, nullptr, &ids), "topk_weights: "));
  EXPECT_TRUE(refused(fusedmoe_topk_softmax(&config, &logits, &weights, nullptr), "topk_ids: "));
  config.struct_size = 8;
  EXPECT_TRUE(refused(softmax(), "config.struct_size: expected at least 16, got 8"));
  reset();
  config.score_function = 4;
  EXPECT_TRUE(refused(softmax(), "config.score_function: expected 0..3, got 4"));
  reset();
  config.renormalise = 4;
  EXPECT_TRUE(refused(softmax(), "config.renormalise: expected 0..3, got 4"));
  reset();
  config.group_score = 2;
  EXPECT_TRUE(refused(softmax(), "config.group_score: expected 0..1, got 2"));
  reset();
  config.reserved = 1;
  EXPECT_TRUE(refused(softmax(), "config.reserved: "));
  reset();
  fusedmoe_const_matrix bias =
      fusedmoe_const_matrix_of(logits_data.data(), FUSEDMOE_DTYPE_F32, 1, 4);
  bias.dtype = 12;
  config.selection_bias = &bias;
  EXPECT_TRUE(refused(softmax(), "config.selection_bias.dtype: expected 0..8, got 12"));
  reset();  // route needs a score function
  EXPECT_EQ(fusedmoe_route(&config, &logits, &weights, &ids), FUSEDMOE_ERROR_INVALID_ARGUMENT);
}

TEST(CApiArguments, ErrorTextIsPerThreadAndBounded) {
  EXPECT_TRUE(refused(fusedmoe_num_devices(nullptr), "count: "));
  std::string elsewhere = "not run";
  std::thread([&] {
    elsewhere = fusedmoe_last_error();
    (void)fusedmoe_plan_check_faults(nullptr);
    elsewhere += "|" + std::string(fusedmoe_last_error()).substr(0, 5);
  }).join();
  EXPECT_EQ(elsewhere, "|plan:");
  EXPECT_TRUE(std::string(fusedmoe_last_error()).starts_with("count: "));
  // A call that succeeds leaves the text.
  std::int64_t count = 0;
  EXPECT_EQ(fusedmoe_num_devices(&count), FUSEDMOE_OK);
  EXPECT_TRUE(std::string(fusedmoe_last_error()).starts_with("count: "));

  fusedmoe_device device;
  fusedmoe_device_init(&device);
  const std::string endless(5000, 'x');
  EXPECT_TRUE(refused(fusedmoe_device_parse(endless.c_str(), &device, nullptr, 0), "device: "));
  EXPECT_EQ(std::string(fusedmoe_last_error()).size(), 1023U);
}

TEST(CApiArguments, NamesOutsideTheEnums) {
  EXPECT_STREQ(fusedmoe_status_name(0), "ok");
  EXPECT_STREQ(fusedmoe_status_name(9), "internal");
  for (const std::int32_t value : {-1, 99, 256, std::numeric_limits<std::int32_t>::min()}) {
    EXPECT_STREQ(fusedmoe_status_name(value), "unknown");
    EXPECT_STREQ(fusedmoe_dtype_name(value), "unknown");
    EXPECT_STREQ(fusedmoe_activation_name(value), "unknown");
    EXPECT_STREQ(fusedmoe_gate_up_layout_name(value), "unknown");
    EXPECT_STREQ(fusedmoe_gate_up_order_name(value), "unknown");
    EXPECT_STREQ(fusedmoe_weight_format_name(value), "unknown");
    EXPECT_STREQ(fusedmoe_weight_layout_name(value), "unknown");
    EXPECT_STREQ(fusedmoe_score_function_name(value), "unknown");
    EXPECT_STREQ(fusedmoe_renormalise_name(value), "unknown");
    EXPECT_STREQ(fusedmoe_group_score_name(value), "unknown");
    EXPECT_EQ(fusedmoe_dtype_bytes(value), 0);
    EXPECT_EQ(fusedmoe_activation_is_gated(value), 0);
  }
}

}  // namespace
}  // namespace fusedmoe::c_api_test
