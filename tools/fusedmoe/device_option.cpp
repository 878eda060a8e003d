#include "device_option.h"

#include <CLI/CLI.hpp>

#include "cpu_facts.h"
#include "fusedmoe/fused_moe.h"

namespace fusedmoe::tool {

void add_device_options(CLI::App& app, DeviceOptions& options) {
  app.add_option("--device", options.device, "cpu, cuda:1, xpu:pocl, ...")
      ->type_name("NAME")
      ->capture_default_str();
  app.add_option("--isa", options.isa, "The best instruction set to use, as `info` names them")
      ->type_name("NAME");
  app.add_option("--threads", options.threads, "CPU threads; 0 = all that the process may use")
      ->type_name("N")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
}

PlanOptions plan_options(const DeviceOptions& options) {
  const Device device = parse_device(options.device);
  const std::string kind = to_string(Device{device.kind, 0, {}});
  for (const DeviceInfo& info : list_devices()) {
    if (!info.available && (info.name == options.device || info.name == kind)) {
      throw DeviceNotAvailable(
          "--device: expected one that `fusedmoe info` lists as available, "
          "got " +
          options.device + ": " + info.reason);
    }
  }
  PlanOptions plan;
  plan.device = device;
  plan.isa = options.isa;
  plan.max_threads = options.threads;
  (void)chosen_isa(plan);
  return plan;
}

std::string chosen_isa(const PlanOptions& options) {
  return options.device.kind == DeviceKind::cpu ? cpu_isa_name(options.isa) : std::string();
}

}  // namespace fusedmoe::tool
