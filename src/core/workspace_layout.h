// Where the scratch of a plan lies: named spans with lifetimes, placed in two arenas whose sizes
// are affine in the number of tokens. One span from the caller holds both arenas, one after the
// other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fusedmoe/workspace.h"

namespace fusedmoe {

// Stages in order of time; a span lives from its first to its last stage, both included.
enum class Stage : std::uint8_t { permute = 0, gemm1, activation, gemm2, combine };

struct ScratchRequest {
  const char* name = "";
  std::int64_t fixed = 0;      // bytes whatever the number of tokens
  std::int64_t per_token = 0;  // bytes per token; a request has one of the two, not both
  Stage first = Stage::permute;
  Stage last = Stage::combine;
  bool in_workspace13 = false;  // what an engine calls workspace13: the intermediate of gemm1
};

class WorkspaceLayout {
 public:
  // Sizes are rounded up to `alignment`, a power of two.
  WorkspaceLayout(std::span<const ScratchRequest> requests, std::int64_t alignment);

  WorkspaceFormula formula() const;  // both arenas in one span
  WorkspaceFormula formula13() const { return arenas_[0]; }
  WorkspaceFormula formula2() const { return arenas_[1]; }

  // Addresses of all requests, in their order, for a call of num_tokens.
  void place(std::byte* workspace13, std::byte* workspace2, std::int64_t num_tokens,
             std::span<std::byte*> addresses) const;
  std::size_t num_spans() const { return placed_.size(); }

 private:
  struct Placed {
    int arena;
    std::int64_t offset;  // bytes, or bytes per token behind the arena's fixed part
    bool scales;          // with the number of tokens
  };
  WorkspaceFormula arenas_[2];
  std::vector<Placed> placed_;
};

}  // namespace fusedmoe
