// The CPU as a device: what it supports, and its memory.
#include <algorithm>
#include <new>
#include <string>

#include "backends/cpu/cpu_isa.h"
#include "backends/cpu/cpu_plan.h"
#include "backends/cpu/numa.h"
#include "backends/cpu/panel_format.h"
#include "backends/cpu/thread_pool.h"
#include "core/backend.h"
#include "fusedmoe/error.h"

namespace fusedmoe {
namespace cpu {
namespace {

// Tables of 8 bytes per expert lie in the workspace's fixed part, which stays below 1 MiB.
constexpr std::int64_t kMaxLocalExperts = 65536;

PackedLayout packed_layout(const PlanSpec& spec, const ExpertWeights& weights) {
  return {spec, weights, choose_kernels(spec, weights), static_cast<int>(numa_nodes().size())};
}

void check_storage(const PlanSpec& spec, const ExpertWeights& weights) {
  using Storage = fusedmoe::WeightStorage;
  const Storage storage = spec.options.weight_storage;
  const std::span<std::byte> given = spec.options.storage;
  const auto refuse = [](const std::string& expected, const std::string& got,
                         const std::string& remedy) {
    throw Error(ErrorCode::invalid_argument,
                "options.storage: expected " + expected + ", got " + got + "; " + remedy);
  };
  if (storage != Storage::caller && storage != Storage::adopt) {
    if (!given.empty()) {
      refuse("nothing for weight_storage own or borrowed", std::to_string(given.size()) + " bytes",
             "set weight_storage to caller or adopt");
    }
    if (storage == Storage::borrowed && weights.source) {
      throw Error(ErrorCode::invalid_argument,
                  "weights.source: expected whole tensors for weight_storage borrowed, got a "
                  "source; its views do not outlive the call: give stacks, or pack");
    }
    return;
  }
  const std::int64_t need = packed_layout(spec, weights).storage_bytes();
  if (static_cast<std::int64_t>(given.size()) < need) {
    refuse("at least " + std::to_string(need) + " bytes", std::to_string(given.size()),
           "allocate packed_weights_size()");
  }
  if (reinterpret_cast<std::uintptr_t>(given.data()) % 64 != 0) {
    refuse("an address that is a multiple of 64", "another", "align it");
  }
}

// Mode a8 needs integer multipliers. Its scalar kernels are for tests, and for whoever asks for
// them by name: nobody gets them instead of fast ones.
void check_kernels(const PlanSpec& spec, const ExpertWeights& weights) {
  check_panel_format("weights.w13", weights.w13);
  check_panel_format("weights.w2", weights.w2);
  if (spec.options.mode != ComputeMode::a8) return;
  const CpuIsa isa = choose_isa(spec.options.isa);
  for (const WeightFormat format : {weights.w13.format, weights.w2.format}) {
    const GemmKernel* kernel = find_gemm(isa, format, spec.config.dtype, ComputeMode::a8);
    if (kernel == nullptr) {
      throw Error(ErrorCode::unsupported,
                  std::string("options.mode: expected a16 for ") + fusedmoe::to_string(format) +
                      " weights, got a8, which multiplies int8 and int4; use a16");
    }
    if (kernel->isa == CpuIsa::scalar && isa != CpuIsa::scalar) {
      throw Error(ErrorCode::unsupported,
                  std::string("options.mode: expected a16 on instruction set ") + to_string(isa) +
                      ", got a8, which needs avx512_vnni or better; use a16, or ask for the scalar "
                      "kernels with options.isa = scalar");
    }
  }
}

class CpuBackend final : public Backend {
 public:
  DeviceKind kind() const override { return DeviceKind::cpu; }

  DeviceInfo info() const override {
    try {
      return {"cpu", true, std::string("instruction set ") + to_string(choose_isa(""))};
    } catch (const Error& error) {  // FUSEDMOE_ISA: a list of devices is no place to refuse it
      return {"cpu", true, error.what()};
    }
  }

  void check_support(const PlanSpec& spec, const ExpertWeights& weights) const override {
    if (spec.num_local_experts > kMaxLocalExperts) {
      throw Error(ErrorCode::unsupported,
                  "config.num_experts: expected at most " + std::to_string(kMaxLocalExperts) +
                      " local experts, got " + std::to_string(spec.num_local_experts) +
                      "; spread them over ranks");
    }
    if (spec.options.device.index != 0) {
      throw Error(ErrorCode::invalid_argument,
                  "options.device.index: expected 0 for the CPU, got " +
                      std::to_string(spec.options.device.index) + "; use Device::cpu()");
    }
    if (!spec.options.device.platform.empty()) {
      throw Error(ErrorCode::invalid_argument,
                  "options.device.platform: expected none for the CPU, got '" +
                      spec.options.device.platform + "'; use Device::cpu()");
    }
    choose_isa(spec.options.isa);  // refuses unknown names
    numa_nodes();                  // and what is no number of nodes
    if (spec.num_local_experts > 0) check_kernels(spec, weights);
    check_storage(spec, weights);
  }

  WorkspaceSize packed_weights_size(const PlanSpec& spec,
                                    const ExpertWeights& weights) const override {
    return {packed_layout(spec, weights).storage_bytes(), 64};
  }

  std::unique_ptr<BackendPlan> create(const PlanSpec& spec,
                                      const ExpertWeights& weights) const override {
    int threads = spec.options.max_threads;
    if (threads == 0) threads = spec.runner ? spec.runner->num_threads : available_threads();
    if (!spec.runner) ThreadPool::instance().ensure(threads);
    return std::make_unique<CpuPlan>(spec, weights, choose_kernels(spec, weights), threads);
  }

  std::byte* allocate(const Device&, WorkspaceSize size) const override {
    // Never empty, so that null means failure.
    void* data =
        ::operator new(static_cast<std::size_t>(std::max<std::int64_t>(size.bytes, 1)),
                       std::align_val_t(static_cast<std::size_t>(size.alignment)), std::nothrow);
    if (data != nullptr) return static_cast<std::byte*>(data);
    throw Error(ErrorCode::out_of_memory, "workspace: expected " + std::to_string(size.bytes) +
                                              " bytes, got none from the system; lend a smaller "
                                              "workspace: apply works in chunks");
  }

  void deallocate(const Device&, std::byte* data, WorkspaceSize size) const override {
    ::operator delete(data, std::align_val_t(static_cast<std::size_t>(size.alignment)));
  }
};

}  // namespace
}  // namespace cpu

const Backend& cpu_backend() {
  static const cpu::CpuBackend backend;
  return backend;
}

}  // namespace fusedmoe
