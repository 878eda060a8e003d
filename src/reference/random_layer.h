// A layer with random weights and random input, made from a seed: for tests, verify and examples of
// every size, format, layout and routing. Owns its memory; views into it stay valid when it moves.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "fusedmoe/config.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"

namespace fusedmoe {

struct RandomWeightsOptions {
  WeightFormat w13_format = WeightFormat::bf16;
  WeightFormat w2_format = WeightFormat::bf16;
  // Layout, type and parts; unset: what default_scales() says of the format.
  std::optional<WeightScales> w13_scales = {};
  std::optional<WeightScales> w2_scales = {};
  bool zero_points = false;  // of int4
  WeightLayout w13_layout = WeightLayout::nk;
  WeightLayout w2_layout = WeightLayout::nk;
  bool gate_up_apart = false;  // w13 and w13_up in two tensors
  bool w13_bias = false;
  bool w2_bias = false;
  DType bias_dtype = DType::f32;
  std::int64_t row_padding = 0;     // elements behind each stored row, NaN where the format has one
  std::int64_t expert_padding = 0;  // elements behind each expert, in addition
  std::int64_t misalign = 0;        // bytes by which data start off a 64-byte boundary
};

// What such weights are: shapes, formats and layouts, without data. Zero points, if there are to be
// some, have an address that nobody may read.
ExpertWeights stated_weights(const MoeConfig& config, std::int64_t num_experts,
                             const RandomWeightsOptions& options);

class RandomWeights {
 public:
  // num_experts: how many the weights hold (local ones under a map).
  RandomWeights(const MoeConfig& config, std::int64_t num_experts,
                const RandomWeightsOptions& options, std::uint64_t seed);
  const ExpertWeights& view() const { return view_; }
  // The same weights, one expert at a time.
  ExpertWeights as_source() const;
  // Writable, for tests that change weights behind a plan's back.
  void* w2_data();

 private:
  // What `tensor` states, filled.
  WeightTensor make_tensor(WeightTensor tensor, const RandomWeightsOptions& options,
                           std::mt19937_64& random);
  // A copy at `misalign` bytes behind a multiple of 64; null for nothing.
  std::byte* keep(std::span<const std::byte> bytes, std::int64_t misalign);
  BiasTensor make_bias(BiasTensor bias, std::mt19937_64& random);

  std::vector<std::vector<std::byte>> memory_;
  ExpertWeights view_;
};

// One expert of a whole stack, as ExpertWeights::source returns it.
ExpertWeights slice(const ExpertWeights& weights, std::int64_t expert);

// Input of a call. Buffers are strided when padding is given; padding holds 0xFF bytes.
struct RandomInputOptions {
  std::int64_t num_tokens = 1;
  DType ids_dtype = DType::i32;
  DType topk_weights_dtype = DType::f32;
  std::int64_t hidden_padding = 0;
  std::int64_t output_padding = 0;
  std::int64_t topk_padding = 0;
  double skip_share = 0.0;           // of slots with id -1
  bool nan_skipped_weights = false;  // topk_weights of these slots are NaN
  double hot_share = 0.0;            // of slots that choose the last expert
  bool repeated_ids = false;         // the same id twice in a row may happen
};

class RandomInput {
 public:
  RandomInput(const MoeConfig& config, const RandomInputOptions& options, std::uint64_t seed);
  ConstMatrixView hidden() const { return hidden_view_; }
  ConstMatrixView topk_weights() const { return topk_weights_view_; }
  ConstMatrixView topk_ids() const { return topk_ids_view_; }
  // 0xFF bytes until a call writes it; `dirty` fills it again.
  MatrixView output() const { return output_view_; }
  void dirty_output();
  // The bytes of the output without padding, for comparisons bit by bit.
  std::vector<std::byte> output_bytes() const;
  bool output_padding_untouched() const;
  void set_id(std::int64_t token, std::int64_t k, std::int64_t id);

 private:
  std::vector<std::byte> hidden_, topk_weights_, topk_ids_, output_;
  ConstMatrixView hidden_view_, topk_weights_view_, topk_ids_view_;
  MatrixView output_view_;
};

}  // namespace fusedmoe
