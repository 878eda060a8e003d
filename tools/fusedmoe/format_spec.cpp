#include "format_spec.h"

#include <fmt/core.h>

#include <charconv>
#include <optional>
#include <vector>

#include "formats/format.h"
#include "formats/quantize.h"
#include "formats/scales.h"
#include "fusedmoe/error.h"

namespace fusedmoe::tool {
namespace {

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> words(1);
  for (const char c : text) {
    if (c == ':') {
      words.emplace_back();
    } else {
      words.back() += c;
    }
  }
  return words;
}

// As models ship it: DeepSeek's and Qwen's fp8 in blocks of 128 x 128, GPTQ's, AWQ's and
// compressed-tensors' int4 in groups of 128 with f16 scales.
FormatSpec usual(WeightFormat format) {
  FormatSpec spec{.format = format, .scales = default_scales(format)};
  if (format_info(format).takes(ScaleLayout::block)) {
    spec.scales.layout = ScaleLayout::block;
    spec.scales.block_n = spec.scales.block_k = 128;
  }
  if (format == WeightFormat::int4) spec.scales.type = ScaleType::f16;
  return spec;
}

std::string scales_text(const WeightScales& scales) {
  switch (scales.layout) {
    case ScaleLayout::group:
      return std::to_string(scales.group_size);
    case ScaleLayout::block:
      return std::to_string(scales.block_n) + "x" + std::to_string(scales.block_k);
    default:
      return to_string(scales.layout);
  }
}

std::optional<std::int64_t> count_of(const std::string& text) {
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [next, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || next != end || value < 1 || value > std::int64_t{1} << 31) return {};
  return value;
}

// tensor, channel, G (a group of G inputs) or NxK (a block of N outputs by K inputs).
std::optional<WeightScales> scales_of(const std::string& word, WeightScales scales) {
  scales.group_size = scales.block_n = scales.block_k = 0;
  if (word == "tensor" || word == "channel") {
    scales.layout = word == "tensor" ? ScaleLayout::tensor : ScaleLayout::channel;
    return scales;
  }
  const std::size_t by = word.find('x');
  const auto first = count_of(word.substr(0, by));
  if (!first) return {};
  if (by == std::string::npos) {
    scales.layout = ScaleLayout::group;
    scales.group_size = *first;
    return scales;
  }
  const auto second = count_of(word.substr(by + 1));
  if (!second) return {};
  scales.layout = ScaleLayout::block;
  scales.block_n = *first;
  scales.block_k = *second;
  return scales;
}

std::optional<ScaleType> type_of(const std::string& word) {
  for (const ScaleType type :
       {ScaleType::f32, ScaleType::f16, ScaleType::bf16, ScaleType::e8m0, ScaleType::e4m3}) {
    if (word == fusedmoe::to_string(type)) return type;
  }
  return {};
}

// What may stand behind the format's name.
std::string legal_words(const FormatInfo& info) {
  if (info.takes(ScaleLayout::none)) return "nothing";
  std::string words;
  const auto add = [&](const std::string& word) { words += (words.empty() ? "" : ", ") + word; };
  if (info.takes(ScaleLayout::tensor)) add("tensor");
  if (info.takes(ScaleLayout::channel)) add("channel");
  if (info.takes(ScaleLayout::group)) {
    const std::int64_t only = info.scales.group_size;
    add(only > 0 ? std::to_string(only) : "a group of inputs such as 128");
  }
  if (info.takes(ScaleLayout::block)) add("a block of outputs x inputs such as 128x128");
  for (int i = 0; info.scales.types >> i != 0; ++i) {
    const auto type = static_cast<ScaleType>(i);
    if (info.takes(type)) add(fusedmoe::to_string(type));
  }
  if (info.scales.zero_points) add("zp");
  return words;
}

}  // namespace

const char* const kFormatHelp =
    "FORMAT is f32, f16, bf16, fp8_e4m3, fp8_e5m2, mxfp8, mxfp4, nvfp4, int8, int4, q4_k, q5_k or\n"
    "q6_k. Behind it, each after a colon and in any order, where its scales lie, their type, and "
    "zp\n"
    "for zero points (int4):\n"
    "  tensor, channel, a group of inputs (128), or a block of outputs x inputs (128x128)\n"
    "  f32, f16 or bf16\n"
    "Without: fp8 128x128 and f32, int8 channel and f32, int4 128 and f16; the others have no "
    "choice.\n"
    "Examples: fp8_e4m3, fp8_e4m3:channel, int8:128:bf16, int4:32:zp, mxfp4, q4_k\n";

