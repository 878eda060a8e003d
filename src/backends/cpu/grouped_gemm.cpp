#include "backends/cpu/grouped_gemm.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "backends/cpu/pack.h"
#include "formats/float_bits.h"

namespace fusedmoe::cpu {
namespace {

// Rows that pass over a panel together. More would read the weights less often, but fp32 arithmetic
// is the limit by then.
constexpr int kRowBlock = 48;
// Panels whose accumulators are kept between two pieces of K.
constexpr int kPanelGroup = 16;
// Floats for gathered rows (256 KiB, a part of L2), which bound the piece of K: 1365 inputs at 48
// rows. Long pieces let the weights stream: pieces of 256 took 55 instead of 36 ms at 64 tokens and
// 470 instead of 422 at 1024 (qwen3-30b-a3b, bf16, Zen 4). A row is padded so that rows do not
// alias in L1.
constexpr std::int64_t kRowFloats = 64 * 1024;
constexpr std::int64_t kRowPad = 16;
// A borrowed panel is packed piece by piece into scratch.
constexpr std::int64_t kBorrowedK = 1024;

// Cost of one pass of a row block over a panel, in rows: below this many rows the panel's bytes
// decide, above it the multiplications. On Zen 4 a thread reads the 64 bytes of one k in 1.8 to 3.6
// ns (36 to 18 GB/s) and multiplies a row by them in 0.54 ns (118 GFLOP/s): 3 to 7 rows.
constexpr int kRowsPerPass = 6;
// A thread more must bring at least this much of the weights. An estimate: at 400 KB in all, two
// threads take 16 us where one takes 22 (Zen 4); below 64 KB nothing was gained by a second.
constexpr std::int64_t kMinThreadBytes = 32 * 1024;

struct ThreadScratch {
  float rows[kRowFloats + kRowBlock * kRowPad];
  float accumulators[kPanelGroup][kRowBlock * kPanelOutputs];
  std::byte panel[kBorrowedK * kPanelOutputs * sizeof(float)];
  float bias[kPanelOutputs];
};

ThreadScratch& scratch_of(const CallState& state, int thread) {
  return *reinterpret_cast<ThreadScratch*>(state.thread_scratch + thread * thread_scratch_bytes());
}

// One of the two weight matrices, panel by panel.
struct Matrix {
  const Layer& layer;
  bool is_w13;
  std::int64_t inputs;  // K
  const GemmKernel* kernel;

  // [k][32] of panel `index`, from k0 on.
  const void* panel(std::int64_t expert, std::int64_t index, std::int64_t k0, std::int64_t k,
                    ThreadScratch& scratch) const {
    if (layer.packed != nullptr) {
      const PackedLayout& layout = layer.packed->layout();
      const std::int64_t bytes = is_w13 ? layout.w13_panel_bytes : layout.w2_panel_bytes;
      return layer.packed->expert(expert) + (is_w13 ? 0 : layout.w2_offset) + index * bytes +
             k0 * (bytes / inputs);
    }
    const PanelOutputs outputs = is_w13 ? w13_panel(*layer.spec, *layer.borrowed, expert, index)
                                        : w2_panel(*layer.spec, *layer.borrowed, expert, index);
    copy_panel(outputs, k0, k, scratch.panel);
    return scratch.panel;
  }

