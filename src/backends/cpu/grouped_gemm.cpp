#include "backends/cpu/grouped_gemm.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "backends/cpu/pack.h"
#include "formats/float_bits.h"

namespace fusedmoe::cpu {
namespace {

// Panels whose accumulators are kept between two pieces of K.
constexpr int kPanelGroup = 16;
// Of a piece of a borrowed panel, at least.
constexpr std::int64_t kBorrowedK = 1024;
// Of any instruction set: GemmInputs::max_rows.
constexpr int kMostRows = 256;
// A thread more must bring at least this much of w13. Two threads cost 2 us to start, meet and end,
// and one reads 60 to 100 GB/s from its caches: one token through 100 KB of weights takes 2.1 us on
// one thread and 3.4 on two, 200 KB 3.4 and 4.0, 400 KB 6.2 and 5.7 (Zen 4).
constexpr std::int64_t kMinThreadBytes = 128 * 1024;

// One of the two weight matrices, panel by panel.
struct Matrix {
  const Layer& layer;
  bool is_w13;
  std::int64_t inputs;  // K

  const PackedLayout::Panels& panels() const { return is_w13 ? layer.layout.w13 : layer.layout.w2; }
  const GemmKernel& kernel() const { return is_w13 ? *layer.kernels.gemm13 : *layer.kernels.gemm2; }
  const GemmInputs& rows() const {
    return is_w13 ? *layer.kernels.inputs13 : *layer.kernels.inputs2;
  }

  const PanelFormat& format() const { return panels().format; }
  // Inputs whose sum each row is asked for: those of a segment, where codes have offsets.
  std::int64_t row_sums_k() const {
    const bool needed = rows().dtype == DType::i8 || format().segments.has_offsets();
    return needed ? format().segments.k : 0;
  }

  // Where a piece of panel `index` is kept, with the panel's records before the first; null when
  // borrowed.
  const std::byte* kept(std::int64_t expert, std::int64_t index, std::int64_t k0) const {
    if (layer.packed == nullptr) return nullptr;
    const std::byte* panel = layer.packed->panel(panels(), expert, index);
    return k0 == 0 ? panel : format().codes(panel, inputs, k0);
  }
  PanelOutputs outputs(std::int64_t expert, std::int64_t index) const {
    return is_w13 ? w13_panel(*layer.spec, *layer.borrowed, expert, index)
                  : w2_panel(*layer.spec, *layer.borrowed, expert, index);
  }
  // A piece with its segments; packed into scratch when it is borrowed.
  struct Piece {
    const std::byte* codes;
    Segments segments;
  };
  Piece piece(std::int64_t expert, std::int64_t index, std::int64_t k0, std::int64_t k,
              std::byte* scratch) const {
    if (layer.packed != nullptr) {
      const std::byte* panel = layer.packed->panel(panels(), expert, index);
      return {format().codes(panel, inputs, k0), format().segments_of(panel, inputs, k0)};
    }
    pack_panel(outputs(expert, index), format(), k0, k, scratch);
    return {format().codes(scratch, k, 0), format().segments_of(scratch, k, 0)};
  }

  // What the epilogue needs of a panel: [32] or null each.
  struct Epilogue {
    const float* scale;
    const float* bias;
  };
  Epilogue epilogue(std::int64_t expert, std::int64_t index, float* scratch) const {
    if (layer.packed != nullptr) {
      return {layer.packed->scales(panels(), expert, index),
              layer.packed->bias(panels(), expert, index)};
    }
    float* bias = scratch + kPanelOutputs;
    const bool scales = column_scales(outputs(expert, index), format(), scratch);
    const bool biases = is_w13 ? w13_bias_panel(*layer.spec, *layer.borrowed, expert, index, bias)
                               : w2_bias_panel(*layer.spec, *layer.borrowed, expert, index, bias);
    return {scales ? scratch : nullptr, biases ? bias : nullptr};
  }
};

// A borrowed panel is packed piece by piece into scratch: k of a piece.
std::int64_t borrowed_k(const PanelFormat& format) {
  const std::int64_t period = format.period();
  return (kBorrowedK + period - 1) / period * period;
}
std::int64_t borrowed_bytes(const PackedLayout::Panels& panels) {
  return panels.format.bytes(borrowed_k(panels.format));
}

// A thread's part of the scratch.
struct ThreadScratch {
  std::byte* rows;             // loaded: GemmInputs::bytes_at_once
  float* accumulators;         // [kPanelGroup][max_rows][32]
  std::byte* panel;            // of borrowed weights
  float* epilogue;             // [2][32], of borrowed weights
  std::byte* row_sums;         // of the loaded rows' segments
  float* row_scales;           // [max_rows], a8
  std::int64_t sums_of_panel;  // floats of one panel's accumulators
  std::int64_t bytes;

