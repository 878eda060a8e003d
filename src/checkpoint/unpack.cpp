// Implementation of unpack.h.
#include "checkpoint/unpack.h"

#include <algorithm>
#include <cstring>

#include "formats/float_bits.h"

namespace fusedmoe::checkpoint {
namespace {

// Words of a row that are taken together where a matrix is transposed: a cache line.
constexpr std::int64_t kTile = 16;

constexpr int kAwqColumn[8] = {0, 2, 4, 6, 1, 3, 5, 7};

std::uint32_t word_at(const std::byte* words, std::int64_t index) {
  std::uint32_t word;
  std::memcpy(&word, words + 4 * index, sizeof word);
  return word;
}

std::uint8_t u8(std::byte value) { return std::to_integer<std::uint8_t>(value); }

// `half` bytes that hold elements 0 to half - 1 in their low nibbles and half to 2 * half - 1 in
// their high ones -> pairs of neighbours.
template <int half>
void pair_neighbours(const std::byte* in, std::byte* out) {
  for (int j = 0; j < half / 2; ++j) {
    const unsigned a = u8(in[2 * j]);
    const unsigned b = u8(in[2 * j + 1]);
    out[j] = static_cast<std::byte>((a & 0xfU) | (b & 0xfU) << 4U);
    out[half / 2 + j] = static_cast<std::byte>(a >> 4U | (b & 0xf0U));
  }
}

void put_scale(const std::byte* f16, std::int64_t index, const SplitScales& scales) {
  if (!scales.as_f32) {
    std::memcpy(scales.out + 2 * index, f16, 2);
    return;
  }
  std::uint16_t bits;
  std::memcpy(&bits, f16, sizeof bits);
  const float value = f16_to_f32(bits) * scales.factor;
  std::memcpy(scales.out + 4 * index, &value, sizeof value);
}

}  // namespace

void unpack_gptq(const std::byte* words, std::int64_t n, std::int64_t k, std::byte* out) {
  // A word is four bytes of its row as they are: only words change place.
  const std::int64_t rows = k / 8;
  for (std::int64_t begin = 0; begin < n; begin += kTile) {
    const std::int64_t end = std::min(begin + kTile, n);
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t column = begin; column < end; ++column) {
        std::memcpy(out + 4 * (column * rows + row), words + 4 * (row * n + column), 4);
      }
    }
  }
}

void unpack_gptq_zeros(const std::byte* words, std::int64_t groups, std::int64_t n, int offset,
                       std::byte* out) {
  for (std::int64_t i = 0; i < groups * (n / 8); ++i) {
    const std::uint32_t word = word_at(words, i);
    for (unsigned j = 0; j < 8; ++j) {
      out[8 * i + j] =
          static_cast<std::byte>((word >> (4 * j) & 0xfU) + static_cast<unsigned>(offset));
    }
  }
}

void unpack_awq(const std::byte* words, std::int64_t n, std::int64_t k, std::byte* out) {
  const std::int64_t columns = n / 8;
  for (std::int64_t begin = 0; begin < columns; begin += kTile) {
    const std::int64_t end = std::min(begin + kTile, columns);
    for (std::int64_t pair = 0; pair < k / 2; ++pair) {
      for (std::int64_t column = begin; column < end; ++column) {
        const std::uint32_t even = word_at(words, 2 * pair * columns + column);
        const std::uint32_t odd = word_at(words, (2 * pair + 1) * columns + column);
        for (unsigned i = 0; i < 8; ++i) {
          const std::int64_t row = 8 * column + kAwqColumn[i];
          out[row * (k / 2) + pair] =
              static_cast<std::byte>((even >> (4 * i) & 0xfU) | (odd >> (4 * i) & 0xfU) << 4U);
        }
      }
    }
  }
}

void unpack_awq_zeros(const std::byte* words, std::int64_t groups, std::int64_t n, std::byte* out) {
  for (std::int64_t i = 0; i < groups * (n / 8); ++i) {
    const std::uint32_t word = word_at(words, i);
    for (unsigned j = 0; j < 8; ++j) {
      out[8 * i + kAwqColumn[j]] = static_cast<std::byte>(word >> (4 * j) & 0xfU);
    }
  }
}

void unpack_ct_zeros(const std::byte* words, std::int64_t n, std::int64_t groups, std::byte* out) {
  for (std::int64_t row = 0; row < n; ++row) {
    const auto shift = static_cast<unsigned>(4 * (row % 8));
    for (std::int64_t group = 0; group < groups; ++group) {
      const std::uint32_t word = word_at(words, row / 8 * groups + group);
      out[row * groups + group] = static_cast<std::byte>(word >> shift & 0xfU);
    }
  }
}

void unpack_ct_int8(const std::byte* words, std::int64_t n, std::int64_t k, std::byte* out) {
  const std::int64_t row_bytes = (k + 3) / 4 * 4;
  for (std::int64_t row = 0; row < n; ++row) {
    const std::byte* const from = words + row * row_bytes;
    std::byte* const to = out + row * k;
    for (std::int64_t i = 0; i < k; ++i) to[i] = from[i] ^ std::byte{0x80};  // - 128
  }
}

void split_q8_0(const std::byte* blocks, std::int64_t count, std::byte* out,
                const SplitScales& scales) {
  for (std::int64_t i = 0; i < count; ++i, blocks += 34, out += 32) {
    put_scale(blocks, i, scales);
    std::memcpy(out, blocks + 2, 32);
  }
}

void split_q4_0(const std::byte* blocks, std::int64_t count, std::byte* out,
                const SplitScales& scales) {
  for (std::int64_t i = 0; i < count; ++i, blocks += 18, out += 16) {
    put_scale(blocks, i, scales);
    pair_neighbours<16>(blocks + 2, out);
  }
}

void split_mxfp4(const std::byte* blocks, std::int64_t count, std::byte* out, std::byte* scales) {
  for (std::int64_t i = 0; i < count; ++i, blocks += 17, out += 16) {
    scales[i] = blocks[0];
    pair_neighbours<16>(blocks + 1, out);
  }
}

void split_nvfp4(const std::byte* blocks, std::int64_t count, std::byte* out, std::byte* scales) {
  for (std::int64_t i = 0; i < count; ++i, blocks += 36, out += 32, scales += 4) {
    for (int j = 0; j < 4; ++j) {
      const auto code = static_cast<std::uint8_t>(u8(blocks[j]) & 0x7fU);
      scales[j] = static_cast<std::byte>(code == 0x7f ? 0 : code);
      pair_neighbours<8>(blocks + 4 + 8 * j, out + 8 * j);
    }
  }
}

bool has_largest_zero(const std::byte* words, std::int64_t num_words) {
  for (std::int64_t i = 0; i < num_words; ++i) {
    const std::uint32_t word = word_at(words, i);
    // A nibble of four ones.
    if ((word & word >> 1U & word >> 2U & word >> 3U & 0x11111111U) != 0) return true;
  }
  return false;
}

bool is_group_order(const std::byte* indices, std::int64_t k, std::int64_t group) {
  for (std::int64_t i = 0; i < k; ++i) {
    if (word_at(indices, i) != static_cast<std::uint32_t>(i / group)) return false;
  }
  return true;
}

}  // namespace fusedmoe::checkpoint
