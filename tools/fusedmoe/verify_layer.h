// One layer against expected values: what `verify` does for each row of its table.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/golden.h"
#include "checkpoint/layer_reader.h"
#include "fusedmoe/fused_moe.h"
#include "reference/tolerance.h"

namespace fusedmoe::tool {

struct Comparison {
  std::string source = {};  // "oracle" or "golden"
  std::int64_t num_tokens = 0;
  Errors errors = {};
  Errors limit = {};
  std::string routing = {};  // of goldens: "match", "mismatch" or "not checked"
  std::string golden = {};   // the file
  // FNV-1a of the output's bytes, row by row: equal bits on two machines or through two languages
  // give equal numbers.
  std::uint64_t output_fnv1a = 0;
  std::string problem = {};  // why it failed besides, or instead of, its errors; empty = nothing

  bool pass() const { return problem.empty() && within(errors, limit); }
};

class LayerVerifier {
 public:
  // Builds the plan. Throws what FusedMoe::create throws. `layer` must outlive this object.
  LayerVerifier(const checkpoint::MoeLayer& layer, const PlanOptions& options);

  // Random tokens and ids against the oracle.
  Comparison against_oracle(std::int64_t num_tokens, std::uint64_t seed) const;
  // Throws Error{io} when the golden does not fit the layer.
  Comparison against_golden(const checkpoint::Golden& golden) const;

  const FusedMoe& plan() const { return plan_; }

 private:
  Comparison compare_with(std::span<const double> expected, const ConstMatrixView& hidden,
                          const ConstMatrixView& topk_weights,
                          const ConstMatrixView& topk_ids) const;

  const checkpoint::MoeLayer& layer_;
  FusedMoe plan_;
};

// The loosest row of the tolerance table that these formats have.
Errors tolerance_of(const MoeConfig& config, std::span<const WeightFormat> formats,
                    ComputeMode mode);

}  // namespace fusedmoe::tool
