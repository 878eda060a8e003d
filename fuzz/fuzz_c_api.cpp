// Drives the C ABI with structs built from the input: sizes, enums, nulls, strides, struct sizes,
// callbacks. Pointers are null or name enough memory, and sizes are tiny, so that whatever is
// accepted is cheap. Zero bytes choose what is valid: an empty input builds and applies a plan.
// The first 8 bytes name the calls that follow create; the others spoil fields.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "fusedmoe/fusedmoe_c.h"

namespace {

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
constexpr std::size_t kArena = 1 << 16;  // more than any accepted shape below needs

void require(bool condition) {
  if (!condition) std::abort();
}

class Reader {
 public:
  Reader(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  std::uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  bool rare() { return byte() >= 208; }
  // `valid`, or now and then one of the others.
  template <class T>
  T pick(T valid, std::initializer_list<T> others) {
    const std::uint8_t b = byte();
    return b < 208 ? valid : others.begin()[b % others.size()];
  }
  std::int64_t size(std::int64_t valid) {
    return pick<std::int64_t>(valid, {0, -1, 1, valid + 1, valid - 1, kHuge, -kHuge - 1});
  }
  std::int64_t stride(std::int64_t dense) {
    return pick<std::int64_t>(0, {dense, dense + 3, 1, -1, -kHuge - 1, 0});
  }
  std::int32_t enumerator(std::int32_t valid, std::int32_t last) {
    return pick<std::int32_t>(valid,
                              {0, 1, 2, 3, 4, last, last + 1, -1, -2, valid + 256, last + 65536});
  }
  float number(float valid) {
    return pick(valid, {0.0F, -1.0F, 1.0F, std::numeric_limits<float>::infinity(),
                        std::numeric_limits<float>::quiet_NaN()});
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t at_ = 0;
};

// Room behind a struct for any struct_size that the library believes.
template <class T>
struct Room {
  alignas(16) std::array<unsigned char, 4104> bytes{};
  T* get() { return reinterpret_cast<T*>(bytes.data()); }
  T* operator->() { return get(); }

  void init(void (*function)(T*)) {
    bytes.fill(0);
    function(new (bytes.data()) T);
  }
  const T* spoiled(Reader& in) {
    const std::size_t whole = sizeof(T);
    get()->struct_size = in.pick<std::size_t>(
        whole, {0, 1, 8, 16, 24, 40, whole - 8, whole - 4, whole + 8, whole + 16, 4096, 4104,
                std::numeric_limits<std::size_t>::max()});
    if (in.rare()) bytes[whole + in.byte() % 16] = in.byte();
    return in.rare() ? nullptr : get();
  }
  // With a struct_size that holds, for what the library fills.
  T* out(Reader& in) {
    const T* result = spoiled(in);
    return result == nullptr ? nullptr : get();
  }
};

// Never INTERNAL, and a failure always has a text.
fusedmoe_status checked(fusedmoe_status status) {
  require(status >= FUSEDMOE_OK && status < FUSEDMOE_ERROR_INTERNAL);
  const std::size_t length = std::strlen(fusedmoe_last_error());
  require(length < 1024 && (status == FUSEDMOE_OK || length > 0));
  return status;
}

constexpr std::size_t kScratch = 1 << 22;  // each of two halves of the workspace

// Once for all inputs, for speed.
struct Memory {
  std::vector<unsigned char> arena = std::vector<unsigned char>(kArena, 0x3C);
  std::vector<unsigned char> storage = std::vector<unsigned char>(kArena + 4096);
  std::vector<unsigned char> scratch = std::vector<unsigned char>(2 * kScratch + 128, 0xFF);
};
Memory& memory() {
  static Memory instance;
  return instance;
}

struct Session {
  static constexpr std::int64_t kHidden = 16;
  static constexpr std::int64_t kIntermediate = 8;
  static constexpr std::int64_t kExperts = 3;
  static constexpr std::int64_t kTopK = 2;
  static constexpr std::int64_t kTokens = 4;

  Reader in;
  std::vector<unsigned char>& arena = memory().arena;
  std::vector<unsigned char>& storage = memory().storage;
  std::vector<unsigned char>& scratch = memory().scratch;
  std::array<unsigned char, 4096> output{};
  std::array<std::int32_t, 8> map{};
  std::array<std::int64_t, 16> ids{};
  alignas(8) std::array<std::uint64_t, 2> counter{};

  Room<fusedmoe_activation_config> activation;
  Room<fusedmoe_moe_config> config;
  Room<fusedmoe_device> device;
  Room<fusedmoe_expert_map> expert_map;
  Room<fusedmoe_plan_options> options;
  Room<fusedmoe_weight_scales> scales;
  std::array<Room<fusedmoe_weight_tensor>, 3> tensors;
  std::array<Room<fusedmoe_bias_tensor>, 2> biases;
  Room<fusedmoe_expert_weights> weights;
  Room<fusedmoe_matrix> out_matrix;
  Room<fusedmoe_matrix> routed[2];
  std::array<Room<fusedmoe_const_matrix>, 4> inputs;
  Room<fusedmoe_workspace> workspace;
  Room<fusedmoe_thread_runner> runner;
  Room<fusedmoe_apply_context> context;
  Room<fusedmoe_routing_config> routing;

  Session(const std::uint8_t* data, std::size_t size) : in(data, size) {
    // No plan of an earlier input is left there to be adopted.
    std::memset(storage.data(), 0xFF, storage.size());
  }

  const void* data() { return in.rare() ? nullptr : arena.data() + in.byte() % 4; }

  const fusedmoe_moe_config* make_config() {
    activation.init(fusedmoe_activation_config_init);
    activation->kind = in.enumerator(0, 6);
    activation->alpha = in.number(1.702F);
    activation->limit = in.number(7.0F);
    activation->beta = in.number(0.0F);
    activation->linear_beta = in.number(0.0F);
    activation->reserved = in.pick(0, {1});
    config.init(fusedmoe_moe_config_init);
    config->hidden_size = in.size(kHidden);
    config->intermediate_size = in.size(kIntermediate);
    config->num_experts = in.size(kExperts);
    config->top_k = in.size(kTopK);
    config->activation = activation.spoiled(in);
    config->dtype = in.enumerator(FUSEDMOE_DTYPE_BF16, 8);
    config->output_dtype = in.enumerator(-1, 8);
    config->gate_up_layout = in.enumerator(0, 1);
    config->gate_up_order = in.enumerator(0, 1);
    config->clamp_limit = in.number(0.0F);
    config->apply_router_weight_on_input = in.enumerator(0, 1);
    return config.spoiled(in);
  }

  const fusedmoe_plan_options* make_options() {
    device.init(fusedmoe_device_init);
    device->kind = in.enumerator(0, 2);
    device->index = in.pick(0, {1, -1});
    device->platform = in.pick<const char*>(nullptr, {"", "pocl"});
    expert_map.init(fusedmoe_expert_map_init);
    expert_map->kind = in.enumerator(0, 3);
    expert_map->rank = in.pick(0, {1, -1, 4});
    expert_map->size = in.pick(1, {2, 0, -1, 5});
    expert_map->reserved = in.pick(0, {1});
    for (auto& local : map) local = static_cast<std::int32_t>(in.byte() % 5) - 1;
    expert_map->map = in.rare() ? nullptr : map.data();
    expert_map->map_size = in.pick<std::int64_t>(kExperts, {0, 1, 2, 8, -1});
    options.init(fusedmoe_plan_options_init);
    options->device = in.rare() ? device.spoiled(in) : nullptr;
    options->expert_map = in.rare() ? expert_map.spoiled(in) : nullptr;
    options->isa = in.pick<const char*>(
        nullptr, {"", "scalar", "avx2", "avx512", "avx512_bf16", "amx_bf16", "none such"});
    options->mode = in.enumerator(0, 1);
    options->batch_invariant = in.enumerator(-1, 1);
    options->max_threads = in.pick(1, {0, 2, 3, -1});
    options->weight_storage = in.enumerator(0, 3);
    const auto address = reinterpret_cast<std::uintptr_t>(storage.data());
    unsigned char* aligned = storage.data() + (4096 - address % 4096) % 4096;
    options->storage = in.rare() ? nullptr : aligned + in.pick(0, {1, 64});
    options->storage_bytes = in.pick<std::int64_t>(kArena - 64, {0, 100, -1});
    options->on_stale = in.enumerator(0, 1);
    options->counters = in.enumerator(0, 1);
    options->runner = in.rare() ? make_runner() : nullptr;
    return options.spoiled(in);
  }

  const fusedmoe_weight_tensor* make_tensor(std::size_t i, std::int64_t experts, std::int64_t rows,
                                            std::int64_t columns) {
    Room<fusedmoe_weight_tensor>& tensor = tensors[i];
    tensor.init(fusedmoe_weight_tensor_init);
    tensor->data = data();
    tensor->format = in.enumerator(FUSEDMOE_FORMAT_BF16, 12);
    tensor->layout = in.enumerator(0, 1);
    tensor->experts = in.size(experts);
    tensor->outputs = in.size(rows);
    tensor->inputs = in.size(columns);
    tensor->row_stride = in.stride(columns);
    tensor->expert_stride = in.stride(rows * columns);
    tensor->scales = in.rare() ? scales.spoiled(in) : nullptr;
    return tensor.spoiled(in);
  }

  const fusedmoe_bias_tensor* make_bias(std::size_t i, std::int64_t experts, std::int64_t size) {
    if (!in.rare()) return nullptr;
    biases[i].init(fusedmoe_bias_tensor_init);
    biases[i]->data = data();
    biases[i]->dtype = in.enumerator(0, 8);
    biases[i]->reserved = in.pick(0, {1});
    biases[i]->experts = in.size(experts);
    biases[i]->size = in.size(size);
    return biases[i].spoiled(in);
  }

  // Into `to`, for `experts` of them.
  void fill_weights(fusedmoe_expert_weights* to, std::int64_t experts) {
    scales.init(fusedmoe_weight_scales_init);
    scales->data = data();
    scales->type = in.enumerator(0, 4);
    scales->layout = in.enumerator(0, 4);
    scales->group_size = in.pick<std::int64_t>(0, {4, 8, 16, 1, -1, kHuge});
    scales->block_n = in.pick<std::int64_t>(0, {4, 8, 128, -1, kHuge});
    scales->block_k = in.pick<std::int64_t>(0, {4, 8, 128, -1, kHuge});
    scales->transposed = in.enumerator(0, 1);
    scales->zero_points = in.rare() ? arena.data() : nullptr;
    scales->global = in.rare() ? reinterpret_cast<const float*>(arena.data()) : nullptr;
    scales->parts = in.enumerator(0, 2);
    const std::int64_t halves = in.rare() ? 1 : 2;
    to->w13 = make_tensor(0, experts, halves * kIntermediate, kHidden);
    to->w2 = make_tensor(1, experts, kHidden, kIntermediate);
    to->w13_up = halves == 1 ? make_tensor(2, experts, kIntermediate, kHidden) : nullptr;
    to->w13_bias = make_bias(0, experts, 2 * kIntermediate);
    to->w2_bias = make_bias(1, experts, kHidden);
  }

  static fusedmoe_status serve(void* self, std::int64_t, fusedmoe_expert_weights* expert,
                               char* message, std::size_t message_bytes) {
    auto& session = *static_cast<Session*>(self);
    session.fill_weights(expert, 1);
    if (session.in.rare()) std::memset(message, 'x', session.in.byte() % (message_bytes + 1));
    return session.in.pick<fusedmoe_status>(FUSEDMOE_OK, {1, 8, 42, -1});
  }

  const fusedmoe_expert_weights* make_weights(std::int64_t experts) {
    weights.init(fusedmoe_expert_weights_init);
    fill_weights(weights.get(), experts);
    if (in.rare()) {
      weights->source = &serve;
      weights->self = this;
    }
    auto* bytes = reinterpret_cast<unsigned char*>(counter.data());
    weights->version = reinterpret_cast<const std::uint64_t*>(
        in.pick<unsigned char*>(nullptr, {bytes, bytes + 8, bytes + 4, bytes + 1}));
    return weights.spoiled(in);
  }

  template <class Matrix>
  void fill_matrix(Matrix* matrix, std::int32_t dtype, std::int64_t columns) {
    matrix->dtype = in.enumerator(dtype, 8);
    matrix->reserved = in.pick(0, {1});
    matrix->rows = in.pick<std::int64_t>(kTokens, {0, 1, kTokens + 1, -1, kHuge, -kHuge - 1});
    matrix->columns = in.size(columns);
    matrix->row_stride = in.stride(columns);
    if (in.rare()) matrix->data = nullptr;
  }
  const fusedmoe_matrix* make_output(Room<fusedmoe_matrix>& room, void* to, std::int32_t dtype,
                                     std::int64_t columns) {
    room.init(fusedmoe_matrix_init);
    room->data = to;
    fill_matrix(room.get(), dtype, columns);
    return room.spoiled(in);
  }
  const fusedmoe_const_matrix* make_input(std::size_t i, const void* from, std::int32_t dtype,
                                          std::int64_t columns) {
    inputs[i].init(fusedmoe_const_matrix_init);
    inputs[i]->data = from;
    fill_matrix(inputs[i].get(), dtype, columns);
    return inputs[i].spoiled(in);
  }

  static void run(void*, int count, void (*body)(void*, int), void* argument) {
    std::vector<std::thread> threads;
    for (int i = 1; i < count; ++i) threads.emplace_back(body, argument, i);
    if (count > 0) body(argument, 0);
    for (std::thread& thread : threads) thread.join();
  }

  const fusedmoe_workspace* make_workspace(const fusedmoe_plan* plan) {
    if (in.rare()) return nullptr;
    std::int64_t bytes = 0;
    checked(fusedmoe_plan_workspace_size(plan, kTokens, &bytes, nullptr));
    const auto address = reinterpret_cast<std::uintptr_t>(scratch.data());
    unsigned char* aligned = scratch.data() + (64 - address % 64) % 64;
    workspace.init(fusedmoe_workspace_init);
    require(bytes <= static_cast<std::int64_t>(kScratch));
    workspace->workspace2 = in.rare() ? nullptr : aligned + in.pick(0, {1, 32});
    workspace->workspace2_bytes = in.pick<std::int64_t>(bytes, {0, bytes / 2, 1, -1, -kHuge - 1});
    if (in.rare()) {
      workspace->workspace13 = in.rare() ? aligned : aligned + kScratch;
      workspace->workspace13_bytes = in.pick<std::int64_t>(bytes / 2, {0, 64, -1});
    }
    return workspace.spoiled(in);
  }

  // Of the plan, and afterwards in the same memory of its calls: the plan has a copy.
  const fusedmoe_thread_runner* make_runner() {
    runner.init(fusedmoe_thread_runner_init);
    runner->run = in.rare() ? nullptr : &run;
    runner->num_threads = in.pick(1, {2, 0, -1, 4097});
    runner->gang = in.enumerator(0, 1);
    return runner.spoiled(in);
  }

  const fusedmoe_apply_context* make_context() {
    if (!in.rare()) return nullptr;
    context.init(fusedmoe_apply_context_init);
    context->runner = in.rare() ? make_runner() : nullptr;
    for (auto& local : map) local = static_cast<std::int32_t>(in.byte() % 6) - 2;
    context->expert_map = in.rare() ? map.data() : nullptr;
    context->expert_map_size = in.pick<std::int64_t>(0, {kExperts, 8, -1});
    return context.spoiled(in);
  }

  void apply(const fusedmoe_plan* plan) {
    for (auto& id : ids) id = in.pick<std::int64_t>(0, {1, 2, -1, 3, -2, kHuge});
    const auto* to =
        make_output(out_matrix, output.data() + in.pick(0, {1}), FUSEDMOE_DTYPE_BF16, kHidden);
    const void* from = in.rare() ? static_cast<void*>(output.data()) : arena.data();
    const auto* hidden = make_input(0, from, FUSEDMOE_DTYPE_BF16, kHidden);
    const auto* slot_weights = make_input(1, arena.data(), FUSEDMOE_DTYPE_F32, kTopK);
    const auto* slot_ids = make_input(2, ids.data(), FUSEDMOE_DTYPE_I64, kTopK);
    const auto* lent = make_workspace(plan);
    output.fill(0xA5);
    const fusedmoe_status status = checked(
        fusedmoe_plan_apply(plan, to, hidden, slot_weights, slot_ids, lent, make_context()));
    if (status != FUSEDMOE_OK) {
      for (const unsigned char byte : output) require(byte == 0xA5);
    }
  }

  void route() {
    const auto* logits = make_input(0, arena.data(), FUSEDMOE_DTYPE_F32, kExperts);
    const auto* bias = make_input(3, arena.data(), FUSEDMOE_DTYPE_F32, kExperts);
    if (bias != nullptr) inputs[3]->rows = in.pick<std::int64_t>(1, {0, 2, -1});
    const auto* slot_weights = make_output(routed[0], output.data(), FUSEDMOE_DTYPE_F32, kTopK);
    const auto* slot_ids = make_output(routed[1], output.data() + 2048, FUSEDMOE_DTYPE_I32, kTopK);
    routing.init(fusedmoe_routing_config_init);
    routing->top_k = in.size(kTopK);
    routing->selection_bias = in.rare() ? bias : nullptr;
    routing->score_function = in.enumerator(-1, 3);
    routing->renormalise = in.enumerator(0, 3);
    routing->epsilon = in.number(1e-20F);
    routing->scaling_factor = in.number(1.0F);
    routing->num_groups = in.size(1);
    routing->topk_group = in.size(1);
    routing->group_score = in.enumerator(0, 1);
    const auto* how = routing.spoiled(in);
    checked(fusedmoe_route(how, logits, slot_weights, slot_ids));
    checked(fusedmoe_topk_softmax(how, logits, slot_weights, slot_ids));
    checked(fusedmoe_topk_sigmoid(how, logits, slot_weights, slot_ids));
    checked(fusedmoe_topk_softplus_sqrt(how, logits, slot_weights, slot_ids));
    checked(fusedmoe_grouped_topk(how, logits, slot_weights, slot_ids));
  }

  void ask(const fusedmoe_plan* plan) {
    std::array<char, 300> text;
    text.fill('#');
    const std::size_t bytes = in.byte();
    std::size_t needed = 0;
    checked(fusedmoe_plan_describe(plan, in.rare() ? nullptr : text.data(), bytes, &needed));
    for (std::size_t i = bytes; i < text.size(); ++i) require(text[i] == '#');
    config.init(fusedmoe_moe_config_init);
    checked(fusedmoe_plan_config(plan, config.out(in)));
    device.init(fusedmoe_device_init);
    checked(fusedmoe_plan_device(plan, device.out(in)));
    std::array<std::uint64_t, 8> rows{};
    checked(fusedmoe_plan_counters(plan, nullptr, nullptr, rows.data(),
                                   in.pick<std::int64_t>(8, {0, 1, -1})));
    std::int64_t a = 0;
    std::int64_t b = 0;
    const std::int64_t tokens = in.pick<std::int64_t>(kTokens, {0, -1, 1 << 30, kHuge});
    checked(fusedmoe_plan_workspace_size(plan, tokens, &a, nullptr));
    checked(fusedmoe_plan_workspace_sizes_13_2(plan, tokens, &a, &b, nullptr));
  }

  void lend(const fusedmoe_plan* plan) {
    fusedmoe_workspace_buffer* buffer = nullptr;
    device.init(fusedmoe_device_init);
    device->kind = in.enumerator(0, 2);
    const std::int64_t bytes = in.pick<std::int64_t>(64, {0, 1, 4096, -1, -kHuge - 1});
    const std::int64_t alignment = in.pick<std::int64_t>(64, {1, 0, -1, 3, 4096, -kHuge - 1});
    const auto* where = device.spoiled(in);
    workspace.init(fusedmoe_workspace_init);
    if (checked(fusedmoe_workspace_buffer_create(where, bytes, alignment, &buffer)) == 0) {
      if (in.rare()) checked(fusedmoe_workspace_buffer_lock(buffer));
      checked(fusedmoe_workspace_buffer_reserve(buffer, in.size(128), in.size(64)));
      checked(fusedmoe_workspace_buffer_view(buffer, workspace.out(in)));
    }
    fusedmoe_workspace_buffer_destroy(buffer);
    fusedmoe_workspace_pool* pool = nullptr;
    if (checked(fusedmoe_workspace_pool_create(where, in.pick(1, {2, 0, -1}), &pool)) == 0) {
      checked(fusedmoe_workspace_pool_register_plan(
          pool, plan, in.pick<std::int64_t>(kTokens, {0, 1, -1, -kHuge - 1})));
      if (in.rare()) checked(fusedmoe_workspace_pool_lock(pool));
      workspace.init(fusedmoe_workspace_init);
      checked(fusedmoe_workspace_pool_lane(pool, in.pick(0, {1, 2, -1}), workspace.out(in)));
    }
    fusedmoe_workspace_pool_destroy(pool);
  }

  void fuzz() {
    std::array<std::uint8_t, 8> calls;
    for (auto& call : calls) call = in.byte();
    const auto* what = make_config();
    const auto* views = make_weights(kExperts);
    const auto* how = make_options();
    std::int32_t supported = -1;
    std::array<char, 64> reason{};
    checked(fusedmoe_supports(what, views, how, &supported, reason.data(), reason.size(), nullptr));
    std::int64_t bytes = 0;
    checked(fusedmoe_packed_weights_size(what, views, how, &bytes, nullptr));
    fusedmoe_plan* plan = nullptr;
    const fusedmoe_status status = checked(fusedmoe_plan_create(what, views, how, &plan));
    require((plan != nullptr) == (status == FUSEDMOE_OK));
    require(supported == 1 || plan == nullptr);
    if (plan == nullptr) {
      if (supported == 0) {
        require(std::string(fusedmoe_last_error()).starts_with(reason.data()));
      }
      route();
      return;
    }
    std::array<std::int64_t, 4> experts = {0, 1, 2, 0};
    for (const std::uint8_t call : calls) {
      const std::int32_t wait = in.enumerator(0, 1);
      switch (call % 8) {
        case 0:
          apply(plan);
          break;
        case 1:
          checked(fusedmoe_plan_refresh(plan, make_weights(kExperts), wait));
          break;
        case 2: {
          const std::int64_t count = in.pick<std::int64_t>(2, {0, 1, 4, -1});
          for (auto& expert : experts) expert = in.pick<std::int64_t>(0, {1, 2, 3, -1, kHuge});
          checked(fusedmoe_plan_refresh_experts(plan, in.rare() ? nullptr : experts.data(), count,
                                                make_weights(count), wait));
          break;
        }
        case 3:
          checked(fusedmoe_plan_release_weights(plan, wait));
          break;
        case 4:
          checked(fusedmoe_version_bump(counter.data()));
          break;
        case 5:
          ask(plan);
          break;
        case 6:
          lend(plan);
          break;
        default:
          route();
          break;
      }
    }
    fusedmoe_plan_destroy(plan);
  }
};

}  // namespace

// A buffer that is too large for any machine is to give out_of_memory, not a report.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Session(data, size).fuzz();
  return 0;
}
