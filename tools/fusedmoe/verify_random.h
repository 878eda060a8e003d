// `fusedmoe verify --random N`: draws layers, calls and plans of every kind, and checks each.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "device_option.h"
#include "report.h"

namespace fusedmoe::tool {

struct RandomVerifyOptions {
  std::int64_t cases = 0;
  std::uint64_t seed = 1;
  DeviceOptions device;
};

// Returns the exit code. Every failure prints, on stderr, the line that repeats it.
int verify_random(const RandomVerifyOptions& options, Report& report);

}  // namespace fusedmoe::tool
