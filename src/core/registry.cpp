// The backends of this build: one line each.
#include <array>
#include <string>

#include "core/backend.h"
#include "fusedmoe/error.h"

namespace fusedmoe {

#ifdef FUSEDMOE_CPU
const Backend& cpu_backend();
#endif

namespace {

struct Entry {
  DeviceKind kind;
  const char* name;
  const Backend& (*get)();  // null: not in this build
  const char* missing;      // why, and what to do
};

constexpr std::array kBackends = {
#ifdef FUSEDMOE_CPU
    Entry{DeviceKind::cpu, "cpu", &cpu_backend, ""},
#else
    Entry{DeviceKind::cpu, "cpu", nullptr, "this build has no CPU backend; set FUSEDMOE_CPU=ON"},
#endif
    Entry{DeviceKind::cuda, "cuda", nullptr, "this version has no CUDA backend yet"},
    Entry{DeviceKind::xpu, "xpu", nullptr, "this version has no Intel GPU backend yet"},
};

}  // namespace

const Backend& backend_for(const Device& device) {
  for (const Entry& entry : kBackends) {
    if (entry.kind != device.kind) continue;
    if (entry.get != nullptr) return entry.get();
    throw Error(ErrorCode::unsupported,
                "device: " + to_string(device) + " is not available: " + entry.missing +
                    "; use a device that `fusedmoe info` lists as available");
  }
  throw Error(ErrorCode::invalid_argument, "device.kind: expected cpu, cuda or xpu, got " +
                                               std::to_string(static_cast<int>(device.kind)) +
                                               "; name one of these");
}

std::vector<DeviceInfo> list_devices() {
  std::vector<DeviceInfo> devices;
  devices.reserve(kBackends.size());
  for (const Entry& entry : kBackends) {
    devices.push_back(entry.get != nullptr ? entry.get().info()
                                           : DeviceInfo{entry.name, false, entry.missing});
  }
  return devices;
}

}  // namespace fusedmoe
