// Implementation of amx_decode.h, with AVX-512, VBMI and its conversion to bf16, which every
// machine with AMX has.
#include "backends/cpu/kernels/amx_decode.h"

#include <immintrin.h>

#include <algorithm>

#include "backends/cpu/kernels/bf16_weights.h"
#include "backends/cpu/kernels/segment_vectors.h"

namespace fusedmoe::cpu {
namespace {

constexpr std::int64_t kStepUnits = 16;  // pairs of k of a step
constexpr std::int64_t kUnitBytes = 128;
// Bytes of codes ahead, to L1. 256, 1024, 2048 and 4096: fp8 in blocks at 1 token 2.46, 1.59, 2.05
// and 1.35 times the floor, mxfp4 2.55, 2.31, 1.74 and 2.26 (qwen3-30b-a3b, 2 threads of a shared
// Xeon).
constexpr std::int64_t kCodesAhead = 4096;

// weight = code * scale + offset for one vector: even and odd k of 16 outputs.
FUSEDMOE_INLINE __m512i scaled(__m512bh codes, __m512 scale, __m512 offset) {
  const __m512i bits = (__m512i)codes;
  const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  const __m512 odd =
      _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000U))));
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_fmadd_ps(odd, scale, offset),
                                                    _mm512_fmadd_ps(even, scale, offset));
  alignas(64) static constexpr std::uint16_t kPairs[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kPairs), both);
}

// Codes of a line as vectors of bf16.
template <Code kCode>
struct Weights {
  static constexpr int kLineUnits = 1;
  explicit Weights(SegmentLayout::Offset) {}
  FUSEDMOE_INLINE static void widen(const char* line, int, __m512bh (&w)[2]) {
    if constexpr (kCode == Code::s8) {
      widen_s8(line, w);
    } else {
      widen_fp8(kCode == Code::e4m3 ? kE4m3 : kE5m2, line, w);
    }
  }
};
template <Code kCode>
requires(bits_of(kCode) == 4) struct Weights<kCode> : NibbleWeights {
  static constexpr int kLineUnits = 2;
  explicit Weights(SegmentLayout::Offset offset) : NibbleWeights(nibble_values<kCode>(offset)) {}
};

// A segment's e8m0 scales for both halves of a panel, as exponents of bf16 in both words of a lane;
// exact: all of them are in [least, most], where no weight leaves the normal numbers.
struct Exponents {
  __m512i of_half[2];
  bool exact;

  // of: what an exponent becomes.
  template <class F>
  FUSEDMOE_INLINE Exponents(const std::byte* record, int least, int most, const F& of) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(record));
    const __m256i low = _mm256_max_epu8(codes, _mm256_set1_epi8(static_cast<char>(least)));
    const __m256i both = _mm256_min_epu8(low, _mm256_set1_epi8(static_cast<char>(most)));
    exact = _mm256_testc_si256(_mm256_cmpeq_epi8(both, codes), _mm256_set1_epi8(-1)) != 0;
    const auto words = [&](__m128i half) {
      const __m512i word = _mm512_slli_epi32(of(_mm512_cvtepu8_epi32(half)), 7);
      return _mm512_mask_blend_epi16(0xaaaaaaaaU, word, _mm512_slli_epi32(word, 16));
    };
    of_half[0] = words(_mm256_castsi256_si128(codes));
    of_half[1] = words(_mm256_extracti128_si256(codes, 1));
  }
};

// mxfp4: of values times 2^125 a saturating subtraction takes what the exponent lacks, and zero
// stays zero: two operations for 32 weights, and the bits of a product. Magnitudes are 2^-1 to 1.5
// * 2^2.
struct ScaledNibbles {
  Weights<Code::e2m1> codes;
  Exponents missing;

  FUSEDMOE_INLINE explicit ScaledNibbles(const std::byte* record)
      : codes(SegmentLayout::Offset::none), missing(record, 2, 252, [](__m512i exponent) {
          return _mm512_sub_epi32(_mm512_set1_epi32(252), exponent);
        }) {
    const __m512 exact = _mm512_loadu_ps(kE2m1Values.data());
    const __mmask16 nonzero = _mm512_cmp_ps_mask(exact, _mm512_setzero_ps(), _CMP_NEQ_OQ);
    const __m512 large = _mm512_maskz_mul_ps(nonzero, exact, _mm512_set1_ps(0x1p125F));
    codes.values = _mm512_broadcast_i64x4(
        _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(large), 16)));
  }
  FUSEDMOE_INLINE __m512i scale(__m512bh w, int half) const {
    return _mm512_subs_epu16((__m512i)w, missing.of_half[half]);
  }
};

// mxfp8: an exponent is added to all but zeros and NaN. Magnitudes are 2^-9 to 1.75 * 2^8.
struct AddedExponents {
  Exponents added;

