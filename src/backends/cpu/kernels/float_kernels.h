// Kernels in fp32 for any vector type: instantiated once per instruction set, with a vector type of
// internal linkage, so that every instance stays in its unit and none runs on another machine.
//
// A vector type V is what activations/math.h asks for, plus: kWidth, load, store (fp32), load_f16,
// load_bf16, store_f16, store_bf16, and multiply_add(a, b, c) = a * b + c by the set's recipe. For
// weights: Table, made of the values of the sixteen codes of four bits, and
// codes<Code>(panel, k, output, table), a vector of outputs of a panel.
#pragma once

#include <cstdint>

#include "activations/activation.h"
#include "backends/cpu/kernels/codes.h"
#include "backends/cpu/kernels/kernels.h"
#include "backends/cpu/kernels/segments.h"
#include "formats/float_bits.h"

namespace fusedmoe::cpu {

// Inputs in fp32, row after row: [rows][row_stride(k)].
inline std::int64_t row_stride(std::int64_t k) { return k + 16; }

// Bytes of weights ahead of the multiplication, for the first rows that pass a panel: the
// hardware's prefetcher restarts at every page. On Zen 4, qwen3-30b-a3b in bf16, together with huge
// pages and whole panels: 1 token 1.46 -> 1.35 ms, 64 tokens 55 -> 36 ms.
inline constexpr std::int64_t kPrefetchBytes = 4096;

// Rows [row, row + kRows) by inputs [begin, end) of the piece. Weights are dequantised to fp32, by
// scale and offset where there are some: [32] each, or null.
template <class V, Code kCode, int kRows, bool kPrefetch, bool kScaled>
FUSEDMOE_INLINE void gemm_rows(const GemmTile& tile, int row, std::int64_t begin, std::int64_t end,
                               const typename V::Table& table, const float* scale,
                               const float* offset) {
  constexpr int kVectors = kPanelOutputs / V::kWidth;
  const std::int64_t a_stride = row_stride(tile.k);
  const float* a = static_cast<const float*>(tile.a) + row * a_stride;
  float* out = tile.accumulators + static_cast<std::int64_t>(row) * kPanelOutputs;
  V sums[kRows][kVectors];
#pragma GCC unroll 32
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 32
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] =
          tile.first && begin == 0 ? V(0.0F) : V::load(out + r * kPanelOutputs + v * V::kWidth);
    }
  }
  for (std::int64_t k = begin; k < end; ++k) {
    if constexpr (kPrefetch) {
      constexpr std::int64_t kBytes = code_bytes(kCode, 1);
      for (std::int64_t line = 0; line < kBytes; line += 64) {
        __builtin_prefetch(static_cast<const char*>(tile.panel) + k * kBytes + line +
                           kPrefetchBytes);
      }
    }
    V x[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) x[r] = V(a[r * a_stride + k]);
#pragma GCC unroll 32
    for (int v = 0; v < kVectors; ++v) {
      V w = V::template codes<kCode>(tile.panel, k, v * V::kWidth, table);
      if constexpr (kScaled) {
        w = multiply_add(w, V::load(scale + v * V::kWidth), V::load(offset + v * V::kWidth));
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r][v] = multiply_add(x[r], w, sums[r][v]);
    }
  }
#pragma GCC unroll 32
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 32
    for (int v = 0; v < kVectors; ++v) sums[r][v].store(out + r * kPanelOutputs + v * V::kWidth);
  }
}

template <class V, Code kCode, int kRows>
FUSEDMOE_INLINE void gemm_rows(const GemmTile& tile, int row) {
  const typename V::Table table(nibble_values<kCode>(tile.segments.layout.offset));
  if constexpr (bits_of(kCode) <= 8) {
    const std::int64_t step = tile.segments.layout.k;
    for (std::int64_t k = 0; step > 0 && k < tile.k; k += step) {
      alignas(64) float scale[kPanelOutputs];
      alignas(64) float offset[kPanelOutputs];
      load_segment(tile.segments, k / step, scale, offset);
      const std::int64_t end = k + step < tile.k ? k + step : tile.k;
      gemm_rows<V, kCode, kRows, true, true>(tile, row, k, end, table, scale, offset);
    }
    if (step > 0) return;
  }
  if (row == 0) {
    gemm_rows<V, kCode, kRows, true, false>(tile, row, 0, tile.k, table, nullptr, nullptr);
  } else {
    gemm_rows<V, kCode, kRows, false, false>(tile, row, 0, tile.k, table, nullptr, nullptr);
  }
}

// kRows: as many rows as the registers hold next to their weights.
template <class V, Code kCode, int kRows>
FUSEDMOE_INLINE void gemm(const GemmTile& tile) {
  int row = 0;
  for (; row + kRows <= tile.rows; row += kRows) gemm_rows<V, kCode, kRows>(tile, row);
  if constexpr (kRows > 2) {
    if (tile.rows - row == 2) return gemm_rows<V, kCode, 2>(tile, row);
  }
  for (; row < tile.rows; ++row) gemm_rows<V, kCode, 1>(tile, row);
}

template <class V>
FUSEDMOE_INLINE void load_row(const void* from, DType dtype, std::int64_t count, float* to) {
  const auto* half = static_cast<const std::uint16_t*>(from);
  const auto* single = static_cast<const float*>(from);
  std::int64_t i = 0;
  for (; i + V::kWidth <= count; i += V::kWidth) {
    const V value = dtype == DType::bf16  ? V::load_bf16(half + i)
                    : dtype == DType::f16 ? V::load_f16(half + i)
                                          : V::load(single + i);
    value.store(to + i);
  }
  for (; i < count; ++i) {
    to[i] = dtype == DType::bf16  ? bf16_to_f32(half[i])
            : dtype == DType::f16 ? f16_to_f32(half[i])
                                  : single[i];
  }
}

