// Structs of the C ABI -> structs of the C++ API. Every function throws Error{invalid_argument}
// that names the field; the functions of the ABI are in c_api.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "fusedmoe/fused_moe.h"
#include "fusedmoe/fusedmoe_c.h"
#include "fusedmoe/routing.h"

namespace fusedmoe::c_api {

// Where a value came from, for messages: "config" > "activation" > "kind". Costs nothing until a
// message needs it.
struct Path {
  const char* name = "";
  const Path* parent = nullptr;

  std::string text() const { return parent == nullptr ? name : parent->text() + "." + name; }
};

// Throws "path: expected ..., got ...; remedy".
[[noreturn]] void refuse(const Path& path, const std::string& expected, const std::string& got,
                         const std::string& remedy);
void need_pointer(const Path& path, const void* pointer);
// For arrays and spans: throws for a negative count, and for null with a count above 0.
void need_array(const Path& path, const void* data, const char* count_name, std::int64_t count);
void need_range(const Path& path, std::int64_t value, std::int64_t first, std::int64_t last,
                const char* values);

template <class Enum>
Enum to_enum(const Path& path, std::int32_t value, Enum last, const char* values) {
  need_range(path, value, 0, static_cast<std::int64_t>(last), values);
  return static_cast<Enum>(value);
}

// 0 or 1; 0 alone; a FUSEDMOE_DTYPE_* value that is set.
bool to_bool(const Path& path, std::int32_t value);
void need_zero(const Path& parent, std::int32_t reserved);
DType to_dtype(const Path& path, std::int32_t value);

// Structs above this size are taken for garbage in struct_size.
inline constexpr std::size_t kMaxStructSize = 4096;

// Checks struct_size by the rules of fusedmoe_c.h. `head` = bytes of the mandatory fields, `known`
// = sizeof here, `alignment` = that of the struct.
void check_struct_size(const Path& path, const void* data, std::size_t head, std::size_t known,
                       std::size_t alignment);

// Overlays what the caller has onto `into`, which holds the defaults.
template <class Struct>
void read_struct(const Path& path, const Struct* from, std::size_t head, Struct& into) {
  need_pointer(path, from);
  check_struct_size(path, from, head, sizeof(Struct), alignof(Struct));
  const std::size_t size = from->struct_size;
  std::memcpy(&into, from, size < sizeof(Struct) ? size : sizeof(Struct));
  into.struct_size = size;
}

// The same for a struct that the library fills: as much of `from` as the caller has room for.
template <class Struct>
void write_struct(const Path& path, const Struct& from, std::size_t head, Struct* into) {
  need_pointer(path, into);
  check_struct_size(path, into, head, sizeof(Struct), alignof(Struct));
  const std::size_t size = into->struct_size;
  std::memcpy(into, &from, size < sizeof(Struct) ? size : sizeof(Struct));
  into->struct_size = size;
}

// Null is refused unless the comment names another meaning.
MoeConfig to_config(const Path& path, const fusedmoe_moe_config* from);
Device to_device(const Path& path, const fusedmoe_device* from);             // null = CPU
ExpertMap to_expert_map(const Path& path, const fusedmoe_expert_map* from);  // null = identity
ThreadRunner to_runner(const Path& path, const fusedmoe_thread_runner* from);
ExpertWeights to_weights(const Path& path,
                         const fusedmoe_expert_weights* from);  // c_api_weights.cpp
RoutingConfig to_routing(const Path& path, const fusedmoe_routing_config* from);
MatrixView to_matrix(const Path& path, const fusedmoe_matrix* from);
ConstMatrixView to_matrix(const Path& path, const fusedmoe_const_matrix* from);
Workspace to_workspace(const Path& path, const fusedmoe_workspace* from);  // null = allocate

// PlanOptions and ApplyContext point to a runner, so each travels together with its own.
struct OptionsHolder {
  OptionsHolder(const Path& path, const fusedmoe_plan_options* from);  // null = defaults
  OptionsHolder(const OptionsHolder&) = delete;
  OptionsHolder& operator=(const OptionsHolder&) = delete;

  ThreadRunner runner = {};
  PlanOptions options = {};
};
struct ContextHolder {
  ContextHolder(const Path& path, const fusedmoe_apply_context* from);  // null = defaults
  ContextHolder(const ContextHolder&) = delete;
  ContextHolder& operator=(const ContextHolder&) = delete;

  ThreadRunner runner = {};
  ApplyContext context = {};
};

// The other direction. `activation` and `platform` must outlive what points to them.
fusedmoe_activation_config from_activation(const ActivationConfig& activation);
void write_config(const Path& path, const MoeConfig& from,
                  const fusedmoe_activation_config& activation, fusedmoe_moe_config* into);
// platform: where from.platform is kept; unused when that is empty.
void write_device(const Path& path, const Device& from, const char* platform,
                  fusedmoe_device* into);
void write_workspace(const Path& path, const Workspace& from, fusedmoe_workspace* into);

}  // namespace fusedmoe::c_api