  FUSEDMOE_INLINE explicit AddedExponents(const std::byte* record)
      : added(record, 10, 246,
              [](__m512i exponent) { return _mm512_sub_epi32(exponent, _mm512_set1_epi32(127)); }) {
  }
  FUSEDMOE_INLINE __m512i scale(__m512bh codes, int half) const {
    const __m512i bits = (__m512i)codes;
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff));
    const __mmask32 number = _mm512_cmplt_epu16_mask(
        _mm512_sub_epi16(magnitude, _mm512_set1_epi16(1)), _mm512_set1_epi16(0x7f7f));
    return _mm512_mask_add_epi16(bits, number, bits, added.of_half[half]);
  }
};

// Units [begin, end) of a piece; finish(vector, half) scales.
template <class Codes, class Finish>
FUSEDMOE_INLINE void decode_units(const Codes& codes, const char* panel, std::int64_t begin,
                                  std::int64_t end, char* to, const Finish& finish) {
  const char* line = panel + begin / Codes::kLineUnits * 64;
  for (std::int64_t unit = begin; unit < end; unit += Codes::kLineUnits, line += 64) {
    __builtin_prefetch(line + kCodesAhead);
#pragma GCC unroll 2
    for (int i = 0; i < Codes::kLineUnits; ++i) {
      __m512bh w[2];
      codes.widen(line, i, w);
      _mm512_store_si512(to, finish(w[0], 0));
      _mm512_store_si512(to + 64, finish(w[1], 1));
      to += kUnitBytes;
    }
  }
}

// fp8 in blocks: the scale is one for each half of a panel, so that a table of what 128 codes are
// worth costs less than to scale each weight: 9 operations for 64 weights instead of 22.
template <Code kCode>
struct HalfTables {
  std::uint8_t low[2][128];
  std::uint8_t high[2][128];

  void build(const __m512 (&scale)[2]) {
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 128; i += 16) {
        const auto& tables = kCode == Code::e4m3 ? kE4m3 : kE5m2;
        const __m256i bytes = _mm256_or_si256(
            _mm256_cvtepu8_epi16(load_bytes(reinterpret_cast<const std::byte*>(&tables.low[i]))),
            _mm256_slli_epi16(_mm256_cvtepu8_epi16(
                                  load_bytes(reinterpret_cast<const std::byte*>(&tables.high[i]))),
                              8));
        const __m512 values =
            _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bytes), 16));
        const auto words = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(values, scale[half]));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(&low[half][i]), _mm256_cvtepi16_epi8(words));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(&high[half][i]),
                         _mm256_cvtepi16_epi8(_mm256_srli_epi16(words, 8)));
      }
    }
  }

  // Units [begin, end), two at a time: bytes of one half of both lines, then of the other.
  FUSEDMOE_INLINE void decode(const char* panel, std::int64_t begin, std::int64_t end,
                              char* to) const {
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const char* line = panel + begin * 64;
    for (std::int64_t unit = begin; unit < end; unit += 2, line += 128, to += 2 * kUnitBytes) {
      __builtin_prefetch(line + kCodesAhead);
      __builtin_prefetch(line + kCodesAhead + 64);
      const __m512i first = _mm512_loadu_si512(line);
      const __m512i second = _mm512_loadu_si512(line + 64);
      const __m512i codes[2] = {_mm512_unpacklo_epi64(first, second),
                                _mm512_unpackhi_epi64(first, second)};
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m512i lower = lookup(low[half], codes[half]);
        // upper ^ (codes & 0x80)
        const __m512i upper =
            _mm512_ternarylogic_epi32(lookup(high[half], codes[half]), codes[half], sign, 0x78);
        _mm512_store_si512(to + half * 64, _mm512_unpacklo_epi8(lower, upper));
        _mm512_store_si512(to + kUnitBytes + half * 64, _mm512_unpackhi_epi8(lower, upper));
      }
    }
  }
};

