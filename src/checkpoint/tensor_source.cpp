// Names and sizes of element types.
#include "checkpoint/tensor_source.h"

#include <algorithm>
#include <iterator>

namespace fusedmoe::checkpoint {
namespace {

constexpr int kNone = -1;

struct TypeRow {
  TensorType type;
  const char* name;
  TypeBlock block;
  int ggml = kNone;  // the number in a GGUF file
  bool in_safetensors = true;
};

// In the order of the enumeration.
constexpr TypeRow kTypes[] = {
    {TensorType::boolean, "BOOL", {1, 1}},
    {TensorType::f4, "F4", {2, 1}},
    {TensorType::f6_e2m3, "F6_E2M3", {4, 3}},
    {TensorType::f6_e3m2, "F6_E3M2", {4, 3}},
    {TensorType::u8, "U8", {1, 1}},
    {TensorType::i8, "I8", {1, 1}, 24},
    {TensorType::f8_e5m2, "F8_E5M2", {1, 1}},
    {TensorType::f8_e4m3, "F8_E4M3", {1, 1}},
    {TensorType::f8_e8m0, "F8_E8M0", {1, 1}},
    {TensorType::f8_e4m3fnuz, "F8_E4M3FNUZ", {1, 1}},
    {TensorType::f8_e5m2fnuz, "F8_E5M2FNUZ", {1, 1}},
    {TensorType::i16, "I16", {1, 2}, 25},
    {TensorType::u16, "U16", {1, 2}},
    {TensorType::f16, "F16", {1, 2}, 1},
    {TensorType::bf16, "BF16", {1, 2}, 30},
    {TensorType::i32, "I32", {1, 4}, 26},
    {TensorType::u32, "U32", {1, 4}},
    {TensorType::f32, "F32", {1, 4}, 0},
    {TensorType::c64, "C64", {1, 8}},
    {TensorType::f64, "F64", {1, 8}, 28},
    {TensorType::i64, "I64", {1, 8}, 27},
    {TensorType::u64, "U64", {1, 8}},
    {TensorType::q4_0, "Q4_0", {32, 18}, 2, false},
    {TensorType::q4_1, "Q4_1", {32, 20}, 3, false},
    {TensorType::q5_0, "Q5_0", {32, 22}, 6, false},
    {TensorType::q5_1, "Q5_1", {32, 24}, 7, false},
    {TensorType::q8_0, "Q8_0", {32, 34}, 8, false},
    {TensorType::q8_1, "Q8_1", {32, 36}, 9, false},
    {TensorType::q2_k, "Q2_K", {256, 84}, 10, false},
    {TensorType::q3_k, "Q3_K", {256, 110}, 11, false},
    {TensorType::q4_k, "Q4_K", {256, 144}, 12, false},
    {TensorType::q5_k, "Q5_K", {256, 176}, 13, false},
    {TensorType::q6_k, "Q6_K", {256, 210}, 14, false},
    {TensorType::q8_k, "Q8_K", {256, 292}, 15, false},
    {TensorType::iq2_xxs, "IQ2_XXS", {256, 66}, 16, false},
    {TensorType::iq2_xs, "IQ2_XS", {256, 74}, 17, false},
    {TensorType::iq3_xxs, "IQ3_XXS", {256, 98}, 18, false},
    {TensorType::iq1_s, "IQ1_S", {256, 50}, 19, false},
    {TensorType::iq4_nl, "IQ4_NL", {32, 18}, 20, false},
    {TensorType::iq3_s, "IQ3_S", {256, 110}, 21, false},
    {TensorType::iq2_s, "IQ2_S", {256, 82}, 22, false},
    {TensorType::iq4_xs, "IQ4_XS", {256, 136}, 23, false},
    {TensorType::iq1_m, "IQ1_M", {256, 56}, 29, false},
    {TensorType::tq1_0, "TQ1_0", {256, 54}, 34, false},
    {TensorType::tq2_0, "TQ2_0", {256, 66}, 35, false},
    {TensorType::mxfp4, "MXFP4", {32, 17}, 39, false},
    {TensorType::nvfp4, "NVFP4", {64, 36}, 40, false},
};

constexpr bool in_order() {
  for (std::size_t i = 0; i < std::size(kTypes); ++i) {
    if (static_cast<std::size_t>(kTypes[i].type) != i) return false;
  }
  return true;
}
static_assert(in_order());

template <typename Predicate>
std::optional<TensorType> find_type(Predicate&& predicate) noexcept {
  const auto* const row = std::find_if(std::begin(kTypes), std::end(kTypes), predicate);
  if (row == std::end(kTypes)) return std::nullopt;
  return row->type;
}

}  // namespace

const char* to_string(TensorType type) noexcept {
  return kTypes[static_cast<std::size_t>(type)].name;
}

std::optional<TensorType> parse_tensor_type(std::string_view name) noexcept {
  return find_type([name](const TypeRow& row) { return row.in_safetensors && row.name == name; });
}

std::optional<TensorType> ggml_tensor_type(std::uint32_t number) noexcept {
  return find_type([number](const TypeRow& row) {
    return row.ggml != kNone && static_cast<std::uint32_t>(row.ggml) == number;
  });
}

TypeBlock block_of(TensorType type) noexcept {
  return kTypes[static_cast<std::size_t>(type)].block;
}

std::int64_t bits_per_element(TensorType type) noexcept {
  const TypeBlock block = block_of(type);
  return block.bytes * 8 / block.elements;
}

}  // namespace fusedmoe::checkpoint
