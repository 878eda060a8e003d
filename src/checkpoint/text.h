// Text for messages: names that came from a file are quoted, shortened and made printable.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "fusedmoe/error.h"

namespace fusedmoe::checkpoint {

// 'name', control characters as \xNN, long names cut. For text that is known to be UTF-8.
std::string quote(std::string_view name);

// Everything that is not printable ASCII as \xNN. For text that may be anything.
std::string printable_ascii(std::string_view text);

// [4, 144, 96]
std::string shape_text(std::span<const std::int64_t> shape);

// Throws Error{io} with "file: text".
[[noreturn]] void fail_io(std::string_view file, std::string_view text);

}  // namespace fusedmoe::checkpoint
