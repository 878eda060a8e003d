#include "backends/cpu/pack.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>

#include "formats/float_bits.h"
#include "formats/format.h"

namespace fusedmoe::cpu {
namespace {

// Channel and part of column `column` of a w13 panel; part 0 = gate, 1 = up.
struct Channel {
  std::int64_t index;
  int part;
};

Channel channel_of(const PlanSpec& spec, std::int64_t panel, int column) {
  if (!spec.gated()) return {panel * kPanelOutputs + column, 1};
  return {panel * kGatedOutputs + column % kGatedOutputs, column / kGatedOutputs};
}

// Row of the fused w13 (and of its bias) that holds a channel's part.
std::int64_t w13_row(const PlanSpec& spec, Channel channel) {
  if (!spec.gated()) return channel.index;
  const MoeConfig& config = spec.config;
  const int part = config.gate_up_order == GateUpOrder::up_gate ? 1 - channel.part : channel.part;
  return config.gate_up_layout == GateUpLayout::interleaved
             ? 2 * channel.index + part
             : part * config.intermediate_size + channel.index;
}

int element_bytes(const WeightTensor& tensor) {
  return format_info(tensor.format).bits_per_weight / 8;
}

const std::byte* address(const WeightTensor& tensor, std::int64_t expert, std::int64_t n) {
  return static_cast<const std::byte*>(tensor.data) +
         element_index(tensor, expert, n, 0) * element_bytes(tensor);
}

std::int64_t k_stride(const WeightTensor& tensor) {
  return element_bytes(tensor) * (tensor.layout == WeightLayout::nk ? 1 : row_stride_of(tensor));
}

float load_bias(const BiasTensor& bias, std::int64_t expert, std::int64_t n) {
  const auto* from = static_cast<const char*>(bias.data) +
                     (expert * bias.size + n) * bytes_per_element(bias.dtype);
  if (bias.dtype == DType::f32) {
    float value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return bias.dtype == DType::f16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

// Columns that are copied together.
constexpr int kColumns = 8;
// Units of k per block: its lines are completed in L1, in a buffer, and stream to memory from
// there, so that memory reads the weights and writes the panels, and does nothing else. 8.5 GB/s
// without the buffer, 10.0 with prefetch, 11.2 with blocks of 128 instead of 32, 15.0 with the
// buffer (Zen 4, 2 threads, where memory reads 36 GB/s).
constexpr std::int64_t kBlockUnits = 128;
// Bytes ahead in each of the rows: the hardware does not follow 32 of them.
constexpr std::int64_t kReadAhead = 256;

// A unit is what a panel keeps together of one output: k_group elements, 2 or 4 bytes.
template <class Element, int kGroup>
struct Copy {
  static constexpr std::int64_t kUnitBytes = sizeof(Element) * kGroup;
  const PanelOutputs& panel;
  std::int64_t k0, k;
  Element* to;  // of unit `origin`
  std::int64_t origin = 0;

  Element* at(std::int64_t unit, int column) const {
    return to + ((unit - origin) * kPanelOutputs + column) * kGroup;
  }

  // Units [begin, end) of columns [first, first + 8), one element at a time: the ends of K,
  // padding, and layouts in which neither k nor the outputs are contiguous. Memcpy, since
  // checkpoints map tensors to any address.
  void elements(int first, std::int64_t begin, std::int64_t end) const {
    for (int column = first; column < first + kColumns; ++column) {
      const std::byte* from = panel.output[column];
      for (std::int64_t i = begin * kGroup; i < end * kGroup; ++i) {
        Element value = 0;
        if (from != nullptr && i < k) {
          std::memcpy(&value, from + (k0 + i) * panel.k_stride[column], sizeof(Element));
        }
        at(i / kGroup, column)[i % kGroup] = value;
      }
    }
  }

#if defined(__SSE2__)  // every x86-64 machine: the copy is bound by memory, not by its width
  static constexpr std::int64_t kUnitsAtOnce = 16 / kUnitBytes;

  void store(std::int64_t unit, int column, __m128i value) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at(unit, column)), value);
  }

