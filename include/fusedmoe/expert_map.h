// Which experts of a model are local to this rank (expert parallelism).
#pragma once

#include <cstdint>
#include <vector>

#include "fusedmoe/export.h"

namespace fusedmoe {

// Global expert id -> local expert id, -1 = not on this rank. The default holds every expert, and
// local ids equal global ids. The map alone decides which experts are local; a rank may have none.
class FUSEDMOE_EXPORT ExpertMap {
 public:
  ExpertMap() = default;

  // Contiguous ranges. When num_experts is no multiple of `size`, the first ranks get one more.
  // Throws invalid_argument unless 0 <= rank < size.
  static ExpertMap linear(int rank, int size);

  // Expert g is on rank g % size with local id g / size. Throws invalid_argument as linear().
  static ExpertMap round_robin(int rank, int size);

  // map[global id] = local id or -1. Local ids must be 0..n-1, each exactly once; checked when a
  // plan is built, against its number of experts.
  static ExpertMap explicit_map(std::vector<std::int32_t> map);

  // The whole table for a model of num_experts. Throws invalid_argument with the numbers: a map of
  // another length, a local id out of range, or two global ids on one local id.
  std::vector<std::int32_t> resolve(std::int64_t num_experts) const;

  // True for the default: every expert is local under its own id.
  bool is_identity() const noexcept { return kind_ == Kind::identity; }

 private:
  enum class Kind : std::uint8_t { identity, linear, round_robin, explicit_map };
  Kind kind_ = Kind::identity;
  int rank_ = 0;
  int size_ = 1;
  std::vector<std::int32_t> map_;
};

}  // namespace fusedmoe
