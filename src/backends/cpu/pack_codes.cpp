// Implementation of pack_codes.h.
#include "backends/cpu/pack_codes.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>

#include "backends/cpu/kernels/codes.h"
#include "formats/format.h"
#include "formats/k_blocks.h"

namespace fusedmoe::cpu {
namespace {

// Columns that are copied together.
constexpr int kColumns = 8;
// Units of k per block: its lines are completed in L1, in a buffer, and stream to memory from
// there, so that memory reads the weights and writes the panels, and does nothing else. 8.5 GB/s
// without the buffer, 10.0 with prefetch, 11.2 with blocks of 128 instead of 32, 15.0 with the
// buffer (Zen 4, 2 threads, where memory reads 36 GB/s).
constexpr std::int64_t kBlockUnits = 128;
// Bytes ahead in each of the rows: the hardware does not follow 32 of them.
constexpr std::int64_t kReadAhead = 256;

// Where the 32 outputs of a panel start in memory: null = padding, zeros.
struct Addresses {
  std::array<const std::byte*, kPanelOutputs> output{};
  // Bytes from one k to the next. Per output: gate and up may lie in tensors of their own.
  std::array<std::int64_t, kPanelOutputs> k_stride{};
};

// A unit is what a panel keeps together of one output: k_group elements, 1 to 4 bytes.
template <class Element, int kGroup>
struct Copy {
  static constexpr std::int64_t kUnitBytes = sizeof(Element) * kGroup;
  const Addresses& panel;
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

