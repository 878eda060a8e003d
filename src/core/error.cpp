// Names of enums, the version, and the key function of Error.
#include "fusedmoe/error.h"

#include <array>
#include <string>

#include "fusedmoe/config.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/version.h"
#include "fusedmoe/weights.h"

namespace fusedmoe {
namespace {

template <class Enum, std::size_t kCount>
const char* name_of(Enum value, const std::array<const char*, kCount>& names) noexcept {
  const auto index = static_cast<std::size_t>(value);
  return index < kCount ? names[index] : "unknown";
}

}  // namespace

Error::~Error() = default;

const char* version() noexcept { return FUSEDMOE_VERSION; }

const char* to_string(ErrorCode code) noexcept {
  static constexpr std::array kNames = {"ok",
                                        "invalid_argument",
                                        "unsupported",
                                        "stale_weights",
                                        "workspace_too_small",
                                        "busy",
                                        "out_of_memory",
                                        "device",
                                        "io",
                                        "internal"};
  return name_of(code, kNames);
}

const char* to_string(DType dtype) noexcept {
  static constexpr std::array kNames = {"float32", "float16", "bfloat16", "int32", "int64",
                                        "float64", "int8",    "int16",    "uint8"};
  return name_of(dtype, kNames);
}

std::int64_t bytes_per_element(DType dtype) noexcept {
  static constexpr std::array<std::int64_t, 9> kBytes = {4, 2, 2, 4, 8, 8, 1, 2, 1};
  const auto index = static_cast<std::size_t>(dtype);
  return index < kBytes.size() ? kBytes[index] : 0;
}

const char* to_string(Activation activation) noexcept {
  static constexpr std::array kNames = {"silu",       "gelu", "gelu_tanh", "swigluoai",
                                        "swiglustep", "situ", "relu2"};
  return name_of(activation, kNames);
}

bool is_gated(Activation activation) noexcept { return activation != Activation::relu2; }

const char* to_string(GateUpLayout layout) noexcept {
  static constexpr std::array kNames = {"halves", "interleaved"};
  return name_of(layout, kNames);
}

const char* to_string(GateUpOrder order) noexcept {
  static constexpr std::array kNames = {"gate_up", "up_gate"};
  return name_of(order, kNames);
}

const char* to_string(WeightLayout layout) noexcept {
  static constexpr std::array kNames = {"[E, N, K]", "[E, K, N]"};
  return name_of(layout, kNames);
}

std::string to_string(const Device& device) {
  switch (device.kind) {
    case DeviceKind::cpu:
      return "cpu";
    case DeviceKind::cuda:
      return "cuda:" + std::to_string(device.index);
    case DeviceKind::xpu:
      return "xpu:" + (device.platform.empty() ? std::to_string(device.index) : device.platform);
  }
  return "unknown";
}

Device parse_device(const std::string& text) {
  const auto colon = text.find(':');
  const std::string kind = text.substr(0, colon);
  const std::string rest = colon == std::string::npos ? "" : text.substr(colon + 1);
  const bool is_index =
      !rest.empty() && rest.size() <= 6 && rest.find_first_not_of("0123456789") == rest.npos;
  if (kind == "cpu" && colon == std::string::npos) return Device::cpu();
  if (kind == "cuda" && (colon == std::string::npos || is_index)) {
    return Device::cuda(is_index ? std::stoi(rest) : 0);
  }
  if (kind == "xpu" && (colon == std::string::npos || !rest.empty())) {
    if (is_index || rest.empty()) return Device::xpu(is_index ? std::stoi(rest) : 0);
    Device device = Device::xpu();
    device.platform = rest;
    return device;
  }
  throw Error(ErrorCode::invalid_argument,
              "device: expected cpu, cuda, cuda:N, xpu, xpu:N or xpu:PLATFORM, got '" + text +
                  "'; name one of these");
}

}  // namespace fusedmoe