  // [32] or null.
  const float* bias(std::int64_t expert, std::int64_t index, ThreadScratch& scratch) const {
    if (layer.packed != nullptr) {
      const PackedLayout& layout = layer.packed->layout();
      const std::int64_t offset = is_w13 ? layout.w13_bias_offset : layout.w2_bias_offset;
      if (offset < 0) return nullptr;
      return reinterpret_cast<const float*>(layer.packed->expert(expert) + offset) +
             index * kPanelOutputs;
    }
    const bool has = is_w13
                         ? w13_bias_panel(*layer.spec, *layer.borrowed, expert, index, scratch.bias)
                         : w2_bias_panel(*layer.spec, *layer.borrowed, expert, index, scratch.bias);
    return has ? scratch.bias : nullptr;
  }
};

// A block of rows of one expert, as addresses of their inputs.
struct RowBlock {
  std::array<const void*, kRowBlock> from;
  DType dtype;
  int rows;
};

// Multiplies a block of rows by panels [begin, end) and hands each panel's accumulators to
// epilogue(panel, accumulators).
template <class Epilogue>
void multiply(const Matrix& matrix, std::int64_t expert, const RowBlock& block, std::int64_t begin,
              std::int64_t end, ThreadScratch& scratch, const Epilogue& epilogue) {
  std::int64_t k_step = kRowFloats / block.rows;
  if (matrix.layer.packed == nullptr) k_step = std::min(k_step, kBorrowedK);
  k_step = std::min(k_step, matrix.inputs);
  const std::int64_t stride = k_step + kRowPad;
  bool loaded = false;
  for (std::int64_t group = begin; group < end; group += kPanelGroup) {
    const std::int64_t group_end = std::min(end, group + kPanelGroup);
    for (std::int64_t k0 = 0; k0 < matrix.inputs; k0 += k_step) {
      const std::int64_t k = std::min(k_step, matrix.inputs - k0);
      if (!loaded) {
        matrix.layer.rows->load_rows(
            {block.from.data(), block.dtype, k0, k, block.rows, scratch.rows, stride});
        loaded = k == matrix.inputs;  // whole rows serve every group
      }
      for (std::int64_t p = group; p < group_end; ++p) {
        matrix.kernel->run({scratch.rows, stride, block.rows,
                            matrix.panel(expert, p, k0, k, scratch), k,
                            scratch.accumulators[p - group], k0 == 0});
      }
    }
    for (std::int64_t p = group; p < group_end; ++p) {
      epilogue(p, scratch.accumulators[p - group]);
    }
  }
}

// The rows of an expert in even blocks of at most kRowBlock.
struct Blocks {
  std::int64_t begin, count;
  std::int64_t num_blocks() const { return (count + kRowBlock - 1) / kRowBlock; }
  std::int64_t start(std::int64_t block) const { return begin + count * block / num_blocks(); }
};

Blocks blocks_of(const CallState& state, std::int32_t expert) {
  const auto& offsets = state.permutation.expert_offsets;
  return {offsets[expert], offsets[expert + 1] - offsets[expert]};
}

std::int64_t cost_of(std::int64_t rows) { return std::max<std::int64_t>(rows, kRowsPerPass); }

// Of one pass over one panel, summed over all blocks of rows.
std::int64_t total_cost(const CallState& state) {
  std::int64_t total = 0;
  for (const std::int32_t expert : state.active_experts) {
    const Blocks blocks = blocks_of(state, expert);
    for (std::int64_t b = 0; b < blocks.num_blocks(); ++b) {
      total += cost_of(blocks.start(b + 1) - blocks.start(b));
    }
  }
  return total;
}

float router_weight(const ConstMatrixView& weights, std::int64_t token, std::int64_t k) {
  const std::int64_t index = token * weights.row_stride + k;
  if (weights.dtype == DType::f32) return static_cast<const float*>(weights.data)[index];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(weights.data)[index];
  return weights.dtype == DType::f16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

const std::byte* row_address(const ConstMatrixView& view, std::int64_t row) {
  return static_cast<const std::byte*>(view.data) +
         row * view.row_stride * bytes_per_element(view.dtype);
}

RowTarget target_of(const Layer& layer, const CallState& state, std::int32_t row) {
  const std::int64_t top_k = layer.spec->config.top_k;
  const std::int64_t slot = state.permutation.row_to_slot[row];
  const std::int64_t token = slot / top_k;
  const bool on_input = layer.spec->config.apply_router_weight_on_input;
  RowTarget target{token, 1.0F, true, true};
  if (!on_input) target.weight = router_weight(state.call->topk_weights, token, slot % top_k);
  // Rows are sorted by expert, then slot: ascending rows of a token are the order of its sum.
  for (std::int64_t k = 0; k < top_k; ++k) {
    const std::int32_t other = state.permutation.slot_to_row[token * top_k + k];
    target.first &= other < 0 || other >= row;
    target.last &= other <= row;
  }
  return target;
}

// Zeros for the tokens of [begin, end) that have no row at all, in columns [from, to).
void zero_empty_tokens(const Layer& layer, const CallState& state, std::int64_t begin,
                       std::int64_t end, std::int64_t from, std::int64_t to) {
  const std::int64_t top_k = layer.spec->config.top_k;
  const MatrixView& output = state.call->output;
  const std::int64_t bytes = bytes_per_element(output.dtype);
  for (std::int64_t token = begin; token < end; ++token) {
    const auto rows = state.permutation.slot_to_row.subspan(token * top_k, top_k);
    if (std::any_of(rows.begin(), rows.end(), [](std::int32_t row) { return row >= 0; })) continue;
    std::memset(static_cast<std::byte*>(output.data) + (token * output.row_stride + from) * bytes,
                0, (to - from) * bytes);
  }
}

}  // namespace

std::int64_t thread_scratch_bytes() {
  return (static_cast<std::int64_t>(sizeof(ThreadScratch)) + 63) / 64 * 64;
}

int useful_threads(const Layer& layer, const CallState& state, int limit) {
  // Bytes of weights that are read, once per block of rows; at least one panel each.
  const std::int64_t passes = total_cost(state) / kRowsPerPass;
  const std::int64_t panel_bytes = layer.spec->config.hidden_size * kPanelOutputs * 2;
  const std::int64_t bytes = passes * layer.w13_panels * panel_bytes;
  const std::int64_t threads = std::clamp<std::int64_t>(bytes / kMinThreadBytes, 1, limit);
  return static_cast<int>(threads);
}

void gemm1(const Layer& layer, const CallState& state, int thread, int threads) {
  const MoeConfig& config = layer.spec->config;
  const Matrix w13{layer, true, config.hidden_size, layer.gemm13};
  ThreadScratch& scratch = scratch_of(state, thread);
  const std::int64_t channels = layer.spec->gated() ? kGatedOutputs : kPanelOutputs;
  const DType dtype = layer.compute_dtype();
  const std::int64_t total = total_cost(state) * layer.w13_panels;
  const std::int64_t low = total * thread / threads;
  const std::int64_t high = total * (thread + 1) / threads;
  std::int64_t base = 0;
  for (const std::int32_t expert : state.active_experts) {
    const Blocks blocks = blocks_of(state, expert);
    for (std::int64_t b = 0; b < blocks.num_blocks() && base < high; ++b) {
      const std::int64_t row = blocks.start(b);
      const auto rows = static_cast<int>(blocks.start(b + 1) - row);
      // A panel belongs to the thread in whose share its first unit of cost lies.
      const std::int64_t cost = cost_of(rows);
      const auto first_panel = [&](std::int64_t at) {
        return std::clamp<std::int64_t>((at - base + cost - 1) / cost, 0, layer.w13_panels);
      };
      const std::int64_t begin = low <= base ? 0 : first_panel(low);
      const std::int64_t end = first_panel(high);
      base += cost * layer.w13_panels;
      if (begin >= end) continue;

      RowBlock block{{}, state.call->hidden.dtype, rows};
      std::array<float, kRowBlock> scales{};
      for (int r = 0; r < rows; ++r) {
        const std::int64_t slot = state.permutation.row_to_slot[row + r];
        const std::int64_t token = slot / config.top_k;
        block.from[r] = row_address(state.call->hidden, token);
        if (config.apply_router_weight_on_input) {
          scales[r] = router_weight(state.call->topk_weights, token, slot % config.top_k);
        }
      }
      multiply(w13, expert, block, begin, end, scratch, [&](std::int64_t p, const float* sums) {
        const std::int64_t channel = p * channels;
        auto* to = static_cast<std::byte*>(state.activated) +
                   (row * config.intermediate_size + channel) * bytes_per_element(dtype);
        layer.rows->activate(
            {sums, rows, static_cast<int>(std::min(channels, config.intermediate_size - channel)),
             config.apply_router_weight_on_input ? scales.data() : nullptr,
             w13.bias(expert, p, scratch), &config.activation, config.clamp_limit.value_or(0.0F),
             to, dtype, config.intermediate_size});
      });
    }
  }
}

void gemm2(const Layer& layer, const CallState& state, int thread, int threads) {
  const MoeConfig& config = layer.spec->config;
  const MatrixView& output = state.call->output;
  const Matrix w2{layer, false, config.intermediate_size, layer.gemm2};
  ThreadScratch& scratch = scratch_of(state, thread);
  // A thread owns columns of the output, and tokens too when there are more threads than panels:
  // nobody else adds to its sums, so their order is fixed.
  const std::int64_t column_parts = std::min<std::int64_t>(threads, layer.w2_panels);
  const std::int64_t token_parts = threads / column_parts;
  if (thread >= column_parts * token_parts) return;
  const std::int64_t column_part = thread % column_parts;
  const std::int64_t token_part = thread / column_parts;
  const std::int64_t begin = layer.w2_panels * column_part / column_parts;
  const std::int64_t end = layer.w2_panels * (column_part + 1) / column_parts;
  const std::int64_t first_token = output.rows * token_part / token_parts;
  const std::int64_t last_token = output.rows * (token_part + 1) / token_parts;
  zero_empty_tokens(layer, state, first_token, last_token, begin * kPanelOutputs,
                    std::min(end * kPanelOutputs, config.hidden_size));

  const DType dtype = layer.compute_dtype();
  const std::int64_t row_bytes = config.intermediate_size * bytes_per_element(dtype);
  const std::int64_t output_bytes = bytes_per_element(output.dtype);
  for (const std::int32_t expert : state.active_experts) {
    // Rows of an expert ascend by slot: those of a range of tokens lie together.
    const Blocks all = blocks_of(state, expert);
    const auto slots = state.permutation.row_to_slot.subspan(all.begin, all.count);
    const auto first = std::lower_bound(slots.begin(), slots.end(), first_token * config.top_k);
    const auto last = std::lower_bound(first, slots.end(), last_token * config.top_k);
    const Blocks blocks{all.begin + (first - slots.begin()), last - first};
    for (std::int64_t b = 0; b < blocks.num_blocks(); ++b) {
      const std::int64_t row = blocks.start(b);
      RowBlock block{{}, dtype, static_cast<int>(blocks.start(b + 1) - row)};
      std::array<RowTarget, kRowBlock> targets;
      for (int r = 0; r < block.rows; ++r) {
        block.from[r] = static_cast<const std::byte*>(state.activated) + (row + r) * row_bytes;
        targets[r] = target_of(layer, state, static_cast<std::int32_t>(row + r));
      }
      multiply(w2, expert, block, begin, end, scratch, [&](std::int64_t p, const float* sums) {
        const std::int64_t column = p * kPanelOutputs;
        layer.rows->combine(
            {sums, block.rows,
             static_cast<int>(std::min<std::int64_t>(kPanelOutputs, config.hidden_size - column)),
             w2.bias(expert, p, scratch), targets.data(),
             state.sums == nullptr ? nullptr : state.sums + column, state.sums_stride,
             static_cast<std::byte*>(output.data) + column * output_bytes, output.dtype,
             output.row_stride});
      });
    }
  }
}

}  // namespace fusedmoe::cpu
