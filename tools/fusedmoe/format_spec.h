// How weights are stored, as one text: a format, and where its scales lie, as `bench --format`
// takes it and rows print it. `fp8_e4m3:128x128`, `int4:32:bf16:zp`.
#pragma once

#include <cstdint>
#include <string>

#include "fusedmoe/config.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::tool {

struct FormatSpec {
  WeightFormat format = WeightFormat::bf16;
  WeightScales scales = {};  // layout, type and sizes alone
  bool zero_points = false;
};

// FORMAT[:SCALES][:TYPE][:zp], in any order behind FORMAT; kFormatHelp says more. What is left out
// is as most checkpoints of the format have it. Throws invalid_argument.
FormatSpec parse_format(const std::string& text);
extern const char* const kFormatHelp;

// With its scales, where a format has a choice; what parse_format takes.
std::string to_string(const FormatSpec& spec);

// Stacks without data. Of a gated w13, gate and up are two parts, as checkpoints quantise them.
WeightTensor tensor_of(const FormatSpec& spec, std::int64_t experts, std::int64_t outputs,
                       std::int64_t inputs);
WeightTensor w13_of(const FormatSpec& spec, const MoeConfig& config, std::int64_t experts);
WeightTensor w2_of(const FormatSpec& spec, const MoeConfig& config, std::int64_t experts);

// Of a stack, as a checkpoint keeps it: codes, scales, zero points of 4 bits, global scales.
std::int64_t stored_bytes(const FormatSpec& spec, const WeightTensor& tensor);

}  // namespace fusedmoe::tool
