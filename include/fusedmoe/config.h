// What a layer is (MoeConfig) and how a plan runs it (PlanOptions).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "fusedmoe/execution.h"
#include "fusedmoe/expert_map.h"
#include "fusedmoe/export.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {

// g = gate, u = up, x = the only projection where there is no gate. Evaluated in fp32.
enum class Activation : std::uint8_t {
  silu = 0,    // silu(g) * u
  gelu,        // gelu(g) * u, the erf form
  gelu_tanh,   // gelu(g) * u, the tanh form (gelu_pytorch_tanh)
  swigluoai,   // g' = min(g, limit), u' = clamp(u, -limit, limit): (u' + 1) g' sigmoid(alpha g')
  swiglustep,  // min(silu(g), limit) * clamp(u, -limit, limit)
  situ,        // beta tanh(g / beta) sigmoid(g) * (linear_beta tanh(u / linear_beta), or u)
  relu2,       // max(x, 0)^2, without a gate: w13 has intermediate_size rows
};

FUSEDMOE_EXPORT const char* to_string(Activation activation) noexcept;
FUSEDMOE_EXPORT bool is_gated(Activation activation) noexcept;

struct ActivationConfig {
  Activation kind = Activation::silu;
  float alpha = 1.702F;      // swigluoai
  float limit = 7.0F;        // swigluoai and swiglustep; > 0, infinity is none
  float beta = 0.0F;         // situ: required there, finite and > 0
  float linear_beta = 0.0F;  // situ: 0 leaves u as it is
};

// How gate and up rows lie in w13 ([E, N, K]: rows; [E, K, N]: columns).
enum class GateUpLayout : std::uint8_t {
  halves = 0,   // all rows of one projection, then all of the other
  interleaved,  // alternating rows (gpt-oss)
};
enum class GateUpOrder : std::uint8_t {
  gate_up = 0,  // gate first: what checkpoints do
  up_gate,      // up first: what some engines rewrite them to
};

FUSEDMOE_EXPORT const char* to_string(GateUpLayout layout) noexcept;
FUSEDMOE_EXPORT const char* to_string(GateUpOrder order) noexcept;

// The logical layer. Sizes are counts of elements; any positive value is legal, no multiples are
// needed.
struct MoeConfig {
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_experts = 0;  // global, also under expert parallelism
  std::int64_t top_k = 0;        // experts per token, at most num_experts
  ActivationConfig activation = {};
  DType dtype = DType::bf16;               // of hidden: f32, f16 or bf16
  std::optional<DType> output_dtype = {};  // of output; unset = dtype
  GateUpLayout gate_up_layout = GateUpLayout::halves;
  GateUpOrder gate_up_order = GateUpOrder::gate_up;
  // Before silu and the gelus: g = min(g, limit), u = clamp(u, -limit, limit). Finite and > 0.
  std::optional<float> clamp_limit = {};
  // The router's weight multiplies gemm1's result instead of the expert's output (Llama 4).
  bool apply_router_weight_on_input = false;
};

enum class DeviceKind : std::uint8_t { cpu = 0, cuda, xpu };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;
  std::string platform = {};  // xpu only: a platform asked for by name, for example "pocl"

  static Device cpu() { return {}; }
  static Device cuda(int index = 0) { return {DeviceKind::cuda, index, {}}; }
  static Device xpu(int index = 0) { return {DeviceKind::xpu, index, {}}; }
  friend bool operator==(const Device&, const Device&) = default;
};

// "cpu", "cuda:1", "xpu:pocl". parse_device throws invalid_argument for anything else.
FUSEDMOE_EXPORT std::string to_string(const Device& device);
FUSEDMOE_EXPORT Device parse_device(const std::string& text);

// What the multiplications run on.
enum class ComputeMode : std::uint8_t {
  a16 = 0,  // activations stay in their dtype, weights are widened to it or to fp32
  a8,       // activations are quantised dynamically; refused where it is not built
};

// Where the weights that the kernels read live.
enum class WeightStorage : std::uint8_t {
  own = 0,   // packed into memory of the plan
  borrowed,  // read in place from the caller's tensors, which must outlive the plan
  caller,    // packed into `storage`
  adopt,     // `storage` already holds what an equal plan packed there; nothing is read or written
};

// What apply does when the weights' version counter has moved since the plan read them.
enum class StalePolicy : std::uint8_t {
  raise = 0,  // throw stale_weights
  refresh,    // read them again first; the tensors given last must still be valid
};

// The same struct goes to create, supports and packed_weights_size.
struct PlanOptions {
  Device device = {};
  ExpertMap expert_map = {};
  ComputeMode mode = ComputeMode::a16;
  // A token's bits do not depend on what else is in the batch. Unset: true on the CPU,
  // which always is: false allows a device to give it up, and changes nothing there.
  std::optional<bool> batch_invariant = {};
  // The best instruction set to use, by name as `fusedmoe info` prints it; empty = the machine's
  // best. The environment variable FUSEDMOE_ISA limits it further.
  std::string isa = {};
  // CPU threads; 0 = those of `runner`, or without one the process's affinity mask and cgroup limit
  // when the plan is built.
  int max_threads = 0;
  // CPU: an engine's own threads. The plan then starts none: create and refresh pack with these,
  // and apply uses them where its context brings none. The struct is copied; what `self` points to
  // must outlive the plan. Null = the library's own threads.
  const ThreadRunner* runner = nullptr;
  WeightStorage weight_storage = WeightStorage::own;
  std::span<std::byte> storage = {};  // for caller and adopt: packed_weights_size() bytes
  StalePolicy on_stale = StalePolicy::raise;
  bool counters = false;  // count tokens per local expert, see FusedMoe::counters()
};

}  // namespace fusedmoe