  ThreadScratch(const Layer& layer, std::byte* base) {
    const GemmInputs& a = *layer.kernels.inputs13;
    const GemmInputs& b = *layer.kernels.inputs2;
    sums_of_panel = std::max(a.max_rows, b.max_rows) * kPanelOutputs;
    std::int64_t offset = 0;
    const auto part = [&](std::int64_t size) {
      const std::int64_t at = offset;
      offset += (size + 63) / 64 * 64;
      return base == nullptr ? nullptr : base + at;  // null: only the size is asked for
    };
    rows = part(std::max(a.bytes_at_once, b.bytes_at_once));
    accumulators =
        reinterpret_cast<float*>(part(kPanelGroup * sums_of_panel * std::int64_t{sizeof(float)}));
    epilogue = reinterpret_cast<float*>(part(2 * kPanelOutputs * sizeof(float)));
    row_sums = part(std::max(sums_bytes(a, layer.layout.w13), sums_bytes(b, layer.layout.w2)));
    row_scales = reinterpret_cast<float*>(part(kMostRows * sizeof(float)));
    panel = part(layer.packed == nullptr
                     ? std::max(borrowed_bytes(layer.layout.w13), borrowed_bytes(layer.layout.w2))
                     : 0);
    bytes = offset;
  }

 private:
  // Four bytes for each segment of each loaded row, of which the last may be short.
  static std::int64_t sums_bytes(const GemmInputs& inputs, const PackedLayout::Panels& panels) {
    const SegmentLayout& segments = panels.format.segments;
    if (inputs.dtype != DType::i8 && !segments.has_offsets()) return 0;
    const std::int64_t elements = inputs.bytes_at_once / bytes_per_element(inputs.dtype);
    return 4 * (elements / segments.k + inputs.max_rows);
  }
};

ThreadScratch scratch_of(const Layer& layer, const CallState& state, int thread) {
  return {layer, state.thread_scratch + thread * thread_scratch_bytes(layer)};
}

// A block of rows of one expert, as addresses of their inputs.
struct RowBlock {
  std::array<const void*, kMostRows> from;
  DType dtype;
  int rows;
};

// The longest piece of K of which a block's rows fit into scratch, in even pieces.
std::int64_t piece_of_k(const Matrix& matrix, int rows) {
  const GemmInputs& inputs = matrix.rows();
  const std::int64_t row_bytes = inputs.bytes_at_once / inputs.padded_rows(rows);
  std::int64_t most = (row_bytes - inputs.row_bytes(0)) / bytes_per_element(inputs.dtype);
  if (matrix.layer.packed == nullptr) most = std::min(most, borrowed_k(matrix.format()));
  const std::int64_t period = matrix.format().period();
  const auto whole = [&](std::int64_t k) { return (k + period - 1) / period * period; };
  most = std::max(most / period * period, period);
  const std::int64_t pieces = (matrix.inputs + most - 1) / most;
  return whole((matrix.inputs + pieces - 1) / pieces);
}

// Multiplies a block of rows by panels [begin, end) and hands each panel's accumulators to
// epilogue(panel, accumulators). after: the piece that this thread reads next, or null.
template <class Epilogue>
void multiply(const Matrix& matrix, std::int64_t expert, const RowBlock& block, std::int64_t begin,
              std::int64_t end, const std::byte* after, const ThreadScratch& scratch,
              const Epilogue& epilogue) {
  const std::int64_t step = piece_of_k(matrix, block.rows);
  bool loaded = false;
  for (std::int64_t group = begin; group < end; group += kPanelGroup) {
    const std::int64_t group_end = std::min(end, group + kPanelGroup);
    for (std::int64_t k0 = 0; k0 < matrix.inputs; k0 += step) {
      const std::int64_t k = std::min(step, matrix.inputs - k0);
      const bool last_piece = k0 + k == matrix.inputs;
      if (!loaded) {
        matrix.rows().load_rows({block.from.data(), block.dtype, k0, k, block.rows, scratch.rows,
                                 matrix.inputs, matrix.row_sums_k(), scratch.row_sums,
                                 scratch.row_scales});
        loaded = k == matrix.inputs;  // whole rows serve every group
      }
      for (std::int64_t p = group; p < group_end; ++p) {
        const std::byte* next = p + 1 < group_end ? matrix.kept(expert, p + 1, k0)
                                : !last_piece     ? matrix.kept(expert, group, k0 + step)
                                : group_end < end ? matrix.kept(expert, group_end, 0)
                                                  : after;
        const Matrix::Piece piece = matrix.piece(expert, p, k0, k, scratch.panel);
        float* sums = scratch.accumulators + (p - group) * scratch.sums_of_panel;
        matrix.kernel().run({scratch.rows, block.rows, piece.codes, k,
                             next == nullptr ? piece.codes : next, sums, k0 == 0, piece.segments,
                             matrix.row_sums_k() > 0 ? scratch.row_sums : nullptr});
        if (last_piece) epilogue(p, sums);
      }
    }
  }
}

// The rows of an expert in even blocks of at most max_rows.
struct Blocks {
  std::int64_t begin, count;
  std::int64_t max_rows;
  std::int64_t num_blocks() const { return (count + max_rows - 1) / max_rows; }
  std::int64_t start(std::int64_t block) const { return begin + count * block / num_blocks(); }
};

Blocks blocks_of(const CallState& state, const GemmInputs& inputs, std::int32_t expert) {
  const auto& offsets = state.permutation.expert_offsets;
  return {offsets[expert], offsets[expert + 1] - offsets[expert], inputs.max_rows};
}

// Of one pass of a block over a panel, in rows: below rows_per_pass the panel's bytes decide.
std::int64_t cost_of(const Matrix& matrix, std::int64_t rows) {
  return std::max<std::int64_t>(matrix.rows().padded_rows(rows), matrix.format().rows_per_pass);
}

// Of one pass over one panel, summed over all blocks of rows.
std::int64_t total_cost(const Matrix& matrix, const CallState& state) {
  std::int64_t total = 0;
  for (const std::int32_t expert : state.active_experts) {
    const Blocks blocks = blocks_of(state, matrix.rows(), expert);
    for (std::int64_t b = 0; b < blocks.num_blocks(); ++b) {
      total += cost_of(matrix, blocks.start(b + 1) - blocks.start(b));
    }
  }
  return total;
}

// The place of a thread: its NUMA node, and its number among the threads there.
struct Place {
  std::int64_t node, thread, threads;

