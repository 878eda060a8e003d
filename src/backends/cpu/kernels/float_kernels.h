// Kernels in fp32 for any vector type: instantiated once per instruction set, with a vector type of
// internal linkage, so that every instance stays in its unit and none runs on another machine.
//
// A vector type V is what activations/math.h asks for, plus: kWidth, load, store (fp32), load_f16,
// load_bf16, store_f16, store_bf16, and multiply_add(a, b, c) = a * b + c by the set's recipe.
#pragma once

#include <cstdint>

#include "activations/activation.h"
#include "backends/cpu/kernels/kernels.h"
#include "formats/float_bits.h"

namespace fusedmoe::cpu {

template <class V, WeightFormat kFormat>
FUSEDMOE_INLINE V load_weights(const void* panel, std::int64_t index) {
  if constexpr (kFormat == WeightFormat::f32) {
    return V::load(static_cast<const float*>(panel) + index);
  } else if constexpr (kFormat == WeightFormat::f16) {
    return V::load_f16(static_cast<const std::uint16_t*>(panel) + index);
  } else {
    static_assert(kFormat == WeightFormat::bf16);
    return V::load_bf16(static_cast<const std::uint16_t*>(panel) + index);
  }
}

// Inputs in fp32, row after row: [rows][row_stride(k)].
inline std::int64_t row_stride(std::int64_t k) { return k + 16; }

// Bytes of weights ahead of the multiplication, for the first rows that pass a panel: the
// hardware's prefetcher restarts at every page. On Zen 4, qwen3-30b-a3b in bf16, together with huge
// pages and whole panels: 1 token 1.46 -> 1.35 ms, 64 tokens 55 -> 36 ms.
inline constexpr std::int64_t kPrefetchBytes = 4096;

template <class V, WeightFormat kFormat, int kRows, bool kPrefetch>
FUSEDMOE_INLINE void gemm_rows(const GemmTile& tile, int row) {
  constexpr int kVectors = kPanelOutputs / V::kWidth;
  const std::int64_t a_stride = row_stride(tile.k);
  const float* a = static_cast<const float*>(tile.a) + row * a_stride;
  float* out = tile.accumulators + static_cast<std::int64_t>(row) * kPanelOutputs;
  V sums[kRows][kVectors];
#pragma GCC unroll 32
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 32
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = tile.first ? V(0.0F) : V::load(out + r * kPanelOutputs + v * V::kWidth);
    }
  }
  for (std::int64_t k = 0; k < tile.k; ++k) {
    if constexpr (kPrefetch) {
      constexpr std::int64_t kBytes = kPanelOutputs * (kFormat == WeightFormat::f32 ? 4 : 2);
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
      const V w = load_weights<V, kFormat>(tile.panel, k * kPanelOutputs + v * V::kWidth);
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

template <class V, WeightFormat kFormat, int kRows>
FUSEDMOE_INLINE void gemm_rows(const GemmTile& tile, int row) {
  if (row == 0) {
    gemm_rows<V, kFormat, kRows, true>(tile, row);
  } else {
    gemm_rows<V, kFormat, kRows, false>(tile, row);
  }
}

// kRows: as many rows as the registers hold next to their weights.
template <class V, WeightFormat kFormat, int kRows>
FUSEDMOE_INLINE void gemm(const GemmTile& tile) {
  int row = 0;
  for (; row + kRows <= tile.rows; row += kRows) gemm_rows<V, kFormat, kRows>(tile, row);
  if constexpr (kRows > 2) {
    if (tile.rows - row == 2) return gemm_rows<V, kFormat, 2>(tile, row);
  }
  for (; row < tile.rows; ++row) gemm_rows<V, kFormat, 1>(tile, row);
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
