// --device, --isa and --threads of the verbs that run layers, and the exit code for a device that
// is not there.
#pragma once

#include <string>

#include "fusedmoe/config.h"
#include "fusedmoe/error.h"

namespace CLI {
class App;
}

namespace fusedmoe::tool {

// A device that this build or this machine does not have: exit code 3.
class DeviceNotAvailable : public Error {
 public:
  explicit DeviceNotAvailable(const std::string& message) : Error(ErrorCode::device, message) {}
};

struct DeviceOptions {
  std::string device = "cpu";
  std::string isa;  // empty = the machine's best
  int threads = 0;  // 0 = as many as the process may use
};

// `options` must outlive parsing.
void add_device_options(CLI::App& app, DeviceOptions& options);

// device, isa and max_threads of a plan. Throws DeviceNotAvailable with the reason that `info`
// gives, and invalid_argument for a text that names no device.
PlanOptions plan_options(const DeviceOptions& options);

// The instruction set that a plan with these options uses, by name. Throws invalid_argument for an
// unknown one, also in FUSEDMOE_ISA.
std::string chosen_isa(const PlanOptions& options);

}  // namespace fusedmoe::tool