  Place(const Layer& layer, int of, int all) {
    // A team smaller than the nodes reads everybody's panels.
    const std::int64_t nodes = all < layer.layout.nodes() ? 1 : layer.layout.nodes();
    split = nodes > 1;
    node = of % nodes;
    thread = of / nodes;
    threads = (all - node + nodes - 1) / nodes;
  }
  struct Range {
    std::int64_t begin, end;
    std::int64_t size() const { return end - begin; }
  };
  Range panels(const Layer& layer, const PackedLayout::Panels& of) const {
    if (!split) return {0, of.count};
    return {layer.layout.first_panel(of, node), layer.layout.first_panel(of, node + 1)};
  }

 private:
  bool split;
};

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

std::int64_t thread_scratch_bytes(const Layer& layer) {
  return ThreadScratch(layer, nullptr).bytes;
}

int useful_threads(const Layer& layer, const CallState& state, int limit) {
  // Bytes of weights that are read, once per block of rows; at least one panel each.
  const Matrix w13{layer, true, layer.spec->config.hidden_size};
  const std::int64_t passes = total_cost(w13, state) / w13.format().rows_per_pass;
  const std::int64_t bytes = passes * layer.layout.w13.count * layer.layout.w13.bytes;
  const std::int64_t threads = std::clamp<std::int64_t>(bytes / kMinThreadBytes, 1, limit);
  return static_cast<int>(threads);
}

void gemm1(const Layer& layer, const CallState& state, int thread, int threads) {
  const MoeConfig& config = layer.spec->config;
  const Matrix w13{layer, true, config.hidden_size};
  const GemmInputs& inputs = w13.rows();
  const ThreadScratch scratch = scratch_of(layer, state, thread);
  const std::int64_t channels = layer.spec->gated() ? kGatedOutputs : kPanelOutputs;
  const DType dtype = layer.compute_dtype();
  const bool on_input = config.apply_router_weight_on_input;
  const bool integers = inputs.dtype == DType::i8;
  const Place place(layer, thread, threads);
  const auto panels = place.panels(layer, layer.layout.w13);
  const std::int64_t total = total_cost(w13, state) * panels.size();
  const std::int64_t low = total * place.thread / place.threads;
  const std::int64_t high = total * (place.thread + 1) / place.threads;
  std::int64_t base = 0;
  for (std::size_t active = 0; active < state.active_experts.size(); ++active) {
    const std::int32_t expert = state.active_experts[active];
    const Blocks blocks = blocks_of(state, inputs, expert);
    for (std::int64_t b = 0; b < blocks.num_blocks() && base < high; ++b) {
      const std::int64_t row = blocks.start(b);
      const auto rows = static_cast<int>(blocks.start(b + 1) - row);
      // A panel belongs to the thread in whose share its first unit of cost lies.
      const std::int64_t cost = cost_of(w13, rows);
      const auto first_panel = [&](std::int64_t at) {
        return panels.begin +
               std::clamp<std::int64_t>((at - base + cost - 1) / cost, 0, panels.size());
      };
      const std::int64_t begin = low <= base ? panels.begin : first_panel(low);
      const std::int64_t end = first_panel(high);
      base += cost * panels.size();
      if (begin >= end) continue;

      RowBlock block{{}, state.call->hidden.dtype, rows};
      std::array<float, kMostRows> scales;
      std::array<float, kMostRows> products;
      for (int r = 0; r < rows; ++r) {
        const std::int64_t slot = state.permutation.row_to_slot[row + r];
        const std::int64_t token = slot / config.top_k;
        block.from[r] = row_address(state.call->hidden, token);
        if (on_input) {
          scales[r] = router_weight(state.call->topk_weights, token, slot % config.top_k);
        }
      }
      const bool more = b + 1 < blocks.num_blocks();
      const std::size_t next =
          more ? active : std::min(active + 1, state.active_experts.size() - 1);
      const std::byte* after = w13.kept(state.active_experts[next], panels.begin, 0);
      multiply(w13, expert, block, begin, end, after, scratch,
               [&](std::int64_t p, const float* sums) {
                 const std::int64_t channel = p * channels;
                 const float* row_scale = on_input ? scales.data() : nullptr;
                 if (integers) {
                   row_scale = scratch.row_scales;
                   for (int r = 0; on_input && r < rows; ++r)
                     products[r] = scales[r] * row_scale[r];
                   if (on_input) row_scale = products.data();
                 }
                 auto* to = static_cast<std::byte*>(state.activated) +
                            (row * config.intermediate_size + channel) * bytes_per_element(dtype);
                 const Matrix::Epilogue epilogue = w13.epilogue(expert, p, scratch.epilogue);
                 layer.kernels.rows->activate(
                     {sums, rows,
                      static_cast<int>(std::min(channels, config.intermediate_size - channel)),
                      row_scale, epilogue.scale, epilogue.bias, &config.activation,
                      config.clamp_limit.value_or(0.0F), to, dtype, config.intermediate_size});
               });
    }
  }
}

void gemm2(const Layer& layer, const CallState& state, int thread, int threads) {
  const MoeConfig& config = layer.spec->config;
  const MatrixView& output = state.call->output;
  const Matrix w2{layer, false, config.intermediate_size};
  const GemmInputs& inputs = w2.rows();
  const ThreadScratch scratch = scratch_of(layer, state, thread);
  // A thread owns columns of the output, and tokens too when there are more threads than panels:
  // nobody else adds to its sums, so their order is fixed.
  const Place place(layer, thread, threads);
  const auto panels = place.panels(layer, layer.layout.w2);
  if (panels.size() == 0) return;
  const std::int64_t column_parts = std::min(place.threads, panels.size());
  const std::int64_t token_parts = place.threads / column_parts;
  if (place.thread >= column_parts * token_parts) return;
  const std::int64_t column_part = place.thread % column_parts;
  const std::int64_t token_part = place.thread / column_parts;
  const std::int64_t begin = panels.begin + panels.size() * column_part / column_parts;
  const std::int64_t end = panels.begin + panels.size() * (column_part + 1) / column_parts;
  const std::int64_t first_token = output.rows * token_part / token_parts;
  const std::int64_t last_token = output.rows * (token_part + 1) / token_parts;
  zero_empty_tokens(layer, state, first_token, last_token, begin * kPanelOutputs,
                    std::min(end * kPanelOutputs, config.hidden_size));

  const DType dtype = layer.compute_dtype();
  const std::int64_t row_bytes = config.intermediate_size * bytes_per_element(dtype);
  const std::int64_t output_bytes = bytes_per_element(output.dtype);
  for (std::size_t active = 0; active < state.active_experts.size(); ++active) {
    const std::int32_t expert = state.active_experts[active];
    // Rows of an expert ascend by slot: those of a range of tokens lie together.
    const Blocks all = blocks_of(state, inputs, expert);
    const auto slots = state.permutation.row_to_slot.subspan(all.begin, all.count);
    const auto first = std::lower_bound(slots.begin(), slots.end(), first_token * config.top_k);
    const auto last = std::lower_bound(first, slots.end(), last_token * config.top_k);
    const Blocks blocks{all.begin + (first - slots.begin()), last - first, inputs.max_rows};
    for (std::int64_t b = 0; b < blocks.num_blocks(); ++b) {
      const std::int64_t row = blocks.start(b);
      RowBlock block{{}, dtype, static_cast<int>(blocks.start(b + 1) - row)};
      std::array<RowTarget, kMostRows> targets;
      for (int r = 0; r < block.rows; ++r) {
        block.from[r] = static_cast<const std::byte*>(state.activated) + (row + r) * row_bytes;
        targets[r] = target_of(layer, state, static_cast<std::int32_t>(row + r));
      }
      const bool more = b + 1 < blocks.num_blocks();
      const std::size_t next =
          more ? active : std::min(active + 1, state.active_experts.size() - 1);
      const std::byte* after = w2.kept(state.active_experts[next], begin, 0);
      multiply(w2, expert, block, begin, end, after, scratch,
               [&](std::int64_t p, const float* sums) {
                 const std::int64_t column = p * kPanelOutputs;
                 const Matrix::Epilogue epilogue = w2.epilogue(expert, p, scratch.epilogue);
                 layer.kernels.rows->combine(
                     {sums, block.rows,
                      static_cast<int>(
                          std::min<std::int64_t>(kPanelOutputs, config.hidden_size - column)),
                      inputs.dtype == DType::i8 ? scratch.row_scales : nullptr, epilogue.scale,
                      epilogue.bias, targets.data(),
                      state.sums == nullptr ? nullptr : state.sums + column, state.sums_stride,
                      static_cast<std::byte*>(output.data) + column * output_bytes, output.dtype,
                      output.row_stride});
               });
    }
  }
}

}  // namespace fusedmoe::cpu
