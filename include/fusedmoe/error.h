// The one exception of the library. Every message names the argument, what came, what was expected
// and what to do.
#pragma once

#include <stdexcept>
#include <string>

#include "fusedmoe/export.h"

namespace fusedmoe {

enum class ErrorCode {
  invalid_argument = 1,  // a size, pointer, dtype, shape or id that is wrong; nothing was written
  unsupported,           // sound, but this build or device does not do it; the message says why
  stale_weights,         // the weights changed, were released, or a refresh failed: call refresh()
  workspace_too_small,   // less than min_workspace_size(); the message says need and have
  busy,                  // the workspace or the weights are in use by another call
  out_of_memory,
  device,    // an asynchronous fault of a device, or its driver refused a call
  io,        // a file is missing, broken, or not what it claims to be
  internal,  // a defect of this library: please report it
};

// "invalid_argument" and so on.
FUSEDMOE_EXPORT const char* to_string(ErrorCode code) noexcept;

class FUSEDMOE_EXPORT Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ~Error() override;
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace fusedmoe
