// What the functions of the C ABI share: the handles, the guard that turns every exception into a
// status, and text into the caller's buffer.
#pragma once

#include <cstddef>
#include <exception>
#include <new>
#include <string_view>

#include "core/c_api_convert.h"
#include "fusedmoe/error.h"
#include "fusedmoe/fused_moe.h"
#include "fusedmoe/workspace.h"

struct fusedmoe_plan {
  fusedmoe::FusedMoe moe;
  fusedmoe_activation_config activation;  // what fusedmoe_plan_config() points to
};

struct fusedmoe_workspace_buffer {
  fusedmoe::WorkspaceBuffer buffer;
};

struct fusedmoe_workspace_pool {
  fusedmoe::WorkspacePool pool;
};

namespace fusedmoe::c_api {

// Stores the text as the thread's last error. Returns the code.
fusedmoe_status report(ErrorCode code, const char* text) noexcept;

template <class Body>
fusedmoe_status guarded(Body&& body) noexcept {
  try {
    body();
    return FUSEDMOE_OK;
  } catch (const Error& error) {
    return report(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    return report(ErrorCode::out_of_memory, "out of memory: an allocation on the host failed");
  } catch (const std::exception& error) {
    return report(ErrorCode::internal, error.what());
  } catch (...) {
    return report(ErrorCode::internal, "an exception of an unknown type");
  }
}

// Text into a buffer, as the head of fusedmoe_c.h describes it.
class TextOut {
 public:
  TextOut(const char* name, char* text, std::size_t bytes, std::size_t* needed)
      : text_(text), bytes_(bytes), needed_(needed) {
    if (bytes > 0) need_pointer({name}, text);
  }
  void put(std::string_view value) const noexcept {
    if (needed_ != nullptr) *needed_ = value.size() + 1;
    if (bytes_ == 0) return;
    const std::size_t count = value.copy(text_, bytes_ - 1);
    text_[count] = '\0';
  }

 private:
  char* text_;
  std::size_t bytes_;
  std::size_t* needed_;
};

template <class T>
void put_optional(T* out, T value) noexcept {
  if (out != nullptr) *out = value;
}

}  // namespace fusedmoe::c_api
