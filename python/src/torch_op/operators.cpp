// The operators torch.ops.fusedmoe.*, through PyTorch's stable ABI: built against one version of
// torch, they load into later ones. fusedmoe/_torch_fallback.py has the same operators in Python.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fusedmoe/error.h"
#include "fusedmoe/execution.h"
#include "native_plan.h"
#include "torch_op/plan_record.h"
#include "torch_op/tensor_view.h"

namespace fusedmoe::torch_op {
namespace {

// The process's own threads, however they are pinned.
void run_on_torch(void* /*self*/, int count, void (*body)(void* argument, int index),
                  void* argument) {
  if (in_forked_child()) {  // OpenMP's threads did not survive, and it would wait for them
    for (int i = 0; i < count; ++i) body(argument, i);
    return;
  }
  torch::stable::parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) body(argument, static_cast<int>(i));
  });
}

// Not a gang: inside another parallel region OpenMP gives fewer threads than there are bodies.
ThreadRunner torch_runner(int num_threads) { return {&run_on_torch, nullptr, num_threads, false}; }

// PyTorch knows no error codes: the name of the code goes in front of the message, and
// fusedmoe.torch makes the exception of it again.
template <class Body>
auto with_codes(const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error& error) {
    throw std::runtime_error(std::string("fusedmoe.") + to_string(error.code()) + ": " +
                             error.what());
  }
}

Workspace to_workspace(const std::optional<Tensor>& workspace13,
                       const std::optional<Tensor>& workspace2) {
  if (!workspace13) return workspace2 ? Workspace(to_bytes("workspace", *workspace2)) : Workspace();
  const std::span<std::byte> first = to_bytes("workspace13", *workspace13);
  return workspace2 ? Workspace(first, to_bytes("workspace", *workspace2)) : Workspace(first);
}

// What the three operators differ in.
struct Extras {
  std::span<const Tensor> weights = {};  // to compare with; empty = the watched ones
  const Tensor* expert_map = nullptr;
};

void run(std::int64_t plan, const Tensor& output, const Tensor& hidden, const Tensor& topk_weights,
         const Tensor& topk_ids, const Workspace& workspace, const Extras& extras) {
  const std::shared_ptr<PlanRecord> record = find_record(plan);
  const ThreadRunner runner = torch_runner(static_cast<int>(torch::stable::get_num_threads()));
  ApplyContext context;
  context.runner = &runner;
  if (extras.expert_map != nullptr) context.expert_map = to_map("expert_map", *extras.expert_map);
  const auto unchanged = record->check(extras.weights);
  record->plan().apply(to_matrix("output", output), to_matrix("hidden", hidden),
                       to_matrix("topk_weights", topk_weights), to_matrix("topk_ids", topk_ids),
                       workspace, context);
}

void apply(const Tensor& output, const Tensor& hidden, const Tensor& topk_weights,
           const Tensor& topk_ids, const std::optional<Tensor>& workspace, std::int64_t plan) {
  with_codes([&] {
    run(plan, output, hidden, topk_weights, topk_ids, to_workspace(std::nullopt, workspace), {});
  });
}

void apply_weights(const Tensor& output, const Tensor& hidden, const Tensor& topk_weights,
                   const Tensor& topk_ids, const std::optional<Tensor>& workspace,
                   const std::vector<Tensor>& weights, std::int64_t plan) {
  with_codes([&] {
    run(plan, output, hidden, topk_weights, topk_ids, to_workspace(std::nullopt, workspace),
        {weights, nullptr});
  });
}

void apply_lent(const Tensor& output, const Tensor& hidden, const Tensor& topk_weights,
                const Tensor& topk_ids, const std::optional<Tensor>& workspace13,
                const std::optional<Tensor>& workspace2, const std::optional<Tensor>& expert_map,
                std::int64_t plan) {
  with_codes([&] {
    run(plan, output, hidden, topk_weights, topk_ids, to_workspace(workspace13, workspace2),
        {{}, expert_map ? &*expert_map : nullptr});
  });
}

// --- What only fusedmoe.torch calls -----------------------------------------------------------

std::int64_t register_plan(std::int64_t native_plan, bool refresh, bool contents) {
  const auto& native = *reinterpret_cast<const python::NativePlan*>(native_plan);
  return add_record(std::make_shared<PlanRecord>(
      native, refresh ? StalePolicy::refresh : StalePolicy::raise, contents));
}

void unregister_plan(std::int64_t plan) { remove_record(plan); }

// native_weights: address of an ExpertWeights.
void watch(std::int64_t plan, std::int64_t native_weights, std::vector<Tensor> tensors,
           std::vector<std::int64_t> roles, std::int64_t before) {
  with_codes([&] {
    find_record(plan)->watch(*reinterpret_cast<const ExpertWeights*>(native_weights),
                             std::move(tensors), roles, static_cast<Before>(before));
  });
}

void reread(std::int64_t plan) {
  with_codes([&] { find_record(plan)->reread(); });
}

constexpr int kMostThreads = 4096;  // that a plan takes

// For plans, which cap the number of threads themselves.
std::int64_t thread_runner() {
  static const ThreadRunner runner = torch_runner(kMostThreads);
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(&runner));
}

}  // namespace
}  // namespace fusedmoe::torch_op

STABLE_TORCH_LIBRARY(fusedmoe, library) {
  library.def(
      "apply(Tensor(a!) output, Tensor hidden, Tensor topk_weights, Tensor topk_ids, "
      "Tensor(b!)? workspace, int plan) -> ()");
  library.def(
      "apply_weights(Tensor(a!) output, Tensor hidden, Tensor topk_weights, Tensor topk_ids, "
      "Tensor(b!)? workspace, Tensor[] weights, int plan) -> ()");
  library.def(
      "apply_lent(Tensor(a!) output, Tensor hidden, Tensor topk_weights, Tensor topk_ids, "
      "Tensor(b!)? workspace13, Tensor(c!)? workspace2, Tensor? expert_map, int plan) -> ()");
  library.def("_register(int native_plan, bool refresh, bool contents) -> int");
  library.def("_unregister(int plan) -> ()");
  library.def(
      "_watch(int plan, int native_weights, Tensor[] tensors, int[] roles, int before) -> ()");
  library.def("_reread(int plan) -> ()");
  library.def("_thread_runner() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(fusedmoe, CPU, library) {
  library.impl("apply", TORCH_BOX(&fusedmoe::torch_op::apply));
  library.impl("apply_weights", TORCH_BOX(&fusedmoe::torch_op::apply_weights));
  library.impl("apply_lent", TORCH_BOX(&fusedmoe::torch_op::apply_lent));
}

// Without tensors to choose a device by.
STABLE_TORCH_LIBRARY_IMPL(fusedmoe, CompositeExplicitAutograd, library) {
  library.impl("_register", TORCH_BOX(&fusedmoe::torch_op::register_plan));
  library.impl("_unregister", TORCH_BOX(&fusedmoe::torch_op::unregister_plan));
  library.impl("_watch", TORCH_BOX(&fusedmoe::torch_op::watch));
  library.impl("_reread", TORCH_BOX(&fusedmoe::torch_op::reread));
  library.impl("_thread_runner", TORCH_BOX(&fusedmoe::torch_op::thread_runner));
}
