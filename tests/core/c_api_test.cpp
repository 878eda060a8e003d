// What the C ABI does: the same as the C++ API, bit for bit; callbacks, versions, workspaces. What
// it refuses is in c_api_arguments_test.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "c_api_layer.h"
#include "fusedmoe/fusedmoe_c.h"

namespace fusedmoe::c_api_test {
namespace {

// Scratch on a 64-byte boundary.
class Scratch {
 public:
  explicit Scratch(std::int64_t bytes) : memory_(static_cast<std::size_t>(bytes) + 64, 0xFF) {}
  void* data() {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    return memory_.data() + (64 - address % 64) % 64;
  }

 private:
  std::vector<unsigned char> memory_;
};

TEST(CApi, NamesAndSizesAreThoseOfCpp) {
  EXPECT_STREQ(fusedmoe_version(), version());
  for (std::int32_t i = 0; i <= FUSEDMOE_DTYPE_U8; ++i) {
    EXPECT_STREQ(fusedmoe_dtype_name(i), to_string(static_cast<DType>(i)));
    EXPECT_EQ(fusedmoe_dtype_bytes(i), bytes_per_element(static_cast<DType>(i)));
  }
  for (std::int32_t i = 0; i <= FUSEDMOE_ACTIVATION_RELU2; ++i) {
    EXPECT_STREQ(fusedmoe_activation_name(i), to_string(static_cast<Activation>(i)));
    EXPECT_EQ(fusedmoe_activation_is_gated(i) == 1, is_gated(static_cast<Activation>(i)));
  }
  for (std::int32_t i = 0; i <= FUSEDMOE_FORMAT_Q6_K; ++i) {
    EXPECT_STREQ(fusedmoe_weight_format_name(i), to_string(static_cast<WeightFormat>(i)));
  }
  for (std::int32_t i = 1; i <= FUSEDMOE_ERROR_INTERNAL; ++i) {
    EXPECT_STREQ(fusedmoe_status_name(i), to_string(static_cast<ErrorCode>(i)));
  }
  EXPECT_STREQ(fusedmoe_gate_up_layout_name(FUSEDMOE_GATE_UP_INTERLEAVED), "interleaved");
  EXPECT_STREQ(fusedmoe_gate_up_order_name(FUSEDMOE_GATE_UP_UP_FIRST), "up_gate");
  EXPECT_STREQ(fusedmoe_weight_layout_name(FUSEDMOE_WEIGHT_LAYOUT_KN), to_string(WeightLayout::kn));
  EXPECT_STREQ(fusedmoe_score_function_name(FUSEDMOE_SCORE_SIGMOID),
               to_string(ScoreFunction::sigmoid));
  EXPECT_STREQ(fusedmoe_renormalise_name(FUSEDMOE_RENORMALISE_SUM), to_string(Renormalise::sum));
  EXPECT_STREQ(fusedmoe_group_score_name(FUSEDMOE_GROUP_SCORE_BEST), to_string(GroupScore::best));
}

TEST(CApi, DefaultsAreThoseOfCpp) {
  fusedmoe_activation_config activation;
  fusedmoe_activation_config_init(&activation);
  EXPECT_EQ(activation.alpha, ActivationConfig().alpha);
  EXPECT_EQ(activation.limit, ActivationConfig().limit);
  EXPECT_EQ(activation.kind, static_cast<std::int32_t>(ActivationConfig().kind));
  fusedmoe_routing_config routing;
  fusedmoe_routing_config_init(&routing);
  EXPECT_EQ(routing.epsilon, RoutingConfig().epsilon);
  EXPECT_EQ(routing.scaling_factor, RoutingConfig().scaling_factor);
  EXPECT_EQ(routing.num_groups, RoutingConfig().num_groups);
  EXPECT_EQ(routing.topk_group, RoutingConfig().topk_group);
  fusedmoe_weight_tensor tensor;
  fusedmoe_weight_tensor_init(&tensor);
  EXPECT_EQ(tensor.format, static_cast<std::int32_t>(WeightTensor().format));
  fusedmoe_moe_config config;
  fusedmoe_moe_config_init(&config);
  EXPECT_EQ(config.dtype, static_cast<std::int32_t>(MoeConfig().dtype));
}

TEST(CApi, ApplyEqualsCppWithEveryKindOfWorkspace) {
  Layer layer;
  const std::vector<std::uint16_t> expected = layer.cpp_apply();
  const PlanPtr plan = make_plan(layer);
  ASSERT_NE(plan, nullptr) << fusedmoe_last_error();
  const FusedMoe cpp = layer.cpp_plan();

  ASSERT_EQ(outcome(layer.apply(plan.get())), "");  // none
  EXPECT_EQ(layer.output_data, expected);

  std::int64_t bytes = 0;
  std::int64_t alignment = 0;
  ASSERT_EQ(fusedmoe_plan_workspace_size(plan.get(), Layer::kTokens, &bytes, &alignment), 0);
  EXPECT_EQ(bytes, cpp.workspace_size(Layer::kTokens).bytes);
  EXPECT_EQ(alignment, cpp.workspace_size(Layer::kTokens).alignment);
  fusedmoe_workspace workspace;
  fusedmoe_workspace_init(&workspace);
  Scratch one(bytes);
  workspace.workspace2 = one.data();
  workspace.workspace2_bytes = bytes;
  ASSERT_EQ(outcome(layer.apply(plan.get(), &workspace)), "");
  EXPECT_EQ(layer.output_data, expected);

  std::int64_t bytes13 = 0;
  std::int64_t bytes2 = 0;
  ASSERT_EQ(
      fusedmoe_plan_workspace_sizes_13_2(plan.get(), Layer::kTokens, &bytes13, &bytes2, &alignment),
      0);
  EXPECT_EQ(bytes13, cpp.workspace_sizes_13_2(Layer::kTokens).workspace13.bytes);
  EXPECT_EQ(bytes2, cpp.workspace_sizes_13_2(Layer::kTokens).workspace2.bytes);
  Scratch first(bytes13);
  Scratch second(bytes2);
  workspace.workspace13 = first.data();
  workspace.workspace13_bytes = bytes13;
  workspace.workspace2 = second.data();
  workspace.workspace2_bytes = bytes2;
  ASSERT_EQ(outcome(layer.apply(plan.get(), &workspace)), "");
  EXPECT_EQ(layer.output_data, expected);

  std::int64_t fixed = 0;
  std::int64_t per_token = 0;
  ASSERT_EQ(fusedmoe_plan_workspace_formula(plan.get(), &fixed, &per_token, &alignment), 0);
  EXPECT_EQ(fixed + per_token * Layer::kTokens, bytes);
  ASSERT_EQ(fusedmoe_plan_min_workspace_size(plan.get(), &bytes, nullptr), 0);
  EXPECT_EQ(bytes, cpp.min_workspace_size().bytes);
  Scratch least(bytes);
  fusedmoe_workspace_init(&workspace);
  workspace.workspace2 = least.data();
  workspace.workspace2_bytes = bytes;
  ASSERT_EQ(outcome(layer.apply(plan.get(), &workspace)), "");
  EXPECT_EQ(layer.output_data, expected);
  workspace.workspace2_bytes = bytes - 1;
  EXPECT_EQ(layer.apply(plan.get(), &workspace), FUSEDMOE_ERROR_WORKSPACE_TOO_SMALL);
  EXPECT_EQ(layer.output_data, std::vector<std::uint16_t>(expected.size(), 0xFFFF));
}

TEST(CApi, StridedRowsInPlaceAndNoTokens) {
  Layer layer;
  const std::vector<std::uint16_t> expected = layer.cpp_apply();
  const PlanPtr plan = make_plan(layer);
  ASSERT_NE(plan, nullptr) << fusedmoe_last_error();
  constexpr std::int64_t kStride = Layer::kHidden + 3;
  std::vector<std::uint16_t> rows(Layer::kTokens * kStride, 0x7FC0);
  for (std::int64_t t = 0; t < Layer::kTokens; ++t) {
    std::copy_n(&layer.hidden_data[t * Layer::kHidden], Layer::kHidden, &rows[t * kStride]);
  }
  layer.output.data = rows.data();
  layer.output.row_stride = kStride;
  layer.hidden.data = rows.data();
  layer.hidden.row_stride = kStride;
  ASSERT_EQ(outcome(layer.apply(plan.get())), "");
  for (std::int64_t t = 0; t < Layer::kTokens; ++t) {
    EXPECT_TRUE(std::equal(&rows[t * kStride], &rows[t * kStride] + Layer::kHidden,
                           &expected[t * Layer::kHidden]));
    EXPECT_EQ(rows[t * kStride + Layer::kHidden], 0x7FC0);
  }
  layer.output = fusedmoe_matrix_of(nullptr, FUSEDMOE_DTYPE_BF16, 0, Layer::kHidden);
  layer.hidden = fusedmoe_const_matrix_of(nullptr, FUSEDMOE_DTYPE_BF16, 0, Layer::kHidden);
  layer.topk_weights = fusedmoe_const_matrix_of(nullptr, FUSEDMOE_DTYPE_F32, 0, Layer::kTopK);
  layer.topk_ids = fusedmoe_const_matrix_of(nullptr, FUSEDMOE_DTYPE_I32, 0, Layer::kTopK);
  EXPECT_EQ(outcome(layer.apply(plan.get())), "");
}

TEST(CApi, ExpertMapsOfPlanAndCall) {
  Layer layer;
  fusedmoe_expert_map map;
  fusedmoe_expert_map_init(&map);
  map.kind = FUSEDMOE_EXPERT_MAP_LINEAR;
  map.rank = 1;
  map.size = 2;
  std::array<std::int32_t, 4> table{};
  ASSERT_EQ(fusedmoe_expert_map_resolve(&map, 4, table.data()), FUSEDMOE_OK);
  EXPECT_EQ(table, (std::array<std::int32_t, 4>{-1, -1, 0, 1}));
  map.kind = FUSEDMOE_EXPERT_MAP_ROUND_ROBIN;
  ASSERT_EQ(fusedmoe_expert_map_resolve(&map, 4, table.data()), FUSEDMOE_OK);
  EXPECT_EQ(table, (std::array<std::int32_t, 4>{-1, 0, -1, 1}));
  map.rank = 2;
  EXPECT_EQ(fusedmoe_expert_map_resolve(&map, 4, table.data()), FUSEDMOE_ERROR_INVALID_ARGUMENT);

  // Global experts 3 and 0, in the order of local ids; a call may swap them.
  const std::array<std::int32_t, 4> explicit_map = {1, -1, -1, 0};
  fusedmoe_expert_map_init(&map);
  map.kind = FUSEDMOE_EXPERT_MAP_EXPLICIT;
  map.map = explicit_map.data();
  map.map_size = 4;
  layer.options.expert_map = &map;
  layer.w13.experts = 2;
  layer.w2.experts = 2;
  const PlanPtr plan = make_plan(layer);
  ASSERT_NE(plan, nullptr) << fusedmoe_last_error();
  std::int64_t local = 0;
  ASSERT_EQ(fusedmoe_plan_num_local_experts(plan.get(), &local), FUSEDMOE_OK);
  EXPECT_EQ(local, 2);
  ASSERT_EQ(outcome(layer.apply(plan.get())), "");
  const std::vector<std::uint16_t> own = layer.output_data;
  const std::array<std::int32_t, 4> swapped = {0, -1, -1, 1};
  fusedmoe_apply_context context;
  fusedmoe_apply_context_init(&context);
  context.expert_map = swapped.data();
  context.expert_map_size = 4;
  ASSERT_EQ(outcome(layer.apply(plan.get(), nullptr, &context)), "");
  EXPECT_NE(layer.output_data, own);
  context.expert_map = explicit_map.data();
  ASSERT_EQ(outcome(layer.apply(plan.get(), nullptr, &context)), "");
  EXPECT_EQ(layer.output_data, own);
}

// What a source callback serves, and how it misbehaves at local expert 2.
struct Server {
  const Layer* layer = nullptr;
  enum { good, fails, mute, bad_status, throws, nested, newer } mode = good;
  std::vector<std::int64_t> asked = {};
  fusedmoe_weight_tensor w13 = {};
  fusedmoe_weight_tensor w2 = {};

