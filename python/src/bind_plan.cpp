// FusedMoe: build, apply, refresh. The GIL is released while the library works.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "array.h"
#include "bindings.h"
#include "from_python.h"
#include "fusedmoe/error.h"
#include "fusedmoe/fused_moe.h"
#include "native_plan.h"
#include "workspace_argument.h"

namespace fusedmoe::python {
namespace {

nb::object named_tuple(const char* name) {
  return nb::module_::import_("fusedmoe.config").attr(name);
}

RefreshWait to_wait(bool wait) { return wait ? RefreshWait::wait : RefreshWait::no_wait; }

NativePlan create(nb::handle config, nb::handle weights, nb::handle options, bool hold_weights) {
  const MoeConfig moe_config = to_config(config);
  const OwnedOptions given = to_options(options);
  ExpertWeights views = to_weights(weights, given.options.device);
  const std::shared_ptr<const void> alive = views.owner;
  if (!hold_weights) views.owner = nullptr;
  NativePlan plan;
  plan.storage_owner = given.storage_owner;
  const nb::gil_scoped_release release;
  plan.plan = std::make_shared<FusedMoe>(FusedMoe::create(moe_config, views, given.options));
  return plan;
}

void check_on_device(const FusedMoe& plan, const char* name, const Array& array) {
  if (array.device.empty() == (plan.device().kind == DeviceKind::cpu)) return;
  refuse(name, "memory of " + to_string(plan.device()), array.text(),
         "move it, or build the plan on its device");
}

void apply(const NativePlan& self, nb::handle output, nb::handle hidden, nb::handle topk_weights,
           nb::handle topk_ids, nb::handle workspace, nb::handle workspace13, nb::handle expert_map,
           std::uintptr_t runner, std::uintptr_t queue) {
  const std::shared_ptr<FusedMoe> plan = self.plan;
  const auto matrix = [&](const char* name, nb::handle object, Access access) {
    const Array array = to_array(name, object, access);
    check_on_device(*plan, name, array);
    return to_matrix(name, array);
  };
  const MatrixView out = matrix("output", output, Access::write);
  const MatrixView in = matrix("hidden", hidden, Access::read);
  const MatrixView router = matrix("topk_weights", topk_weights, Access::read);
  const MatrixView ids = matrix("topk_ids", topk_ids, Access::read);
  const Workspace scratch = to_workspace(workspace, workspace13);
  std::vector<std::int32_t> map;
  if (!expert_map.is_none()) {
    map = nb::isinstance<ExpertMap>(expert_map)
              ? nb::cast<const ExpertMap&>(expert_map).resolve(plan->config().num_experts)
              : to_map("expert_map", expert_map);
  }
  ApplyContext context;
  context.runner = reinterpret_cast<const ThreadRunner*>(runner);
  context.queue = reinterpret_cast<void*>(queue);
  context.expert_map = map;
  const nb::gil_scoped_release release;
  plan->apply(out, in, router, ids, scratch, context);
}

void refresh(const NativePlan& self, nb::handle weights, bool wait) {
  const std::shared_ptr<FusedMoe> plan = self.plan;
  const ExpertWeights given = to_weights(weights, plan->device());
  const nb::gil_scoped_release release;
  plan->refresh(given, to_wait(wait));
}

void refresh_experts(const NativePlan& self, const std::vector<std::int64_t>& local_experts,
                     nb::handle weights, bool wait) {
  const std::shared_ptr<FusedMoe> plan = self.plan;
  const ExpertWeights given = to_weights(weights, plan->device());
  const nb::gil_scoped_release release;
  plan->refresh_experts(local_experts, given, to_wait(wait));
}

}  // namespace

void bind_plan(nb::module_& module) {
  nb::class_<NativePlan> plan(
      module, "FusedMoe", nb::is_final(),
      "A plan: one MoE layer built once from fixed weights, applied to whatever tokens arrive.\n\n"
      "Shareable: any number of threads may apply it at once, each with its own workspace. "
      "copy and deepcopy share it; it cannot be pickled: build it again from its weights.");
  plan.def_static(
      "create",
      [](nb::handle config, nb::handle weights, nb::handle options) {
        return create(config, weights, options, true);
      },
      nb::arg("config"), nb::arg("weights"), nb::arg("options") = nb::none(),
      nb::sig("def create(config: MoeConfig, weights: ExpertWeights | CheckpointWeights, options: "
              "PlanOptions | None = None) -> FusedMoe"),
      "Build a plan. Peak memory is the packed weights plus one expert.\n\n"
      "Raises InvalidArgument or Unsupported with the reason that supports() gives, OutOfMemory, "
      "or whatever weights.source raises. Safe from any thread.");
  plan.def_static(
      "supports",
      [](nb::handle config, nb::handle weights, nb::handle options) {
        Support support;
        try {
          const OwnedOptions plan_options = to_options(options);
          const ExpertWeights given = to_weights(weights, plan_options.options.device);
          support = FusedMoe::supports(to_config(config), given, plan_options.options);
        } catch (const Error& error) {  // what no struct of the library can say
          support = {false, error.what()};
        }
        return named_tuple("Support")(support.ok, support.reason);
      },
      nb::arg("config"), nb::arg("weights"), nb::arg("options") = nb::none(),
      nb::sig("def supports(config: MoeConfig, weights: ExpertWeights | CheckpointWeights, "
              "options: PlanOptions | None = None) -> Support"),
      "Whether create would accept these, and if not, why; reads shapes and formats, never "
      "weights.");
  plan.def_static(
      "packed_weights_size",
      [](nb::handle config, nb::handle weights, nb::handle options) {
        const OwnedOptions plan_options = to_options(options);
        const ExpertWeights given = to_weights(weights, plan_options.options.device);
        return from_size(
            FusedMoe::packed_weights_size(to_config(config), given, plan_options.options));
      },
      nb::arg("config"), nb::arg("weights"), nb::arg("options") = nb::none(),
      nb::sig("def packed_weights_size(config: MoeConfig, weights: ExpertWeights | "
              "CheckpointWeights, options: PlanOptions | None = None) -> WorkspaceSize"),
      "What PlanOptions.storage must hold for weight_storage caller and adopt.");

  plan.def(
      "workspace_size",
      [](const NativePlan& self, std::int64_t tokens) {
        return from_size(self.plan->workspace_size(tokens));
      },
      nb::arg("num_tokens"), nb::sig("def workspace_size(self, num_tokens: int) -> WorkspaceSize"),
      "Scratch for one call: exact, non-decreasing in num_tokens.");
  plan.def(
      "min_workspace_size",
      [](const NativePlan& self) { return from_size(self.plan->min_workspace_size()); },
      nb::sig("def min_workspace_size(self) -> WorkspaceSize"),
      "Enough for any number of tokens: apply then works through them in chunks.");
  plan.def_prop_ro(
      "workspace_formula",
      [](const NativePlan& self) {
        const WorkspaceFormula formula = self.plan->workspace_formula();
        return named_tuple("WorkspaceFormula")(formula.fixed, formula.per_token, formula.alignment);
      },
      nb::sig("def workspace_formula(self) -> WorkspaceFormula"),
      "bytes(n) = fixed + per_token * n: for sizes that are symbols.");
  plan.def(
      "workspace_sizes_13_2",
      [](const NativePlan& self, std::int64_t tokens) {
        const FusedMoe::TwoSpans sizes = self.plan->workspace_sizes_13_2(tokens);
        return nb::make_tuple(from_size(sizes.workspace13), from_size(sizes.workspace2));
      },
      nb::arg("num_tokens"),
      nb::sig("def workspace_sizes_13_2(self, num_tokens: int) -> tuple[WorkspaceSize, "
              "WorkspaceSize]"),
      "The same scratch as two spans, for engines that lend two.");

  plan.def(
      "apply", &apply, nb::arg("output"), nb::arg("hidden"), nb::arg("topk_weights"),
      nb::arg("topk_ids"), nb::arg("workspace") = nb::none(), nb::kw_only(),
      nb::arg("workspace13") = nb::none(), nb::arg("expert_map") = nb::none(),
      nb::arg("runner") = 0, nb::arg("queue") = 0,
      nb::sig("def apply(self, output: Array, hidden: Array, topk_weights: Array, topk_ids: Array, "
              "workspace: Workspace | None = None, *, workspace13: Array | None = None, "
              "expert_map: ExpertMap | Sequence[int] | Array | None = None, runner: int = 0, "
              "queue: int = 0) -> None"),
      "output[t] = sum over k of topk_weights[t, k] * expert(topk_ids[t, k])(hidden[t]).\n\n"
      "output        [num_tokens, hidden_size], config.output_dtype; may be exactly hidden\n"
      "hidden        [num_tokens, hidden_size], config.dtype\n"
      "topk_weights  [num_tokens, top_k], f32, f16 or bf16\n"
      "topk_ids      [num_tokens, top_k], int32 or int64, global ids; -1 skips the slot\n"
      "workspace     a WorkspaceBuffer, a lane of a WorkspacePool, or a writable contiguous array\n"
      "              of workspace_size(num_tokens).bytes or at least min_workspace_size().bytes,\n"
      "              aligned to 64 bytes; None allocates for this call\n"
      "workspace13   the first of two spans of workspace_sizes_13_2(num_tokens)\n"
      "expert_map    wins over the plan's map for this call\n"
      "runner        address of a C++ ThreadRunner; 0 = the plan's\n"
      "queue         address of a GPU's stream or queue\n\n"
      "Rows may be strided. Raises InvalidArgument (nothing was written), WorkspaceTooSmall, Busy "
      "(the workspace is in use) or StaleWeights. No tokens: succeeds and reads nothing.");

  plan.def("refresh", &refresh, nb::arg("weights"), nb::arg("wait") = true,
           nb::sig("def refresh(self, weights: ExpertWeights | CheckpointWeights, wait: bool = "
                   "True) -> None"),
           "Read all weights again, into the same memory. Shapes and formats must be those of "
           "create.\n\nWaits for running applies, or raises Busy. A refresh that fails while "
           "writing leaves the plan stale until one succeeds; a refused argument changes nothing.");
  plan.def("refresh_experts", &refresh_experts, nb::arg("local_experts"), nb::arg("weights"),
           nb::arg("wait") = true,
           nb::sig("def refresh_experts(self, local_experts: Sequence[int], weights: ExpertWeights "
                   "| CheckpointWeights, wait: bool = True) -> None"),
           "The same for some experts: weights hold one expert per entry, in that order.");
  plan.def(
      "release_weights",
      [](const NativePlan& self, bool wait) {
        const std::shared_ptr<FusedMoe> held = self.plan;
        const nb::gil_scoped_release release;
        held->release_weights(to_wait(wait));
      },
      nb::arg("wait") = true,
      "Give the memory of own packed weights back (sleep). Until refresh(), apply raises.");
  plan.def_prop_ro(
      "weights_version", [](const NativePlan& self) { return self.plan->weights_version(); },
      "Starts at 1 and counts successful refreshes.");

  plan.def(
      "describe", [](const NativePlan& self) { return self.plan->describe(); },
      "What was chosen and why, one line per stage.");
  plan.def(
      "counters",
      [](const NativePlan& self) {
        const Counters counters = self.plan->counters();
        return named_tuple("Counters")(counters.calls, counters.tokens, counters.rows_per_expert);
      },
      nb::sig("def counters(self) -> Counters"), "Needs PlanOptions.counters; otherwise all zero.");
  plan.def("reset_counters", [](const NativePlan& self) { self.plan->reset_counters(); });
  plan.def(
      "check_faults", [](const NativePlan& self) { self.plan->check_faults(); },
      "Faults that a device found without stopping; raises DeviceError. The CPU never has any.");
  plan.def_prop_ro(
      "config", [](const NativePlan& self) { return from_config(self.plan->config()); },
      nb::sig("def config(self) -> MoeConfig"));
  plan.def_prop_ro("device", [](const NativePlan& self) { return to_string(self.plan->device()); });
  plan.def_prop_ro("num_local_experts",
                   [](const NativePlan& self) { return self.plan->num_local_experts(); });
  plan.def_prop_ro(
      "weight_bytes", [](const NativePlan& self) { return self.plan->weight_bytes(); },
      "Bytes of packed weights, 0 when borrowed.");
  plan.def_prop_ro("num_threads", [](const NativePlan& self) { return self.plan->num_threads(); });

  plan.def("__copy__", [](nb::handle self) { return nb::borrow(self); });
  plan.def(
      "__deepcopy__", [](nb::handle self, nb::handle) { return nb::borrow(self); },
      nb::arg("memo"));
  plan.def("__reduce__", [](nb::handle) -> nb::object {
    throw nb::type_error("fusedmoe.FusedMoe cannot be pickled; build it again from its weights");
  });

  // For fusedmoe.torch: addresses for its operators, which keep the tensors themselves.
  plan.def_prop_ro("_native",
                   [](const NativePlan& self) { return reinterpret_cast<std::uintptr_t>(&self); });
  plan.def_static("_create_unheld", [](nb::handle config, nb::handle weights, nb::handle options) {
    return create(config, weights, options, false);
  });
  nb::class_<NativeWeights>(module, "_NativeWeights")
      .def(
          "__init__",
          [](NativeWeights* self, nb::handle weights, const std::string& device) {
            new (self) NativeWeights{to_weights(weights, parse_device(device))};
          },
          nb::arg("weights"), nb::arg("device"))
      .def_prop_ro("address", [](const NativeWeights& self) {
        return reinterpret_cast<std::uintptr_t>(&self.weights);
      });
}

}  // namespace fusedmoe::python
