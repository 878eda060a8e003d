// The key-value pairs of a GGUF header.
#pragma once

#include <cstdint>

#include "checkpoint/gguf_cursor.h"
#include "checkpoint/json_value.h"

namespace fusedmoe::checkpoint {

// Reads `count` pairs. Integers, floats, booleans, strings and short arrays of numbers become
// values; other arrays are stepped over. Throws Error{io} for a key that stands twice, an unknown
// type, or a length beyond the file.
JsonValue read_gguf_metadata(GgufCursor& cursor, std::uint64_t count);

}  // namespace fusedmoe::checkpoint