FormatSpec parse_format(const std::string& text) {
  const std::vector<std::string> words = split(text);
  const FormatInfo* info = nullptr;
  std::string known;
  for (const FormatInfo& one : all_formats()) {
    if (words[0] == one.name) info = &one;
    known += (known.empty() ? "" : ", ") + std::string(one.name);
  }
  if (info == nullptr) {
    throw Error(ErrorCode::invalid_argument, "--format: expected one of " + known + ", got '" +
                                                 words[0] + "'; name one of these");
  }
  FormatSpec spec = usual(info->format);
  bool said_scales = false;
  bool said_type = false;
  for (std::size_t i = 1; i < words.size(); ++i) {
    const std::string& word = words[i];
    const auto refuse = [&](const std::string& remedy) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("--format: expected {} behind {}, got '{}'; {}", legal_words(*info),
                              info->name, word, remedy));
    };
    if (word == "zp" && info->scales.zero_points) {
      if (spec.zero_points) refuse("say it once");
      spec.zero_points = true;
    } else if (const auto type = type_of(word); type && info->takes(*type)) {
      if (said_type) refuse("say one type");
      spec.scales.type = *type;
      said_type = true;
    } else if (const auto scales = scales_of(word, spec.scales);
               scales && info->takes(scales->layout) &&
               (info->scales.group_size == 0 || info->scales.group_size == scales->group_size)) {
      if (said_scales) refuse("say one place for the scales");
      spec.scales = *scales;
      said_scales = true;
    } else {
      refuse(info->takes(ScaleLayout::none) ? "leave it out" : "write one of these");
    }
  }
  return spec;
}

std::string to_string(const FormatSpec& spec) {
  const FormatInfo& info = format_info(spec.format);
  std::string text = info.name;
  if (spec.scales.layout == ScaleLayout::none) return text;
  if (info.scales.group_size == 0) text += ":" + scales_text(spec.scales);
  if (spec.scales.type != usual(spec.format).scales.type) {
    text += std::string(":") + fusedmoe::to_string(spec.scales.type);
  }
  return text + (spec.zero_points ? ":zp" : "");
}

WeightTensor tensor_of(const FormatSpec& spec, std::int64_t experts, std::int64_t outputs,
                       std::int64_t inputs) {
  return {.format = spec.format,
          .experts = experts,
          .outputs = outputs,
          .inputs = inputs,
          .scales = spec.scales};
}

WeightTensor w13_of(const FormatSpec& spec, const MoeConfig& config, std::int64_t experts) {
  const bool gated = is_gated(config.activation.kind);
  WeightTensor w13 =
      tensor_of(spec, experts, config.intermediate_size * (gated ? 2 : 1), config.hidden_size);
  const ScaleLayout layout = w13.scales.layout;
  const bool apart = layout == ScaleLayout::tensor || layout == ScaleLayout::block ||
                     format_info(spec.format).scales.global;
  if (!gated || !apart) return w13;
  // Rows that alternate cannot share blocks: such checkpoints have blocks over both.
  if (config.gate_up_layout == GateUpLayout::halves) {
    w13.scales.parts = ScaleParts::halves;
  } else if (layout != ScaleLayout::block) {
    w13.scales.parts = ScaleParts::interleaved;
  }
  return w13;
}

WeightTensor w2_of(const FormatSpec& spec, const MoeConfig& config, std::int64_t experts) {
  return tensor_of(spec, experts, config.hidden_size, config.intermediate_size);
}

std::int64_t stored_bytes(const FormatSpec& spec, const WeightTensor& tensor) {
  const std::int64_t scales = tensor.experts * scale_shape(tensor).count();
  return format_info(tensor.format).bytes(tensor.experts * expert_stride_of(tensor)) +
         scales * bytes_per_scale(tensor.scales.type) + (spec.zero_points ? (scales + 1) / 2 : 0) +
         tensor.experts * globals_per_expert(tensor) * static_cast<std::int64_t>(sizeof(float));
}

}  // namespace fusedmoe::tool
