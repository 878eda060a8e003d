// Finds the tensors of every MoE layer in a source and checks them against the config. Faults are
// collected, so that a listing can show all of them; checkpoint.h is the face of this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/model_config.h"
#include "checkpoint/tensor_source.h"
#include "fusedmoe/config.h"
#include "fusedmoe/error.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::checkpoint {

struct Problem {
  ErrorCode code = ErrorCode::io;
  std::string message = {};
};

// Bounded: a hostile checkpoint may have more faults than anyone reads.
class ProblemList {
 public:
  void add(ErrorCode code, std::string message);
  const std::vector<Problem>& list() const noexcept { return list_; }
  bool empty() const noexcept { return list_.empty(); }
  std::size_t num_dropped() const noexcept { return num_dropped_; }

 private:
  std::vector<Problem> list_;
  std::size_t num_dropped_ = 0;
};

struct MoeLayer {
  std::int64_t index = 0;  // in the model
  MoeConfig config = {};
  // Views into the mapped files. Either whole stacks, or `source` with one expert at a time; the
  // index it takes is the global expert id. `source` keeps the maps alive on its own.
  ExpertWeights weights = {};
  RouterSpec router = {};
  ConstMatrixView router_weight = {};          // [num_experts, hidden_size]
  ConstMatrixView router_logit_bias = {};      // [1, num_experts]; null data = none
  ConstMatrixView router_selection_bias = {};  // [1, num_experts]; null data = none
  std::int64_t bytes = 0;                      // of the experts' tensors
  std::vector<WeightFormat> formats = {};      // each once, w13 first
  bool has_input_scales = false;               // of activations: not used in a16
  std::vector<std::string> notes = {};         // what a user should know, though nothing is wrong
};

// The layers that are whole, ascending; what is wrong with the others is in `problems`.
std::vector<MoeLayer> read_layers(const ModelConfig& model,
                                  const std::shared_ptr<TensorSource>& source,
                                  ProblemList& problems);

}  // namespace fusedmoe::checkpoint