  // k is contiguous: a transpose of 8 rows x 16 bytes.
  void transpose(int first, std::int64_t unit) const {
    __m128i v[kColumns];
    for (int i = 0; i < kColumns; ++i) {
      const std::byte* from = panel.output[first + i];
      if (from == nullptr) {
        v[i] = _mm_setzero_si128();
        continue;
      }
      from += k0 * static_cast<std::int64_t>(sizeof(Element)) + unit * kUnitBytes;
      __builtin_prefetch(from + kReadAhead);
      v[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    }
    if constexpr (kUnitBytes == 2) {
      __m128i a[kColumns], b[kColumns];
      for (int i = 0; i < 4; ++i) {
        a[2 * i] = _mm_unpacklo_epi16(v[2 * i], v[2 * i + 1]);
        a[2 * i + 1] = _mm_unpackhi_epi16(v[2 * i], v[2 * i + 1]);
      }
      for (int i = 0; i < 2; ++i) {
        b[4 * i] = _mm_unpacklo_epi32(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm_unpackhi_epi32(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm_unpacklo_epi32(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm_unpackhi_epi32(a[4 * i + 1], a[4 * i + 3]);
      }
      for (int i = 0; i < 4; ++i) {
        store(unit + 2 * i, first, _mm_unpacklo_epi64(b[i], b[i + 4]));
        store(unit + 2 * i + 1, first, _mm_unpackhi_epi64(b[i], b[i + 4]));
      }
    } else {
      for (int half = 0; half < 2; ++half) {
        const __m128i* w = v + 4 * half;
        const __m128i a = _mm_unpacklo_epi32(w[0], w[1]), b = _mm_unpackhi_epi32(w[0], w[1]);
        const __m128i c = _mm_unpacklo_epi32(w[2], w[3]), d = _mm_unpackhi_epi32(w[2], w[3]);
        const int column = first + 4 * half;
        store(unit, column, _mm_unpacklo_epi64(a, c));
        store(unit + 1, column, _mm_unpackhi_epi64(a, c));
        store(unit + 2, column, _mm_unpacklo_epi64(b, d));
        store(unit + 3, column, _mm_unpackhi_epi64(b, d));
      }
    }
  }

  // The outputs are contiguous: eight elements of each k of a unit, side by side.
  void interleave(int first, std::int64_t unit) const {
    const std::byte* from = panel.output[first] + (k0 + unit * kGroup) * panel.k_stride[first];
    const auto load = [](const std::byte* at) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    };
    if constexpr (kGroup == 2) {
      const __m128i even = load(from);
      const __m128i odd = load(from + panel.k_stride[first]);
      store(unit, first, _mm_unpacklo_epi16(even, odd));
      store(unit, first + 4, _mm_unpackhi_epi16(even, odd));
    } else {
      store(unit, first, load(from));
      if constexpr (kUnitBytes == 4) store(unit, first + 4, load(from + 16));
    }
  }

  bool k_is_contiguous(int first) const {
    for (int c = first; c < first + kColumns; ++c) {
      if (panel.output[c] != nullptr && panel.k_stride[c] != sizeof(Element)) return false;
    }
    return true;
  }
  bool outputs_are_contiguous(int first) const {
    for (int c = first; c < first + kColumns; ++c) {
      if (panel.output[c] == nullptr || panel.k_stride[c] != panel.k_stride[first] ||
          panel.output[c] - panel.output[first] !=
              (c - first) * static_cast<std::int64_t>(sizeof(Element))) {
        return false;
      }
    }
    return true;
  }

  // As many of units [begin, end) as go at once; the end of them.
  std::int64_t vectors(int first, std::int64_t begin, std::int64_t end) const {
    std::int64_t unit = begin;
    const std::int64_t whole = std::min(end, k / kGroup);  // the last k may have no partner
    if (k_is_contiguous(first)) {
      for (; unit + kUnitsAtOnce <= whole; unit += kUnitsAtOnce) transpose(first, unit);
    } else if (outputs_are_contiguous(first)) {
      for (; unit < whole; ++unit) interleave(first, unit);
    }
    return unit;
  }
#else
  static std::int64_t vectors(int, std::int64_t begin, std::int64_t) { return begin; }
#endif

  void block(std::int64_t begin, std::int64_t end) const {
    for (int first = 0; first < kPanelOutputs; first += kColumns) {
      elements(first, vectors(first, begin, end), end);
    }
  }
};

// Past the caches, for what is not read soon.
void stream(const void* from, std::int64_t bytes, void* to) {
#if defined(__SSE2__)
  if (reinterpret_cast<std::uintptr_t>(to) % 16 == 0 && bytes % 16 == 0) {
    for (std::int64_t i = 0; i < bytes / 16; ++i) {
      _mm_stream_si128(static_cast<__m128i*>(to) + i,
                       _mm_load_si128(static_cast<const __m128i*>(from) + i));
    }
    return;
  }
#endif
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

template <class Element, int kGroup>
void copy_units(const PanelOutputs& panel, std::int64_t k0, std::int64_t k, std::int64_t units,
                PanelUse use, void* to) {
  using Units = Copy<Element, kGroup>;
  constexpr std::int64_t kUnit = kPanelOutputs * Units::kUnitBytes;
  alignas(64) std::array<std::byte, kBlockUnits * kUnit> buffer;
  for (std::int64_t begin = 0; begin < units; begin += kBlockUnits) {
    const std::int64_t end = std::min(units, begin + kBlockUnits);
    std::byte* target = static_cast<std::byte*>(to) + begin * kUnit;
    std::byte* block = use == PanelUse::later ? buffer.data() : target;
    Units{panel, k0, k, reinterpret_cast<Element*>(block), begin}.block(begin, end);
    if (use == PanelUse::later) stream(block, (end - begin) * kUnit, target);
  }
#if defined(__SSE2__)
  if (use == PanelUse::later) _mm_sfence();
#endif
}

}  // namespace

PanelOutputs w13_panel(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t expert,
                       std::int64_t panel) {
  const bool apart = !weights.w13_up.empty();
  PanelOutputs result{{}, {}, element_bytes(weights.w13)};
  for (int column = 0; column < kPanelOutputs; ++column) {
    const Channel channel = channel_of(spec, panel, column);
    if (channel.index >= spec.config.intermediate_size) continue;
    const WeightTensor& tensor = apart && channel.part == 1 ? weights.w13_up : weights.w13;
    result.output[column] = address(tensor, expert, apart ? channel.index : w13_row(spec, channel));
    result.k_stride[column] = k_stride(tensor);
  }
  return result;
}

PanelOutputs w2_panel(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t expert,
                      std::int64_t panel) {
  PanelOutputs result{{}, {}, element_bytes(weights.w2)};
  for (int column = 0; column < kPanelOutputs; ++column) {
    const std::int64_t n = panel * kPanelOutputs + column;
    if (n >= spec.config.hidden_size) continue;
    result.output[column] = address(weights.w2, expert, n);
    result.k_stride[column] = k_stride(weights.w2);
  }
  return result;
}

void copy_panel(const PanelOutputs& panel, std::int64_t k0, std::int64_t k, PanelLayout layout,
                void* to, PanelUse use) {
  const std::int64_t units = layout.padded(k) / layout.k_group;
  if (panel.element_bytes == 4) {
    copy_units<std::uint32_t, 1>(panel, k0, k, units, use, to);
  } else if (layout.k_group == 1) {
    copy_units<std::uint16_t, 1>(panel, k0, k, units, use, to);
  } else {
    copy_units<std::uint16_t, 2>(panel, k0, k, units, use, to);
  }
}

bool w13_bias_panel(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t expert,
                    std::int64_t panel, float* to) {
  if (weights.w13_bias.empty()) return false;
  for (int column = 0; column < kPanelOutputs; ++column) {
    const Channel channel = channel_of(spec, panel, column);
    to[column] = channel.index < spec.config.intermediate_size
                     ? load_bias(weights.w13_bias, expert, w13_row(spec, channel))
                     : 0.0F;
  }
  return true;
}

bool w2_bias_panel(const PlanSpec& spec, const ExpertWeights& weights, std::int64_t expert,
                   std::int64_t panel, float* to) {
  if (weights.w2_bias.empty()) return false;
  for (int column = 0; column < kPanelOutputs; ++column) {
    const std::int64_t n = panel * kPanelOutputs + column;
    to[column] = n < spec.config.hidden_size ? load_bias(weights.w2_bias, expert, n) : 0.0F;
  }
  return true;
}

}  // namespace fusedmoe::cpu