template <Code kCode>
void decode(const GemmTile& tile, std::int64_t begin_step, std::int64_t count, DecodeState& state,
            void* to) {
  const SegmentLayout& layout = tile.segments.layout;
  const Weights<kCode> codes(layout.offset);
  const auto* panel = static_cast<const char*>(tile.panel);
  auto* out = static_cast<char*>(to);
  const std::int64_t first = begin_step * kStepUnits;
  const std::int64_t last = first + count * kStepUnits;
  // Units that hold k, in whole lines; the others are zeros.
  const std::int64_t end = std::min(last, (tile.k + 3) / 4 * 2);
  std::int64_t unit = first;
  if (layout.k == 0 || sums_are_scaled(layout)) {
    decode_units(codes, panel, first, end, out, [](__m512bh w, int) { return (__m512i)w; });
    unit = std::max(first, end);
  }
  const std::int64_t segment_units = std::max<std::int64_t>(layout.k / 2, 1);
  static_assert(sizeof(SegmentScales) <= sizeof(state.memory));
  auto& scales = reinterpret_cast<SegmentScales&>(state.memory);
  while (unit < end) {
    const std::int64_t segment = unit / segment_units;
    const std::int64_t until = std::min(end, (segment + 1) * segment_units);
    char* at = out + (unit - first) * kUnitBytes;
    const std::int64_t from = unit;
    unit = until;
    const std::byte* record = tile.segments.records + segment * layout.record_bytes();
    if constexpr (kCode == Code::e2m1) {
      if (layout.scale == SegmentLayout::Scale::e8m0) {
        const ScaledNibbles nibbles(record);
        if (nibbles.missing.exact) {
          decode_units(nibbles.codes, panel, from, until, at,
                       [&](__m512bh w, int half) { return nibbles.scale(w, half); });
          continue;
        }
      }
    }
    if constexpr (kCode == Code::e4m3) {
      if (layout.scale == SegmentLayout::Scale::e8m0) {
        const AddedExponents exponents(record);
        if (exponents.added.exact) {
          decode_units(codes, panel, from, until, at,
                       [&](__m512bh w, int half) { return exponents.scale(w, half); });
          continue;
        }
      }
    }
    if constexpr (kCode == Code::e4m3 || kCode == Code::e5m2) {
      if (layout.per_half) {
        static_assert(sizeof(HalfTables<kCode>) <= sizeof(state.memory));
        auto& tables = reinterpret_cast<HalfTables<kCode>&>(state.memory);
        if (state.segment != segment) {
          state.segment = segment;
          SegmentScales one;
          one.load(tile.segments, segment, 1);
          tables.build({_mm512_load_ps(one.data()), _mm512_load_ps(one.data() + 16)});
        }
        tables.decode(panel, from, until, at);
        continue;
      }
    }
    if (state.segment < 0 || segment >= state.segment + SegmentScales::kMost) {
      state.segment = segment;
      const std::int64_t all = (tile.k + layout.k - 1) / layout.k;
      scales.load(tile.segments, segment, std::min(all - segment, SegmentScales::kMost));
    }
    const float* values = scales.data() + (segment - state.segment) * 64;
    const __m512 scale[2] = {_mm512_load_ps(values), _mm512_load_ps(values + 16)};
    __m512 offset[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    if (layout.has_offsets()) {
      offset[0] = _mm512_load_ps(values + 32);
      offset[1] = _mm512_load_ps(values + 48);
    }
    decode_units(codes, panel, from, until, at,
                 [&](__m512bh w, int half) { return scaled(w, scale[half], offset[half]); });
  }
  for (std::int64_t u = std::max(first, end); u < last; ++u) {
    _mm512_store_si512(out + (u - first) * kUnitBytes, _mm512_setzero_si512());
    _mm512_store_si512(out + (u - first) * kUnitBytes + 64, _mm512_setzero_si512());
  }
}

}  // namespace

void add_scaled_sums(const GemmTile& tile, std::int64_t index, const float* sums, int first,
                     int rows) {
  SegmentScales scales;
  scales.load(tile.segments, index, 1);
  const float* values = scales.data();
  const __m512 scale[2] = {_mm512_load_ps(values), _mm512_load_ps(values + 16)};
  const bool start = tile.first && index == 0;
  const bool offsets = tile.segments.layout.has_offsets();
  const float* row_sums = nullptr;
  __m512 offset[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  if (offsets) {
    row_sums = static_cast<const float*>(tile.sums) + index * tile.rows + first;
    offset[0] = _mm512_load_ps(values + 32);
    offset[1] = _mm512_load_ps(values + 48);
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    for (int half = 0; half < 2; ++half) {
      float* out = tile.accumulators + (first + r) * kPanelOutputs + half * 16;
      const __m512 sum = _mm512_loadu_ps(sums + r * kPanelOutputs + half * 16);
      __m512 value = start ? _mm512_mul_ps(sum, scale[half])
                           : _mm512_fmadd_ps(sum, scale[half], _mm512_loadu_ps(out));
      if (offsets) value = _mm512_fmadd_ps(_mm512_set1_ps(row_sums[r]), offset[half], value);
      _mm512_storeu_ps(out, value);
    }
  }
}

void sum_tile_rows(const LoadRows& rows) {
  const std::int64_t steps = (rows.k + 31) / 32;
  const std::int64_t segment_steps = rows.segment_k / 32;
  for (std::int64_t r = 0; r < rows.rows; ++r) {
    const char* row = static_cast<const char*>(rows.to) + (r / 16 * steps * 16 + r % 16) * 64;
    auto* to = static_cast<float*>(rows.sums) + r;
    for (std::int64_t begin = 0; begin < steps; begin += segment_steps, to += rows.rows) {
      __m512 sum = _mm512_setzero_ps();
      for (std::int64_t step = begin; step < std::min(steps, begin + segment_steps); ++step) {
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(row + step * 16 * 64),
                               (__m512bh)_mm512_set1_epi16(0x3f80));
      }
      *to = _mm512_reduce_add_ps(sum);
    }
  }
}

DecodeSteps decode_steps(Code code) noexcept {
  switch (code) {
    case Code::s8:
      return &decode<Code::s8>;
    case Code::e4m3:
      return &decode<Code::e4m3>;
    case Code::e5m2:
      return &decode<Code::e5m2>;
    case Code::e2m1:
      return &decode<Code::e2m1>;
    case Code::u4:
      return &decode<Code::u4>;
    default:
      return nullptr;
  }
}

}  // namespace fusedmoe::cpu