  void store_half(std::int64_t unit, int column, __m128i value) const {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(at(unit, column)), value);
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
    } else if constexpr (kUnitBytes == 1) {
      __m128i a[kColumns], b[kColumns];
      for (int i = 0; i < 4; ++i) {  // pairs of columns: 8 units, 8 units
        a[i] = _mm_unpacklo_epi8(v[2 * i], v[2 * i + 1]);
        a[i + 4] = _mm_unpackhi_epi8(v[2 * i], v[2 * i + 1]);
      }
      for (int i = 0; i < 4; ++i) {  // fours of columns: 4 units each
        const int from = i / 2 * 4;
        const int columns = i % 2 * 2;
        b[from + columns / 2] = _mm_unpacklo_epi16(a[from + columns], a[from + columns + 1]);
        b[from + columns / 2 + 2] = _mm_unpackhi_epi16(a[from + columns], a[from + columns + 1]);
      }
      for (int i = 0; i < 4; ++i) {
        const __m128i low = _mm_unpacklo_epi32(b[i * 2], b[i * 2 + 1]);
        const __m128i high = _mm_unpackhi_epi32(b[i * 2], b[i * 2 + 1]);
        store_half(unit + 4 * i, first, low);
        store_half(unit + 4 * i + 1, first, _mm_unpackhi_epi64(low, low));
        store_half(unit + 4 * i + 2, first, high);
        store_half(unit + 4 * i + 3, first, _mm_unpackhi_epi64(high, high));
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
    if constexpr (sizeof(Element) == 1) {
      for (int i = 0; i < kGroup; ++i) {
        const auto* codes = from + i * panel.k_stride[first];
        for (int c = 0; c < kColumns; ++c) at(unit, first + c)[i] = static_cast<Element>(codes[c]);
      }
    } else if constexpr (kGroup == 2) {
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

// Lines of eight bits in units of two: zipped (codes.h).
void zip_lines(std::byte* block, std::int64_t bytes) {
  for (std::byte* line = block; line < block + bytes; line += 64) {
    std::byte natural[64];
    std::memcpy(natural, line, 64);
    for (int part = 0; part < 8; ++part)
      std::memcpy(line + zipped_byte(8 * part), natural + 8 * part, 8);
  }
}

// A line of 128 four-bit codes from 64 bytes that hold pairs of k: [pairs of a unit, outputs] as
// units of (layout.k_group + 1) / 2 bytes have them. In place, too.
void plane_line(const PanelLayout& layout, const std::byte* from_pairs, std::byte* line) {
#if defined(__SSE2__)
  if (layout.k_group == 1 ? layout.lanes == 16 : layout.lanes == 32) {
    const auto* from = reinterpret_cast<const __m128i*>(from_pairs);
    const __m128i v0 = _mm_loadu_si128(from), v1 = _mm_loadu_si128(from + 1);
    const __m128i v2 = _mm_loadu_si128(from + 2), v3 = _mm_loadu_si128(from + 3);
    const __m128i mask = _mm_set1_epi8(15);
    const auto low = [&](__m128i a, __m128i b) {
      return _mm_or_si128(_mm_and_si128(a, mask), _mm_slli_epi16(_mm_and_si128(b, mask), 4));
    };
    const auto high = [&](__m128i a, __m128i b) {
      return _mm_or_si128(_mm_and_si128(_mm_srli_epi16(a, 4), mask), _mm_andnot_si128(mask, b));
    };
    const __m128i low01 = low(v0, v1), high01 = high(v0, v1);
    const __m128i low23 = low(v2, v3), high23 = high(v2, v3);
    // Bytes of 16 lanes of 4: by pairs of k in units of one, by planes in units of two.
    const bool ones = layout.k_group == 1;
    const __m128i second = ones ? high01 : low23, third = ones ? low23 : high01;
    const __m128i a = _mm_unpacklo_epi8(low01, second), b = _mm_unpackhi_epi8(low01, second);
    const __m128i c = _mm_unpacklo_epi8(third, high23), d = _mm_unpackhi_epi8(third, high23);
    auto* to = reinterpret_cast<__m128i*>(line);
    _mm_storeu_si128(to, _mm_unpacklo_epi16(a, c));
    _mm_storeu_si128(to + 1, _mm_unpackhi_epi16(a, c));
    _mm_storeu_si128(to + 2, _mm_unpacklo_epi16(b, d));
    _mm_storeu_si128(to + 3, _mm_unpackhi_epi16(b, d));
    return;
  }
#endif
  std::byte pairs[64];
  std::memcpy(pairs, from_pairs, 64);
  std::memset(line, 0, 64);
  const int group = std::max(layout.k_group, 2);  // of a unit of pairs
  for (int i = 0; i < 128; ++i) {
    // Code i of [4 / k_group][32][k_group] is (k, output): which nibble of `pairs` is that?
    const int k = i / (kPanelOutputs * layout.k_group) * layout.k_group + i % layout.k_group;
    const int output = i / layout.k_group % kPanelOutputs;
    const int byte = (k / group * kPanelOutputs + output) * group / 2 + k % group / 2;
    const unsigned code = static_cast<unsigned>(pairs[byte]) >> k % 2 * 4 & 0xfU;
    const NibblePlace place = nibble_place(layout.lanes, i);
    line[place.byte] |= static_cast<std::byte>(code << place.shift);
  }
}

// Pieces of blocks of rows as elements of `Element`, kGroup to a unit; finish(block, units) turns
// them into the panel's lines, in place.
template <class Element, int kGroup, class Finish>
void copy_units(const Addresses& addresses, std::int64_t k0, std::int64_t k, std::int64_t units,
                PanelUse use, std::byte* to, const Finish& finish) {
  using Units = Copy<Element, kGroup>;
  constexpr std::int64_t kUnit = kPanelOutputs * Units::kUnitBytes;
  alignas(64) std::array<std::byte, kBlockUnits * kUnit> buffer;
  for (std::int64_t begin = 0; begin < units; begin += kBlockUnits) {
    const std::int64_t end = std::min(units, begin + kBlockUnits);
    std::byte* target = to + begin * kUnit;
    std::byte* block = use == PanelUse::later ? buffer.data() : target;
    Units{addresses, k0, k, reinterpret_cast<Element*>(block), begin}.block(begin, end);
    finish(block, (end - begin) * kUnit);
    if (use == PanelUse::later) stream(block, (end - begin) * kUnit, target);
  }
#if defined(__SSE2__)
  if (use == PanelUse::later) _mm_sfence();
#endif
}

constexpr auto kAsTheyAre = [](std::byte*, std::int64_t) {};

Addresses addresses_of(const PanelOutputs& outputs) {
  Addresses result;
  for (int i = 0; i < kPanelOutputs; ++i) {
    const PanelOutput& output = outputs[static_cast<std::size_t>(i)];
    if (output.tensor == nullptr) continue;
    const WeightTensor& tensor = *output.tensor;
    result.output[static_cast<std::size_t>(i)] =
        static_cast<const std::byte*>(tensor.data) +
        byte_offset(tensor, element_index(tensor, output.expert, output.n, 0));
    result.k_stride[static_cast<std::size_t>(i)] =
        tensor.layout == WeightLayout::nk
            ? format_info(tensor.format).block_bytes
            : format_info(tensor.format).block_bytes * row_stride_of(tensor);
  }
  return result;
}

// Rows of four-bit codes, two k in a byte.
void copy_nibbles(const Addresses& rows, const PanelLayout& layout, std::int64_t k0, std::int64_t k,
                  PanelUse use, std::byte* to) {
  const std::int64_t padded = layout.padded(k);
  std::int64_t left = k;  // of the pieces that finish sees
  const auto finish = [&](std::byte* block, std::int64_t bytes) {
    const std::int64_t block_k = bytes * 2 / kPanelOutputs;
    if (left % 2 != 0 && left < block_k) {  // a last k without a partner
      const std::int64_t group = std::max(layout.k_group, 2);
      const std::int64_t unit = left / group;
      for (std::int64_t output = 0; output < kPanelOutputs; ++output) {
        block[(unit * kPanelOutputs + output) * group / 2 + left % group / 2] &= std::byte{0xf};
      }
    }
    for (std::byte* line = block; line < block + bytes; line += 64) plane_line(layout, line, line);
    left -= block_k;
  };
  if (layout.k_group <= 2) {
    copy_units<std::uint8_t, 1>(rows, k0 / 2, (k + 1) / 2, padded / 2, use, to, finish);
  } else {
    copy_units<std::uint8_t, 2>(rows, k0 / 2, (k + 1) / 2, padded / 4, use, to, finish);
  }
}

void copy_bytes(const Addresses& rows, const PanelLayout& layout, std::int64_t k0, std::int64_t k,
                PanelUse use, std::byte* to) {
  const std::int64_t units = layout.padded(k) / layout.k_group;
  if (layout.k_group == 1) {
    copy_units<std::uint8_t, 1>(rows, k0, k, units, use, to, kAsTheyAre);
  } else if (layout.k_group == 2) {
    copy_units<std::uint8_t, 2>(rows, k0, k, units, use, to, zip_lines);
  } else {
    copy_units<std::uint8_t, 4>(rows, k0, k, units, use, to, kAsTheyAre);
  }
}

// A block of 256 codes as a plain row: four bits, two k in a byte, or signed bytes. As
// formats/q*_k.h have them, in loops that compilers turn into vectors.
void plain_row(WeightFormat format, const std::byte* block, std::byte* row) {
  const auto* b = reinterpret_cast<const std::uint8_t*>(block);
  auto* to = reinterpret_cast<std::uint8_t*>(row);
  if (format == WeightFormat::q4_k) {
    for (int part = 0; part < 4; ++part) {  // 64 k: low halves of 32 bytes, then high ones
      const std::uint8_t* from = b + 16 + 32 * part;
      for (int i = 0; i < 16; ++i) {
        to[32 * part + i] =
            static_cast<std::uint8_t>((from[2 * i] & 15) | (from[2 * i + 1] & 15) << 4);
        to[32 * part + 16 + i] =
            static_cast<std::uint8_t>(from[2 * i] >> 4 | (from[2 * i + 1] & 0xf0));
      }
    }
  } else if (format == WeightFormat::q5_k) {
    for (int part = 0; part < 4; ++part) {
      const std::uint8_t* from = b + 48 + 32 * part;
      for (int i = 0; i < 32; ++i) {
        const int low = b[16 + i] >> 2 * part & 1, high = b[16 + i] >> (2 * part + 1) & 1;
        to[64 * part + i] = static_cast<std::uint8_t>((from[i] & 15) | low << 4);
        to[64 * part + 32 + i] = static_cast<std::uint8_t>(from[i] >> 4 | high << 4);
      }
    }
  } else {
    for (int half = 0; half < 2; ++half) {
      const std::uint8_t* low = b + 64 * half;
      const std::uint8_t* up = b + 128 + 32 * half;
      std::uint8_t* out = to + 128 * half;
      for (int i = 0; i < 32; ++i) {
        out[i] = static_cast<std::uint8_t>(((low[i] & 15) | (up[i] & 3) << 4) - 32);
        out[32 + i] = static_cast<std::uint8_t>(((low[32 + i] & 15) | (up[i] >> 2 & 3) << 4) - 32);
        out[64 + i] = static_cast<std::uint8_t>((low[i] >> 4 | (up[i] >> 4 & 3) << 4) - 32);
        out[96 + i] = static_cast<std::uint8_t>((low[32 + i] >> 4 | (up[i] >> 6) << 4) - 32);
      }
    }
  }
}

// Formats whose codes lie in blocks: each is laid out as a plain row first.
void copy_blocks(const PanelOutputs& outputs, const PanelFormat& format, std::int64_t k0,
                 std::int64_t k, PanelUse use, std::byte* to) {
  const Addresses blocks = addresses_of(outputs);
  alignas(64) std::byte rows[kPanelOutputs][formats::kBlockK];
  Addresses plain;
  for (std::int64_t at = 0; at < k; at += formats::kBlockK) {
    for (std::size_t i = 0; i < kPanelOutputs; ++i) {
      if (blocks.output[i] == nullptr) continue;
      plain_row(outputs[i].tensor->format,
                blocks.output[i] + (k0 + at) / formats::kBlockK * blocks.k_stride[i], rows[i]);
      plain.output[i] = rows[i];
      plain.k_stride[i] = 1;
    }
    std::byte* target = to + format.code_bytes(at);
    if (bits_of(format.code) == 4) {
      copy_nibbles(plain, format.layout, 0, formats::kBlockK, use, target);
    } else {
      copy_bytes(plain, format.layout, 0, formats::kBlockK, use, target);
    }
  }
}

}  // namespace

void pack_columns(const std::array<const std::byte*, kPanelOutputs>& rows, std::int64_t bytes,
                  std::int64_t first, std::int64_t count, std::byte* to) {
  Addresses addresses;
  addresses.output = rows;
  addresses.k_stride.fill(bytes);
  switch (bytes) {
    case 1:
      return copy_units<std::uint8_t, 1>(addresses, first, count, count, PanelUse::now, to,
                                         kAsTheyAre);
    case 2:
      return copy_units<std::uint16_t, 1>(addresses, first, count, count, PanelUse::now, to,
                                          kAsTheyAre);
    default:
      return copy_units<std::uint32_t, 1>(addresses, first, count, count, PanelUse::now, to,
                                          kAsTheyAre);
  }
}

void pack_codes(const PanelOutputs& outputs, const PanelFormat& format, std::int64_t k0,
                std::int64_t k, std::byte* to, PanelUse use) {
  const PanelLayout& layout = format.layout;
  const bool blocks = std::any_of(outputs.begin(), outputs.end(), [](const PanelOutput& output) {
    return output.tensor != nullptr && format_info(output.tensor->format).encode == nullptr;
  });
  if (blocks) return copy_blocks(outputs, format, k0, k, use, to);
  const Addresses rows = addresses_of(outputs);
  const std::int64_t units = layout.padded(k) / layout.k_group;
  switch (bits_of(format.code)) {
    case 4:
      return copy_nibbles(rows, layout, k0, k, use, to);
    case 8:
      return copy_bytes(rows, layout, k0, k, use, to);
    case 32:
      return copy_units<std::uint32_t, 1>(rows, k0, k, units, use, to, kAsTheyAre);
    default:
      break;
  }
  if (layout.k_group == 1) {
    copy_units<std::uint16_t, 1>(rows, k0, k, units, use, to, kAsTheyAre);
  } else {
    copy_units<std::uint16_t, 2>(rows, k0, k, units, use, to, kAsTheyAre);
  }
}

}  // namespace fusedmoe::cpu
