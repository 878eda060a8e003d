// The metadata of a GGUF file -> the MoE layers of its model, as model_config.h gives them from
// config.json.
#pragma once

#include "checkpoint/gguf.h"
#include "checkpoint/model_config.h"

namespace fusedmoe::checkpoint {

// A GGUF file says nothing of the dtype of activations: f32, as ggml computes. Throws Error{io} for
// metadata that is missing, wrong, or contradicts itself, and Error{unsupported} for an
// architecture or a router that is not read.
ModelConfig read_gguf_config(const GgufFile& file);

// The same with a config.json for that model, whose dtype, activation and router then hold. Throws
// Error{io} naming both files where the two say different things.
ModelConfig merge_gguf_config(const ModelConfig& from_gguf, const GgufFile& file,
                              const ModelConfig& from_json);

}  // namespace fusedmoe::checkpoint
