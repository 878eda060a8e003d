// Packed weights in memory: their layout, the header that lets a later plan adopt them, and the
// memory itself, owned or the caller's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "backends/cpu/kernel_choice.h"
#include "backends/cpu/panel_format.h"
#include "core/backend.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cpu {

// Where each panel lies: [node][expert][panels of w13, panels of w2], the panels of one node being
// a range of each matrix's; then what the epilogues need, biases and scales per output,
// [expert][panels of w13, panels of w2][32] f32 each. Every part starts at a multiple of 64 bytes.
class PackedLayout {
 public:
  PackedLayout() = default;
  // nodes: 1, or as many as share the panels.
  PackedLayout(const PlanSpec& spec, const ExpertWeights& weights, const KernelChoice& kernels,
               int nodes);

  // Of w13 or w2.
  struct Panels {
    bool is_w13 = false;
    std::int64_t count = 0;
    std::int64_t inputs = 0;         // K
    std::int64_t bytes = 0;          // of one panel
    std::int64_t bias_offset = -1;   // in what an expert's epilogues need; -1 = none
    std::int64_t scale_offset = -1;  // likewise
    PanelFormat format;
  };
  Panels w13, w2;

  int nodes() const { return static_cast<int>(starts_.size()) - 1; }
  // The panels that a node owns: [first, first of the next node).
  std::int64_t first_panel(const Panels& panels, std::int64_t node) const {
    return panels.count * node / nodes();
  }
  // Offsets in the storage.
  std::int64_t panel_offset(const Panels& panels, std::int64_t expert, std::int64_t panel) const;
  // offset: Panels::bias_offset or scale_offset.
  std::int64_t epilogue_offset(std::int64_t offset, std::int64_t expert, std::int64_t panel) const {
    return starts_.back() + expert * expert_epilogue_bytes_ + offset + panel * kPanelFloats;
  }
  std::int64_t node_start(int node) const { return starts_[static_cast<std::size_t>(node)]; }
  // Of its last panel: what lies between that and the start of the next is not used.
  std::int64_t node_end(int node) const { return ends_[static_cast<std::size_t>(node)]; }
  // Header and all experts.
  std::int64_t storage_bytes() const {
    return starts_.back() + num_experts_ * expert_epilogue_bytes_;
  }

 private:
  static constexpr std::int64_t kPanelFloats = kPanelOutputs * sizeof(float);

  std::int64_t num_experts_ = 0;
  std::int64_t expert_epilogue_bytes_ = 0;
  std::vector<std::int64_t> starts_{0, 0};  // of each node's part, and of the epilogues'
  std::vector<std::int64_t> ends_{0};
};

class WeightStorage {
 public:
  // Own memory (given empty) or the caller's.
  WeightStorage(const PlanSpec& spec, const ExpertWeights& weights, const PackedLayout& layout,
                std::span<std::byte> given);
  WeightStorage(const WeightStorage&) = delete;
  WeightStorage& operator=(const WeightStorage&) = delete;
  ~WeightStorage();

  std::byte* panel(const PackedLayout::Panels& panels, std::int64_t expert,
                   std::int64_t panel) const {
    return data_ + layout_.panel_offset(panels, expert, panel);
  }
  // [32], or null without.
  float* bias(const PackedLayout::Panels& panels, std::int64_t expert, std::int64_t panel) const {
    return epilogue(panels.bias_offset, expert, panel);
  }
  float* scales(const PackedLayout::Panels& panels, std::int64_t expert, std::int64_t panel) const {
    return epilogue(panels.scale_offset, expert, panel);
  }
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
  float* epilogue(std::int64_t offset, std::int64_t expert, std::int64_t panel) const {
    if (offset < 0) return nullptr;
    return reinterpret_cast<float*>(data_ + layout_.epilogue_offset(offset, expert, panel));
  }

  PackedLayout layout_;
  std::byte* data_ = nullptr;
  bool owned_ = false;
  // What the header must say.
  std::int64_t facts_[15] = {};
};

}  // namespace fusedmoe::cpu
