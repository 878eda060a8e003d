// The runtime's std::bad_alloc as the library's own exception; all others pass through.
#pragma once

#include <new>
#include <string>

#include "fusedmoe/error.h"

namespace fusedmoe {

// what: the function or argument that the message names.
template <class F>
auto translate(const char* what, const F& f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::out_of_memory,
                std::string(what) + ": expected memory, got none; free some, or give storage");
  }
}

}  // namespace fusedmoe
