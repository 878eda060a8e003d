// Names and sizes of element types.
#include "checkpoint/tensor_source.h"

#include <algorithm>
#include <iterator>

namespace fusedmoe::checkpoint {
namespace {

struct TypeRow {
  TensorType type;
  const char* name;
  std::int64_t bits;
};

// In the order of the enumeration.
constexpr TypeRow kTypes[] = {
    {TensorType::boolean, "BOOL", 8},
    {TensorType::f4, "F4", 4},
    {TensorType::f6_e2m3, "F6_E2M3", 6},
    {TensorType::f6_e3m2, "F6_E3M2", 6},
    {TensorType::u8, "U8", 8},
    {TensorType::i8, "I8", 8},
    {TensorType::f8_e5m2, "F8_E5M2", 8},
    {TensorType::f8_e4m3, "F8_E4M3", 8},
    {TensorType::f8_e8m0, "F8_E8M0", 8},
    {TensorType::f8_e4m3fnuz, "F8_E4M3FNUZ", 8},
    {TensorType::f8_e5m2fnuz, "F8_E5M2FNUZ", 8},
    {TensorType::i16, "I16", 16},
    {TensorType::u16, "U16", 16},
    {TensorType::f16, "F16", 16},
    {TensorType::bf16, "BF16", 16},
    {TensorType::i32, "I32", 32},
    {TensorType::u32, "U32", 32},
    {TensorType::f32, "F32", 32},
    {TensorType::c64, "C64", 64},
    {TensorType::f64, "F64", 64},
    {TensorType::i64, "I64", 64},
    {TensorType::u64, "U64", 64},
};

constexpr bool in_order() {
  for (std::size_t i = 0; i < std::size(kTypes); ++i) {
    if (static_cast<std::size_t>(kTypes[i].type) != i) return false;
  }
  return true;
}
static_assert(in_order());

}  // namespace

const char* to_string(TensorType type) noexcept {
  return kTypes[static_cast<std::size_t>(type)].name;
}

std::optional<TensorType> parse_tensor_type(std::string_view name) noexcept {
  const auto* const row =
      std::find_if(std::begin(kTypes), std::end(kTypes),
                   [name](const TypeRow& candidate) { return candidate.name == name; });
  if (row == std::end(kTypes)) return std::nullopt;
  return row->type;
}

std::int64_t bits_per_element(TensorType type) noexcept {
  return kTypes[static_cast<std::size_t>(type)].bits;
}

}  // namespace fusedmoe::checkpoint
