// Implementation of expert_names.h.
#include "checkpoint/expert_names.h"

#include <limits>

namespace fusedmoe::checkpoint {
namespace {

constexpr std::string_view kLayer = "{L}";
constexpr std::string_view kExpert = "{E}";
constexpr std::string_view kWeight = ".weight";

bool is_digit(char c) noexcept { return c >= '0' && c <= '9'; }

// Takes a decimal number without leading zeros off the front of `text`.
std::optional<std::int64_t> take_number(std::string_view& text) noexcept {
  std::size_t length = 0;
  while (length < text.size() && is_digit(text[length])) ++length;
  if (length == 0 || (length > 1 && text[0] == '0')) return std::nullopt;
  std::int64_t value = 0;
  for (const char c : text.substr(0, length)) {
    if (__builtin_mul_overflow(value, 10, &value) ||
        __builtin_add_overflow(value, c - '0', &value)) {
      value = std::numeric_limits<std::int64_t>::max();
      break;
    }
  }
  text.remove_prefix(length);
  return value;
}

bool take_prefix(std::string_view& text, std::string_view prefix) noexcept {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

// Takes a pattern, with the expert's number in place of its mark, off the front of `text`; 0 for a
// pattern without a mark.
std::optional<std::int64_t> take_pattern(std::string_view& text,
                                         std::string_view pattern) noexcept {
  const std::size_t mark = pattern.find(kExpert);
  if (mark == std::string_view::npos) {
    return take_prefix(text, pattern) ? std::optional<std::int64_t>(0) : std::nullopt;
  }
  if (!take_prefix(text, pattern.substr(0, mark))) return std::nullopt;
  const std::optional<std::int64_t> expert = take_number(text);
  if (!expert || !take_prefix(text, pattern.substr(mark + kExpert.size()))) return std::nullopt;
  return expert;
}

// What stands before the suffix of a part.
std::string_view stem_of(std::string_view pattern) noexcept {
  if (pattern.ends_with(kWeight)) pattern.remove_suffix(kWeight.size());
  return pattern;
}

// A part's suffix behind that stem.
std::string_view suffix_of(std::string_view pattern, std::string_view suffix) noexcept {
  if (!pattern.ends_with(kWeight) && suffix.starts_with(kWeight)) {
    suffix.remove_prefix(kWeight.size());
  }
  return suffix;
}

struct MatchedPart {
  Part part = Part::data;
  std::int64_t expert = 0;
};

std::optional<MatchedPart> match_part(std::string_view text, const TensorPattern& pattern,
                                      const StorageLayout& layout) noexcept {
  if (is_bias(pattern.matrix)) {
    const std::optional<std::int64_t> expert = take_pattern(text, pattern.name);
    if (!expert || !text.empty()) return std::nullopt;
    return MatchedPart{Part::data, *expert};
  }
  const std::optional<std::int64_t> expert = take_pattern(text, stem_of(pattern.name));
  if (!expert) return std::nullopt;
  for (const PartRule& rule : layout.parts) {
    if (text == suffix_of(pattern.name, rule.suffix)) return MatchedPart{rule.part, *expert};
  }
  return std::nullopt;
}

// "experts." of "experts.{E}.w1.weight".
std::string_view root_of(std::string_view pattern) noexcept {
  return pattern.substr(0, pattern.find('.') + 1);
}

std::string replaced(std::string_view text, std::string_view mark, std::int64_t number) {
  std::string out(text);
  const std::size_t at = out.find(mark);
  if (at != std::string::npos) out.replace(at, mark.size(), std::to_string(number));
  return out;
}

}  // namespace

bool is_bias(Matrix matrix) noexcept {
  switch (matrix) {
    case Matrix::gate_bias:
    case Matrix::up_bias:
    case Matrix::gate_up_bias:
    case Matrix::down_bias:
      return true;
    default:
      return false;
  }
}

const StorageLayout& layout_for(const ExpertPattern& pattern,
                                const StorageLayout* layout) noexcept {
  const bool fits =
      layout != nullptr && (pattern.style == ExpertStyle::per_expert ||
                            (pattern.style == ExpertStyle::stacked && layout->stacked));
  return fits ? *layout : storage_layout(LayoutId::plain);
}

std::optional<ExpertName> match_expert_name(const Family& family, const StorageLayout* layout,
                                            std::string_view name,
                                            std::size_t first_pattern) noexcept {
  const std::size_t mark = family.prefix.find(kLayer);
  if (!take_prefix(name, family.prefix.substr(0, mark))) return std::nullopt;
  const std::optional<std::int64_t> layer = take_number(name);
  if (!layer || !take_prefix(name, family.prefix.substr(mark + kLayer.size()))) {
    return std::nullopt;
  }
  bool at_root = false;
  for (std::size_t p = first_pattern; p < family.patterns.size(); ++p) {
    const ExpertPattern& pattern = family.patterns[p];
    for (std::size_t t = 0; t < pattern.tensors.size(); ++t) {
      const std::optional<MatchedPart> match =
          match_part(name, pattern.tensors[t], layout_for(pattern, layout));
      if (match) return ExpertName{*layer, true, p, t, match->part, match->expert};
      at_root = at_root || name.starts_with(root_of(pattern.tensors[t].name));
    }
  }
  if (!at_root) return std::nullopt;
  return ExpertName{.layer = *layer};
}

std::string expert_tensor_name(const Family& family, std::int64_t layer,
                               const TensorPattern& pattern, std::string_view suffix,
                               std::int64_t expert) {
  std::string name(is_bias(pattern.matrix) ? pattern.name : stem_of(pattern.name));
  if (!is_bias(pattern.matrix)) name += suffix_of(pattern.name, suffix);
  return layer_tensor_name(family, layer, replaced(name, kExpert, expert));
}

std::string layer_tensor_name(const Family& family, std::int64_t layer, std::string_view rest) {
  return replaced(family.prefix, kLayer, layer).append(rest);
}

bool looks_quantized(std::string_view name) noexcept {
  constexpr std::string_view kEndings[] = {
      "_scale", "_scale_inv",  "_scale_2", "_scales", "_blocks", "_packed",
      "_shape", "_zero_point", ".qweight", ".qzeros", ".scales", "g_idx",
  };
  for (const std::string_view ending : kEndings) {
    if (name.ends_with(ending)) return true;
  }
  return false;
}

}  // namespace fusedmoe::checkpoint
