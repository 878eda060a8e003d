// Rearranges the bytes of quantised weights, as they lie in checkpoints, into the order that
// ExpertWeights has. Sizes are checked before: every function reads and writes exactly the shapes
// that it states, at any alignment.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fusedmoe::checkpoint {

// Canonical int4: [N, K / 2] bytes, the even k in the low nibble.

// GPTQ. words: i32 [K / 8, N], 8 consecutive k in a word, the first in its lowest bits.
void unpack_gptq(const std::byte* words, std::int64_t n, std::int64_t k, std::byte* out);
// Zero points of GPTQ. words: i32 [groups, N / 8], 8 consecutive n in a word. out: u8 [groups, N].
void unpack_gptq_zeros(const std::byte* words, std::int64_t groups, std::int64_t n, int offset,
                       std::byte* out);

// AWQ. words: i32 [K, N / 8]; nibble i of a word belongs to column 0, 2, 4, 6, 1, 3, 5, 7 of its 8.
void unpack_awq(const std::byte* words, std::int64_t n, std::int64_t k, std::byte* out);
// words: i32 [groups, N / 8] in that order. out: u8 [groups, N].
void unpack_awq_zeros(const std::byte* words, std::int64_t groups, std::int64_t n, std::byte* out);

// compressed-tensors zero points of int4. words: i32 [ceil(N / 8), groups], 8 consecutive n in a
// word. out: u8 [N, groups].
void unpack_ct_zeros(const std::byte* words, std::int64_t n, std::int64_t groups, std::byte* out);
// compressed-tensors int8. words: i32 [N, ceil(K / 4)], 4 consecutive k in a word, stored q + 128.
// out: s8 [N, K].
void unpack_ct_int8(const std::byte* words, std::int64_t n, std::int64_t k, std::byte* out);

// GGUF blocks, one after the other. Scales keep their type; where `factor` is not 1, those of f16
// become f32, times the factor.
struct SplitScales {
  std::byte* out;
  bool as_f32;
  float factor;
};
// f16 d, 32 s8. out: s8.
void split_q8_0(const std::byte* blocks, std::int64_t count, std::byte* out,
                const SplitScales& scales);
// f16 d, 16 bytes: elements 0 to 15 in the low nibbles, 16 to 31 in the high ones. out: nibbles.
void split_q4_0(const std::byte* blocks, std::int64_t count, std::byte* out,
                const SplitScales& scales);
// e8m0, 16 bytes as in q4_0. scales: u8 [count].
void split_mxfp4(const std::byte* blocks, std::int64_t count, std::byte* out, std::byte* scales);
// 4 scales, 4 times 8 bytes that hold 16 elements each, 0 to 7 in the low nibbles and 8 to 15 in
// the high ones. scales: e4m3 [4 * count]; ggml has no sign there and takes code 0x7f for zero.
void split_nvfp4(const std::byte* blocks, std::int64_t count, std::byte* out, std::byte* scales);

// Whether a GPTQ checkpoint of the first format stores a zero point of 15, that is, 16 (or, to some
// readers, 0).
bool has_largest_zero(const std::byte* words, std::int64_t num_words);
// Whether indices [K] are k / group for every k.
bool is_group_order(const std::byte* indices, std::int64_t k, std::int64_t group);

}  // namespace fusedmoe::checkpoint
