// What a panel of packed weights is made of: what 256 k share, the records of its segments, then
// its codes. Follows from the tensor and from the kernel that reads it.
#pragma once

#include <cstdint>

#include "backends/cpu/kernels/codes.h"
#include "backends/cpu/kernels/kernels.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cpu {

struct PanelFormat {
  Code code = Code::f32;
  PanelLayout layout;
  SegmentLayout segments;
  bool column_scales = false;  // a scale per output, for the epilogue
  // Rows whose multiplication takes as long as reading the panel.
  std::int64_t rows_per_pass = 1;

  // Of a piece of k inputs that starts a panel: its parts, one behind the other, each from a
  // multiple of 64 bytes on. Records come first: a stream that is prefetched in order brings them
  // before the codes that need them.
  std::int64_t code_bytes(std::int64_t k) const { return cpu::code_bytes(code, layout.padded(k)); }
  std::int64_t records_offset(std::int64_t k) const {
    constexpr std::int64_t kSuper = SegmentLayout::kSuperK;
    return round_up((k + kSuper - 1) / kSuper * segments.super_bytes());
  }
  std::int64_t codes_offset(std::int64_t k) const {
    return records_offset(k) + round_up(segments.count(k) * segments.record_bytes());
  }
  std::int64_t bytes(std::int64_t k) const { return codes_offset(k) + round_up(code_bytes(k)); }
  // Where a piece of K may start: a multiple of this.
  std::int64_t period() const;

  // The part of `panel`, [whole_k] inputs, that starts at k0: its codes and its segments.
  const std::byte* codes(const std::byte* panel, std::int64_t whole_k, std::int64_t k0) const {
    return panel + codes_offset(whole_k) + code_bytes(k0);  // k0 needs no padding
  }
  Segments segments_of(const std::byte* panel, std::int64_t whole_k, std::int64_t k0) const {
    if (segments.k == 0) return {};
    return {segments, panel + records_offset(whole_k) + k0 / segments.k * segments.record_bytes(),
            panel + k0 / SegmentLayout::kSuperK * segments.super_bytes()};
  }

 private:
  static std::int64_t round_up(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }
};

PanelFormat panel_format(const WeightTensor& tensor, const GemmKernel& kernel);

// Throws unsupported for groups that no kernel's units divide: `name` is the tensor's argument.
void check_panel_format(const char* name, const WeightTensor& tensor);

}  // namespace fusedmoe::cpu