  static fusedmoe_status serve(void* self, std::int64_t expert, fusedmoe_expert_weights* out,
                               char* message, std::size_t message_bytes) {
    auto& server = *static_cast<Server*>(self);
    const Layer& layer = *server.layer;
    server.asked.push_back(expert);
    server.w13 = layer.w13;
    server.w13.experts = 1;
    server.w13.data = &layer.w13_data[expert * 2 * Layer::kIntermediate * Layer::kHidden];
    server.w2 = layer.w2;
    server.w2.experts = 1;
    server.w2.data = &layer.w2_data[expert * Layer::kHidden * Layer::kIntermediate];
    out->w13 = &server.w13;
    out->w2 = &server.w2;
    if (expert != 2) return FUSEDMOE_OK;
    switch (server.mode) {
      case fails:
        std::strncpy(message, "shard 7 is gone", message_bytes);
        return FUSEDMOE_ERROR_IO;
      case mute:
        return FUSEDMOE_ERROR_OUT_OF_MEMORY;
      case bad_status:
        std::memset(message, 'x', message_bytes);  // no NUL byte either
        return 42;
      case throws:
        throw std::runtime_error("thrown by the user");
      case nested:
        out->source = &serve;
        break;
      case newer:
        out->struct_size += 8;
        std::memset(reinterpret_cast<char*>(out) + sizeof *out, 1, 8);
        break;
      case good:
        break;
    }
    return FUSEDMOE_OK;
  }
};

TEST(CApi, SourceCallback) {
  Layer layer;
  const std::vector<std::uint16_t> expected = layer.cpp_apply();
  Server server{&layer};
  fusedmoe_weight_tensor w13 = layer.w13;
  fusedmoe_weight_tensor w2 = layer.w2;
  w13.data = nullptr;
  w2.data = nullptr;
  fusedmoe_expert_weights weights = layer.weights;
  weights.w13 = &w13;
  weights.w2 = &w2;
  weights.source = &Server::serve;
  weights.self = &server;
  const auto create = [&](fusedmoe_plan** plan) {
    server.asked.clear();
    return fusedmoe_plan_create(&layer.config, &weights, &layer.options, plan);
  };
  fusedmoe_plan* plan = nullptr;
  ASSERT_EQ(outcome(create(&plan)), "");
  EXPECT_EQ(server.asked, (std::vector<std::int64_t>{0, 1, 2, 3}));
  ASSERT_EQ(outcome(layer.apply(plan)), "");
  EXPECT_EQ(layer.output_data, expected);
  fusedmoe_plan_destroy(plan);

  // An older caller, whose weights end behind self: version is then not its own.
  weights.struct_size = offsetof(fusedmoe_expert_weights, version);
  ASSERT_EQ(outcome(create(&plan)), "");
  fusedmoe_plan_destroy(plan);
  weights.struct_size = sizeof weights;

  const auto fails = [&](decltype(server.mode) mode) {
    server.mode = mode;
    const std::string text = outcome(create(&plan));
    EXPECT_EQ(plan, nullptr);
    return text;
  };
  EXPECT_EQ(fails(Server::fails), "io: weights.source: local expert 2: shard 7 is gone");
  EXPECT_EQ(fails(Server::mute),
            "out_of_memory: weights.source: local expert 2: failed without a message");
  EXPECT_TRUE(fails(Server::bad_status)
                  .starts_with("invalid_argument: weights.source: local expert 2: expected a "
                               "status in 0..9, got 42"));
  EXPECT_EQ(fails(Server::throws),
            "internal: weights.source: local expert 2: the callback threw 'thrown by the user'; "
            "let it return a status instead");
  EXPECT_TRUE(fails(Server::nested).starts_with("invalid_argument: weights.source.source: "));
  EXPECT_TRUE(fails(Server::newer).starts_with("invalid_argument: weights.source.struct_size: "));

  // A refresh that fails midway leaves the plan stale until one succeeds.
  server.mode = Server::good;
  ASSERT_EQ(outcome(create(&plan)), "");
  server.mode = Server::fails;
  EXPECT_EQ(fusedmoe_plan_refresh(plan, &weights, FUSEDMOE_REFRESH_WAIT), FUSEDMOE_ERROR_IO);
  EXPECT_EQ(layer.apply(plan), FUSEDMOE_ERROR_STALE_WEIGHTS);
  server.mode = Server::good;
  EXPECT_EQ(outcome(fusedmoe_plan_refresh(plan, &weights, FUSEDMOE_REFRESH_WAIT)), "");
  ASSERT_EQ(outcome(layer.apply(plan)), "");
  EXPECT_EQ(layer.output_data, expected);
  fusedmoe_plan_destroy(plan);
}

TEST(CApi, VersionCounterAndStaleWeights) {
  Layer layer;
  alignas(8) std::uint64_t counter = 5;
  layer.weights.version = &counter;
  const PlanPtr plan = make_plan(layer);
  layer.options.on_stale = FUSEDMOE_STALE_REFRESH;
  const PlanPtr automatic = make_plan(layer);
  ASSERT_TRUE(plan && automatic) << fusedmoe_last_error();
  EXPECT_EQ(outcome(layer.apply(plan.get())), "");

  for (auto& weight : layer.w2_data) weight ^= 0x8000;  // every output changes its sign
  ASSERT_EQ(fusedmoe_version_bump(&counter), FUSEDMOE_OK);
  EXPECT_EQ(counter, 6U);
  const std::vector<std::uint16_t> expected = layer.cpp_apply();
  EXPECT_EQ(layer.apply(plan.get()), FUSEDMOE_ERROR_STALE_WEIGHTS);
  ASSERT_EQ(outcome(layer.apply(automatic.get())), "");
  EXPECT_EQ(layer.output_data, expected);

  std::uint64_t version = 0;
  ASSERT_EQ(fusedmoe_plan_weights_version(plan.get(), &version), FUSEDMOE_OK);
  EXPECT_EQ(version, 1U);
  ASSERT_EQ(outcome(fusedmoe_plan_refresh(plan.get(), &layer.weights, FUSEDMOE_REFRESH_WAIT)), "");
  ASSERT_EQ(fusedmoe_plan_weights_version(plan.get(), &version), FUSEDMOE_OK);
  EXPECT_EQ(version, 2U);
  ASSERT_EQ(outcome(layer.apply(plan.get())), "");
  EXPECT_EQ(layer.output_data, expected);
}

TEST(CApi, RefreshOfSomeExpertsAndRelease) {
  Layer layer;
  const PlanPtr plan = make_plan(layer);
  ASSERT_NE(plan, nullptr) << fusedmoe_last_error();
  // New weights for experts 3 and 1, given in that order.
  const Layer other(2);
  const std::array<std::int64_t, 2> experts = {3, 1};
  constexpr std::int64_t kW13 = 2 * Layer::kIntermediate * Layer::kHidden;
  constexpr std::int64_t kW2 = Layer::kHidden * Layer::kIntermediate;
  fusedmoe_weight_tensor w13 = layer.w13;
  fusedmoe_weight_tensor w2 = layer.w2;
  w13.experts = w2.experts = 2;
  w13.data = other.w13_data.data();
  w2.data = other.w2_data.data();
  fusedmoe_expert_weights weights = layer.weights;
  weights.w13 = &w13;
  weights.w2 = &w2;
  ASSERT_EQ(outcome(fusedmoe_plan_refresh_experts(plan.get(), experts.data(), 2, &weights,
                                                  FUSEDMOE_REFRESH_NO_WAIT)),
            "");
  for (std::size_t i = 0; i < experts.size(); ++i) {
    std::copy_n(&other.w13_data[i * kW13], kW13, &layer.w13_data[experts[i] * kW13]);
    std::copy_n(&other.w2_data[i * kW2], kW2, &layer.w2_data[experts[i] * kW2]);
  }
  const std::vector<std::uint16_t> expected = layer.cpp_apply();
  ASSERT_EQ(outcome(layer.apply(plan.get())), "");
  EXPECT_EQ(layer.output_data, expected);

  ASSERT_EQ(outcome(fusedmoe_plan_release_weights(plan.get(), FUSEDMOE_REFRESH_WAIT)), "");
  EXPECT_EQ(layer.apply(plan.get()), FUSEDMOE_ERROR_STALE_WEIGHTS);
  ASSERT_EQ(outcome(fusedmoe_plan_refresh(plan.get(), &layer.weights, FUSEDMOE_REFRESH_WAIT)), "");
  ASSERT_EQ(outcome(layer.apply(plan.get())), "");
  EXPECT_EQ(layer.output_data, expected);
}

TEST(CApi, StorageOfTheCallerAndAdoption) {
  Layer layer;
  const std::vector<std::uint16_t> expected = layer.cpp_apply();
  std::int64_t bytes = 0;
  std::int64_t alignment = 0;
  layer.options.weight_storage = FUSEDMOE_STORAGE_CALLER;
  ASSERT_EQ(outcome(fusedmoe_packed_weights_size(&layer.config, &layer.weights, &layer.options,
                                                 &bytes, &alignment)),
            "");
  ASSERT_GT(bytes, 0);
  Scratch storage(bytes + alignment);
  const auto address = reinterpret_cast<std::uintptr_t>(storage.data());
  const auto step = static_cast<std::uintptr_t>(alignment);
  layer.options.storage = reinterpret_cast<void*>((address + step - 1) / step * step);
  layer.options.storage_bytes = bytes;
  for (const std::int32_t kind : {FUSEDMOE_STORAGE_CALLER, FUSEDMOE_STORAGE_ADOPT}) {
    layer.options.weight_storage = kind;
    const PlanPtr plan = make_plan(layer);
    ASSERT_NE(plan, nullptr) << fusedmoe_last_error();
    ASSERT_EQ(outcome(layer.apply(plan.get())), "");
    EXPECT_EQ(layer.output_data, expected);
  }
}

TEST(CApi, RunnerOfTheCaller) {
  Layer layer(1, 2000);  // enough work for two threads
  const std::vector<std::uint16_t> expected = layer.cpp_apply();
  const PlanPtr plan = make_plan(layer);
  ASSERT_NE(plan, nullptr) << fusedmoe_last_error();
  int runs = 0;
  fusedmoe_thread_runner runner;
  fusedmoe_thread_runner_init(&runner);
  runner.self = &runs;
  runner.num_threads = 2;
  runner.run = [](void* self, int count, void (*body)(void*, int), void* argument) {
    ++*static_cast<int*>(self);
    std::vector<std::thread> threads;
    for (int i = 1; i < count; ++i) threads.emplace_back(body, argument, i);
    if (count > 0) body(argument, 0);
    for (std::thread& thread : threads) thread.join();
  };
  fusedmoe_apply_context context;
  fusedmoe_apply_context_init(&context);
  context.runner = &runner;
  for (const std::int32_t gang : {0, 1}) {
    runner.gang = gang;
    runs = 0;
    ASSERT_EQ(outcome(layer.apply(plan.get(), nullptr, &context)), "");
    EXPECT_EQ(layer.output_data, expected);
    EXPECT_GT(runs, 0);
  }
  // A runner that throws, against its contract: a status, and the plan is as good as before.
  runner.run = [](void*, int, void (*)(void*, int), void*) { throw std::runtime_error("no room"); };
  EXPECT_EQ(outcome(layer.apply(plan.get(), nullptr, &context)), "internal: no room");
  runner.run = [](void*, int, void (*)(void*, int), void*) { throw 7; };
  EXPECT_EQ(outcome(layer.apply(plan.get(), nullptr, &context)),
            "internal: an exception of an unknown type");
  ASSERT_EQ(outcome(layer.apply(plan.get())), "");
  EXPECT_EQ(layer.output_data, expected);
}

TEST(CApi, RunnerOfThePlan) {
  Layer layer(1, 2000);  // enough work for two threads
  const std::vector<std::uint16_t> expected = layer.cpp_apply();
  struct Engine {
    int runs = 0;
    bool broken = false;
  };
  Engine engine, of_call;
  fusedmoe_thread_runner runner;
  fusedmoe_thread_runner_init(&runner);
  runner.self = &engine;
  runner.num_threads = 3;
  runner.run = [](void* self, int count, void (*body)(void*, int), void* argument) {
    auto& caller = *static_cast<Engine*>(self);
    ++caller.runs;
    if (caller.broken) throw std::runtime_error("no room");
    for (int i = count - 1; i >= 0; --i) body(argument, i);
  };
  const auto runs = [&](fusedmoe_status status) {  // since it was asked last, by what succeeded
    EXPECT_EQ(outcome(status), "");
    return std::exchange(engine.runs, 0);
  };
  layer.options.max_threads = 0;
  layer.options.runner = &runner;
  std::int64_t bytes = 0;
  EXPECT_EQ(runs(fusedmoe_packed_weights_size(&layer.config, &layer.weights, &layer.options, &bytes,
                                              nullptr)),
            0);
  fusedmoe_plan* made = nullptr;
  EXPECT_GT(runs(layer.create(&made)), 0);
  const PlanPtr plan(made);
  std::int32_t threads = 0;
  ASSERT_EQ(fusedmoe_plan_num_threads(made, &threads), FUSEDMOE_OK);
  EXPECT_EQ(threads, 3);
  fusedmoe_thread_runner context_runner = runner;
  runner.run = nullptr;  // the plan has a copy
  EXPECT_GT(runs(fusedmoe_plan_refresh(made, &layer.weights, FUSEDMOE_REFRESH_WAIT)), 0);
  EXPECT_GT(runs(layer.apply(made)), 0);
  EXPECT_EQ(layer.output_data, expected);

  context_runner.self = &of_call;
  fusedmoe_apply_context context;
  fusedmoe_apply_context_init(&context);
  context.runner = &context_runner;
  EXPECT_EQ(runs(layer.apply(made, nullptr, &context)), 0);
  EXPECT_GT(of_call.runs, 0);
  EXPECT_EQ(layer.output_data, expected);

  // A runner that throws, against its contract: a status, and no half-packed weights are used.
  engine.broken = true;
  EXPECT_EQ(outcome(fusedmoe_plan_refresh(made, &layer.weights, FUSEDMOE_REFRESH_WAIT)),
            "internal: no room");
  EXPECT_EQ(layer.apply(made, nullptr, &context), FUSEDMOE_ERROR_STALE_WEIGHTS);
  context_runner.self = &engine;
  layer.options.runner = &context_runner;
  fusedmoe_plan* none = made;
  EXPECT_EQ(outcome(layer.create(&none)), "internal: no room");
  EXPECT_EQ(none, nullptr);
  engine = {};
  EXPECT_GT(runs(fusedmoe_plan_refresh(made, &layer.weights, FUSEDMOE_REFRESH_WAIT)), 0);
  EXPECT_GT(runs(layer.apply(made)), 0);
  EXPECT_EQ(layer.output_data, expected);
}

TEST(CApi, BufferAndPool) {
  Layer layer;
  const std::vector<std::uint16_t> expected = layer.cpp_apply();
  const PlanPtr plan = make_plan(layer);
  ASSERT_NE(plan, nullptr) << fusedmoe_last_error();
  std::int64_t bytes = 0;
  std::int64_t alignment = 0;
  ASSERT_EQ(fusedmoe_plan_workspace_size(plan.get(), Layer::kTokens, &bytes, &alignment), 0);

  fusedmoe_workspace_buffer* buffer = nullptr;
  ASSERT_EQ(outcome(fusedmoe_workspace_buffer_create(nullptr, 0, 1, &buffer)), "");
  fusedmoe_workspace view;
  fusedmoe_workspace_init(&view);
  ASSERT_EQ(outcome(fusedmoe_workspace_buffer_view(buffer, &view)), "");
  EXPECT_EQ(view.workspace2_bytes, 0);
  EXPECT_EQ(layer.apply(plan.get(), &view), FUSEDMOE_ERROR_WORKSPACE_TOO_SMALL);
  ASSERT_EQ(outcome(fusedmoe_workspace_buffer_reserve(buffer, bytes, alignment)), "");
  ASSERT_EQ(outcome(fusedmoe_workspace_buffer_view(buffer, &view)), "");
  EXPECT_EQ(view.workspace2_bytes, bytes);
  ASSERT_EQ(outcome(layer.apply(plan.get(), &view)), "");
  EXPECT_EQ(layer.output_data, expected);
  std::int32_t locked = -1;
  ASSERT_EQ(fusedmoe_workspace_buffer_locked(buffer, &locked), FUSEDMOE_OK);
  EXPECT_EQ(locked, 0);
  ASSERT_EQ(fusedmoe_workspace_buffer_lock(buffer), FUSEDMOE_OK);
  ASSERT_EQ(fusedmoe_workspace_buffer_locked(buffer, &locked), FUSEDMOE_OK);
  EXPECT_EQ(locked, 1);
  EXPECT_EQ(fusedmoe_workspace_buffer_reserve(buffer, bytes, alignment), FUSEDMOE_OK);
  EXPECT_EQ(fusedmoe_workspace_buffer_reserve(buffer, bytes + 1, alignment),
            FUSEDMOE_ERROR_WORKSPACE_TOO_SMALL);
  fusedmoe_device device;
  fusedmoe_device_init(&device);
  device.kind = 2;
  ASSERT_EQ(fusedmoe_workspace_buffer_device(buffer, &device), FUSEDMOE_OK);
  EXPECT_EQ(device.kind, FUSEDMOE_DEVICE_CPU);
  fusedmoe_workspace_buffer_destroy(buffer);

  fusedmoe_workspace_pool* pool = nullptr;
  ASSERT_EQ(outcome(fusedmoe_workspace_pool_create(nullptr, 2, &pool)), "");
  std::int32_t lanes = 0;
  ASSERT_EQ(fusedmoe_workspace_pool_num_lanes(pool, &lanes), FUSEDMOE_OK);
  EXPECT_EQ(lanes, 2);
  ASSERT_EQ(outcome(fusedmoe_workspace_pool_register_plan(pool, plan.get(), Layer::kTokens)), "");
  ASSERT_EQ(outcome(fusedmoe_workspace_pool_lock(pool)), "");
  EXPECT_EQ(fusedmoe_workspace_pool_register_plan(pool, plan.get(), 100 * Layer::kTokens),
            FUSEDMOE_ERROR_WORKSPACE_TOO_SMALL);
  std::int64_t per_lane = 0;
  ASSERT_EQ(fusedmoe_workspace_pool_bytes_per_lane(pool, &per_lane), FUSEDMOE_OK);
  EXPECT_EQ(per_lane, bytes);
  for (std::int32_t lane = 0; lane < lanes; ++lane) {
    ASSERT_EQ(outcome(fusedmoe_workspace_pool_lane(pool, lane, &view)), "");
    ASSERT_EQ(outcome(layer.apply(plan.get(), &view)), "");
    EXPECT_EQ(layer.output_data, expected);
  }
  EXPECT_EQ(fusedmoe_workspace_pool_lane(pool, 2, &view), FUSEDMOE_ERROR_INVALID_ARGUMENT);
  fusedmoe_workspace_pool_destroy(pool);
}

TEST(CApi, WhatAPlanTells) {
  Layer layer;
  fusedmoe_activation_config activation;
  fusedmoe_activation_config_init(&activation);
  activation.kind = FUSEDMOE_ACTIVATION_SWIGLUOAI;
  activation.limit = 5.0F;
  layer.config.activation = &activation;
  layer.config.output_dtype = FUSEDMOE_DTYPE_F32;
  layer.options.counters = 1;
  const PlanPtr plan = make_plan(layer);
  ASSERT_NE(plan, nullptr) << fusedmoe_last_error();
  activation.limit = 1.0F;  // the plan has its own copy

  fusedmoe_moe_config config;
  fusedmoe_moe_config_init(&config);
  ASSERT_EQ(outcome(fusedmoe_plan_config(plan.get(), &config)), "");
  EXPECT_EQ(config.hidden_size, Layer::kHidden);
  EXPECT_EQ(config.intermediate_size, Layer::kIntermediate);
  EXPECT_EQ(config.num_experts, Layer::kExperts);
  EXPECT_EQ(config.top_k, Layer::kTopK);
  EXPECT_EQ(config.dtype, FUSEDMOE_DTYPE_BF16);
  EXPECT_EQ(config.output_dtype, FUSEDMOE_DTYPE_F32);
  EXPECT_EQ(config.clamp_limit, 0.0F);
  ASSERT_NE(config.activation, nullptr);
  EXPECT_EQ(config.activation->kind, FUSEDMOE_ACTIVATION_SWIGLUOAI);
  EXPECT_EQ(config.activation->limit, 5.0F);
  fusedmoe_device device;
  fusedmoe_device_init(&device);
  ASSERT_EQ(outcome(fusedmoe_plan_device(plan.get(), &device)), "");
  EXPECT_EQ(device.kind, FUSEDMOE_DEVICE_CPU);
  EXPECT_EQ(device.platform, nullptr);
  std::int64_t number = 0;
  ASSERT_EQ(fusedmoe_plan_weight_bytes(plan.get(), &number), FUSEDMOE_OK);
  EXPECT_GT(number, 0);
  std::int32_t threads = 0;
  ASSERT_EQ(fusedmoe_plan_num_threads(plan.get(), &threads), FUSEDMOE_OK);
  EXPECT_GE(threads, 1);
  EXPECT_LE(threads, 2);
  EXPECT_EQ(outcome(fusedmoe_plan_check_faults(plan.get())), "");

  // Text: whole, cut, and only its size.
  std::size_t needed = 0;
  ASSERT_EQ(fusedmoe_plan_describe(plan.get(), nullptr, 0, &needed), FUSEDMOE_OK);
  ASSERT_GT(needed, 10U);
  std::string text(needed, '#');
  ASSERT_EQ(fusedmoe_plan_describe(plan.get(), text.data(), needed, nullptr), FUSEDMOE_OK);
  EXPECT_EQ(text.find('\0'), needed - 1);
  std::array<char, 10> cut;
  cut.fill('#');
  ASSERT_EQ(fusedmoe_plan_describe(plan.get(), cut.data(), 9, &needed), FUSEDMOE_OK);
  EXPECT_EQ(std::string(cut.data()), text.substr(0, 8));
  EXPECT_EQ(cut[9], '#');
  EXPECT_EQ(needed, text.size());

  std::vector<float> output(Layer::kTokens * Layer::kHidden);
  layer.output =
      fusedmoe_matrix_of(output.data(), FUSEDMOE_DTYPE_F32, Layer::kTokens, Layer::kHidden);
  ASSERT_EQ(outcome(layer.apply(plan.get())), "");
  std::uint64_t calls = 0;
  std::uint64_t tokens = 0;
  std::array<std::uint64_t, 4> rows{};
  ASSERT_EQ(fusedmoe_plan_counters(plan.get(), &calls, &tokens, rows.data(), 4), FUSEDMOE_OK);
  EXPECT_EQ(calls, 1U);
  EXPECT_EQ(tokens, static_cast<std::uint64_t>(Layer::kTokens));
  EXPECT_EQ(rows[0] + rows[1] + rows[2] + rows[3],
            static_cast<std::uint64_t>(Layer::kTokens * Layer::kTopK));
  std::array<std::uint64_t, 2> two = {99, 99};
  ASSERT_EQ(fusedmoe_plan_counters(plan.get(), nullptr, nullptr, two.data(), 1), FUSEDMOE_OK);
  EXPECT_EQ(two[0], rows[0]);
  EXPECT_EQ(two[1], 99U);
  ASSERT_EQ(fusedmoe_plan_reset_counters(plan.get()), FUSEDMOE_OK);
  ASSERT_EQ(fusedmoe_plan_counters(plan.get(), &calls, nullptr, nullptr, 0), FUSEDMOE_OK);
  EXPECT_EQ(calls, 0U);
}

TEST(CApi, DevicesAndTheirNames) {
  std::int64_t count = 0;
  ASSERT_EQ(fusedmoe_num_devices(&count), FUSEDMOE_OK);
  const std::vector<DeviceInfo> infos = list_devices();
  ASSERT_EQ(count, static_cast<std::int64_t>(infos.size()));
  for (std::int64_t i = 0; i < count; ++i) {
    std::int32_t available = -1;
    std::array<char, 64> name{};
    std::array<char, 512> reason{};
    ASSERT_EQ(fusedmoe_device_info(i, &available, name.data(), name.size(), nullptr, reason.data(),
                                   reason.size(), nullptr),
              FUSEDMOE_OK);
    EXPECT_EQ(name.data(), infos[i].name);
    EXPECT_EQ(reason.data(), infos[i].reason);
    EXPECT_EQ(available == 1, infos[i].available);
  }
  fusedmoe_device device;
  fusedmoe_device_init(&device);
  std::array<char, 8> platform{};
  std::array<char, 32> text{};
  for (const char* name : {"cpu", "cuda:1", "xpu:pocl", "xpu:2"}) {
    ASSERT_EQ(outcome(fusedmoe_device_parse(name, &device, platform.data(), platform.size())), "");
    ASSERT_EQ(outcome(fusedmoe_device_to_text(&device, text.data(), text.size(), nullptr)), "");
    EXPECT_STREQ(text.data(), name);
  }
  ASSERT_EQ(outcome(fusedmoe_device_parse("cpu", &device, nullptr, 0)), "");
  EXPECT_EQ(device.platform, nullptr);
  EXPECT_EQ(fusedmoe_device_parse("xpu:pocl", &device, platform.data(), 4),
            FUSEDMOE_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(fusedmoe_device_parse("tpu", &device, nullptr, 0), FUSEDMOE_ERROR_INVALID_ARGUMENT);
}

TEST(CApi, RoutingEqualsCpp) {
  constexpr std::int64_t kExperts = 8;
  constexpr std::int64_t kTokens = 5;
  Values values(3);
  std::vector<float> logits(kTokens * kExperts);
  for (float& logit : logits) logit = 4.0F * values.next();
  std::vector<float> bias(kExperts);
  for (float& value : bias) value = values.next();

  const fusedmoe_const_matrix c_bias =
      fusedmoe_const_matrix_of(bias.data(), FUSEDMOE_DTYPE_F32, 1, kExperts);
  fusedmoe_routing_config c;
  fusedmoe_routing_config_init(&c);
  c.top_k = 2;
  c.renormalise = FUSEDMOE_RENORMALISE_SUM_EPSILON;
  c.scaling_factor = 2.5F;
  c.selection_bias = &c_bias;
  RoutingConfig cpp;
  cpp.top_k = 2;
  cpp.renormalise = Renormalise::sum_epsilon;
  cpp.scaling_factor = 2.5F;
  cpp.selection_bias = {bias.data(), DType::f32, 1, kExperts};

  using CFunction =
      fusedmoe_status (*)(const fusedmoe_routing_config*, const fusedmoe_const_matrix*,
                          const fusedmoe_matrix*, const fusedmoe_matrix*);
  using CppFunction = void (*)(const RoutingConfig&, ConstMatrixView, MatrixView, MatrixView);
  const auto compare = [&](CFunction c_function, CppFunction cpp_function) {
    std::vector<float> weights(kTokens * 2, -1.0F);
    std::vector<float> cpp_weights(kTokens * 2, -2.0F);
    std::vector<std::int64_t> ids(kTokens * 2, -1);
    std::vector<std::int64_t> cpp_ids(kTokens * 2, -2);
    const auto c_logits =
        fusedmoe_const_matrix_of(logits.data(), FUSEDMOE_DTYPE_F32, kTokens, kExperts);
    const auto c_weights = fusedmoe_matrix_of(weights.data(), FUSEDMOE_DTYPE_F32, kTokens, 2);
    const auto c_ids = fusedmoe_matrix_of(ids.data(), FUSEDMOE_DTYPE_I64, kTokens, 2);
    EXPECT_EQ(outcome(c_function(&c, &c_logits, &c_weights, &c_ids)), "");
    cpp_function(cpp, {logits.data(), DType::f32, kTokens, kExperts},
                 {cpp_weights.data(), DType::f32, kTokens, 2},
                 {cpp_ids.data(), DType::i64, kTokens, 2});
    EXPECT_EQ(weights, cpp_weights);
    EXPECT_EQ(ids, cpp_ids);
  };
  compare(fusedmoe_topk_softmax, topk_softmax);
  compare(fusedmoe_topk_sigmoid, topk_sigmoid);
  compare(fusedmoe_topk_softplus_sqrt, topk_softplus_sqrt);
  c.num_groups = cpp.num_groups = 4;
  c.topk_group = cpp.topk_group = 2;
  compare(fusedmoe_grouped_topk, grouped_topk);
  c.score_function = FUSEDMOE_SCORE_SOFTMAX;
  cpp.score_function = ScoreFunction::softmax;
  c.group_score = FUSEDMOE_GROUP_SCORE_BEST;
  cpp.group_score = GroupScore::best;
  compare(fusedmoe_route, route);
}

}  // namespace
}  // namespace fusedmoe::c_api_test