template <class V>
FUSEDMOE_INLINE void load_rows(const LoadRows& rows) {
  const std::int64_t bytes = rows.dtype == DType::f32 ? 4 : 2;
  for (int r = 0; r < rows.rows; ++r) {
    load_row<V>(static_cast<const char*>(rows.from[r]) + rows.k0 * bytes, rows.dtype, rows.k,
                static_cast<float*>(rows.to) + r * row_stride(rows.k));
  }
}

// Rounds `count` of the floats at `from` (a whole number of vectors are readable) to dtype.
template <class V>
FUSEDMOE_INLINE void store_row(const float* from, DType dtype, int count, void* to) {
  auto* half = static_cast<std::uint16_t*>(to);
  auto* single = static_cast<float*>(to);
  std::uint16_t rest[V::kWidth];
  for (int i = 0; i < count; i += V::kWidth) {
    const V value = V::load(from + i);
    const int n = count - i < V::kWidth ? count - i : V::kWidth;
    if (dtype == DType::f32) {
      for (int j = 0; j < n; ++j) single[i + j] = from[i + j];
      continue;
    }
    std::uint16_t* target = n == V::kWidth ? half + i : rest;
    if (dtype == DType::bf16) {
      value.store_bf16(target);
    } else {
      value.store_f16(target);
    }
    if (target == rest) {
      for (int j = 0; j < n; ++j) half[i + j] = rest[j];
    }
  }
}

template <class V, Activation kKind>
FUSEDMOE_INLINE void activate_rows(const ActivateTile& tile) {
  constexpr int kUp = kKind == Activation::relu2 ? 0 : kGatedOutputs;
  constexpr int kOutputs = kPanelOutputs - kUp;
  alignas(64) float result[kOutputs];
  const std::int64_t bytes = tile.dtype == DType::f32 ? 4 : 2;
  for (int r = 0; r < tile.rows; ++r) {
    const float* row = tile.accumulators + static_cast<std::int64_t>(r) * kPanelOutputs;
    const auto projected = [&](int column) {
      V value = V::load(row + column);
      if (tile.scale != nullptr) value = value * V::load(tile.scale + column);
      if (tile.row_scale != nullptr) value = value * V(tile.row_scale[r]);
      if (tile.bias != nullptr) value = value + V::load(tile.bias + column);
      return value;
    };
    // Channels beyond the last are computed on zeros and not stored: every channel takes the same
    // path, whatever its place in a vector.
    for (int i = 0; i < kOutputs; i += V::kWidth) {
      const V gate = kUp == 0 ? V(0.0F) : projected(i);
      activations::activate<kKind>(*tile.activation, tile.clamp_limit, gate, projected(kUp + i))
          .store(result + i);
    }
    store_row<V>(result, tile.dtype, tile.outputs,
                 static_cast<char*>(tile.to) + r * tile.to_stride * bytes);
  }
}

template <class V>
FUSEDMOE_INLINE void activate(const ActivateTile& tile) {
  activations::dispatch(tile.activation->kind,
                        [&]<Activation kKind>() { activate_rows<V, kKind>(tile); });
}

// One vector of a result: into the output, or into the sum that is kept.
template <class V>
FUSEDMOE_INLINE void store_result(V value, bool last, DType dtype, std::int64_t i, void* output,
                                  float* kept) {
  if (!last) {
    value.store(kept + i);
  } else if (dtype == DType::bf16) {
    value.store_bf16(static_cast<std::uint16_t*>(output) + i);
  } else if (dtype == DType::f16) {
    value.store_f16(static_cast<std::uint16_t*>(output) + i);
  } else {
    value.store(static_cast<float*>(output) + i);
  }
}

template <class V>
FUSEDMOE_INLINE void combine(const CombineTile& tile) {
  alignas(64) float sum[kPanelOutputs] = {};  // columns beyond the last are added up and not stored
  const std::int64_t bytes = tile.dtype == DType::f32 ? 4 : 2;
  for (int r = 0; r < tile.rows; ++r) {
    const RowTarget& target = tile.targets[r];
    const float* row = tile.accumulators + static_cast<std::int64_t>(r) * kPanelOutputs;
    void* output = static_cast<char*>(tile.output) + target.token * tile.output_stride * bytes;
    const bool alone = target.first && target.last;  // there may be no sums at all
    float* kept = alone ? sum : tile.sums + target.token * tile.sums_stride;
    if (!alone) {  // what the next panel will add to: many tokens' sums lie beyond L2
      __builtin_prefetch(kept + kPanelOutputs, 1);
      __builtin_prefetch(kept + kPanelOutputs + 16, 1);
    }
    const bool whole = tile.outputs == kPanelOutputs;
    if (!target.first && !whole) {
      for (int i = 0; i < tile.outputs; ++i) sum[i] = kept[i];
    }
    const float* before = whole ? kept : sum;
    for (int i = 0; i < kPanelOutputs; i += V::kWidth) {
      V value = V::load(row + i);
      if (tile.scale != nullptr) value = value * V::load(tile.scale + i);
      if (tile.row_scale != nullptr) value = value * V(tile.row_scale[r]);
      if (tile.bias != nullptr) value = value + V::load(tile.bias + i);
      value = value * V(target.weight);
      if (!target.first) value = V::load(before + i) + value;
      if (whole) {
        store_result(value, target.last, tile.dtype, i, output, kept);
      } else {
        value.store(sum + i);
      }
    }
    if (whole) continue;
    if (target.last) {
      store_row<V>(sum, tile.dtype, tile.outputs, output);
    } else {
      for (int i = 0; i < tile.outputs; ++i) kept[i] = sum[i];
    }
  }
}

}  // namespace fusedmoe::cpu
