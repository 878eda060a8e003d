// Packed weights in memory: their layout, the header that lets a later plan adopt them, and the
// memory itself, owned or the caller's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/backend.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cpu {

// Offsets of the parts of one expert; every part starts at a multiple of 64 bytes.
struct PackedLayout {
  std::int64_t num_experts = 0;
  std::int64_t w13_panels = 0;
  std::int64_t w2_panels = 0;
  std::int64_t w13_panel_bytes = 0;
  std::int64_t w2_panel_bytes = 0;
  std::int64_t w2_offset = 0;        // w13 is at 0
  std::int64_t w13_bias_offset = 0;  // -1 = no bias; [w13_panels][32] f32
  std::int64_t w2_bias_offset = 0;   // -1 = no bias; [w2_panels][32] f32
  std::int64_t expert_bytes = 0;

  PackedLayout() = default;
  PackedLayout(const PlanSpec& spec, const ExpertWeights& weights);
  // Header and all experts.
  std::int64_t storage_bytes() const;
};

class WeightStorage {
 public:
  // Own memory (given empty) or the caller's.
  WeightStorage(const PlanSpec& spec, const ExpertWeights& weights, std::span<std::byte> given);
  WeightStorage(const WeightStorage&) = delete;
  WeightStorage& operator=(const WeightStorage&) = delete;
  ~WeightStorage();

  std::byte* expert(std::int64_t index) const;
  // Between the two the header says that the contents are not to be used.
  void begin_write();
  void end_write();
  // Throws invalid_argument with the difference unless an equal plan packed this memory.
  void check_adoptable() const;
  // Gives own pages back to the system; the addresses stay. The caller's memory is left alone.
  void release();
  std::int64_t bytes() const { return layout_.storage_bytes(); }
  const PackedLayout& layout() const { return layout_; }

 private:
  struct Header;
  Header* header() const;

  PackedLayout layout_;
  std::byte* data_ = nullptr;
  bool owned_ = false;
  // What the header must say.
  std::int64_t facts_[10] = {};
};

}  // namespace fusedmoe::cpu
