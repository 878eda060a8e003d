#include "backends/cpu/weight_storage.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "backends/cpu/numa.h"
#include "fusedmoe/error.h"

namespace fusedmoe::cpu {
namespace {

constexpr std::int64_t kHeaderBytes = 256;
constexpr char kMagic[8] = {'F', 'M', 'O', 'E', 'C', 'P', 'U', '1'};
// Nodes do not share a page, however large.
constexpr std::int64_t kNodeAlignment = std::int64_t{2} << 20;

// Names of facts_, in order: what two plans must share to share packed weights.
constexpr const char* kFacts[] = {"hidden_size", "intermediate_size", "local experts",
                                  "gated",       "format of w13",     "format of w2",
                                  "w13 bias",    "w2 bias",           "outputs per panel",
                                  "w13 layout",  "w2 layout",         "w13 scales",
                                  "w2 scales",   "NUMA nodes",        "bytes"};

std::int64_t number_of(const PanelLayout& layout) {
  return (std::int64_t{layout.lanes} * 1000 + layout.k_group) * 1000 + layout.k_multiple;
}

std::int64_t number_of(const SegmentLayout& segments) {
  return (((segments.k * 10 + static_cast<int>(segments.scale)) * 10 +
           static_cast<int>(segments.offset)) *
              10 +
          (segments.per_half ? 1 : 0));
}

}  // namespace

struct WeightStorage::Header {
  char magic[8];
  std::int64_t complete;
  std::int64_t facts[std::size(kFacts)];
};

PackedLayout::PackedLayout(const PlanSpec& spec, const ExpertWeights& weights,
                           const KernelChoice& kernels, int nodes)
    : num_experts_(spec.num_local_experts) {
  const std::int64_t h_size = spec.config.hidden_size;
  const std::int64_t i_size = spec.config.intermediate_size;
  const auto panels = [&](const WeightTensor& tensor, const BiasTensor& bias,
                          const GemmKernel& kernel, std::int64_t outputs, std::int64_t per_panel,
                          std::int64_t k) {
    Panels result;
    result.count = (outputs + per_panel - 1) / per_panel;
    result.inputs = k;
    result.format = panel_format(tensor, kernel);
    result.bytes = result.format.bytes(k);
    const auto epilogue = [&](bool needed) {
      if (!needed) return std::int64_t{-1};
      const std::int64_t offset = expert_epilogue_bytes_;
      expert_epilogue_bytes_ += result.count * kPanelFloats;
      return offset;
    };
    result.bias_offset = epilogue(!bias.empty());
    result.scale_offset = epilogue(result.format.column_scales);
    return result;
  };
  w13 = panels(weights.w13, weights.w13_bias, *kernels.gemm13, i_size,
               spec.gated() ? kGatedOutputs : kPanelOutputs, h_size);
  w13.is_w13 = true;
  w2 = panels(weights.w2, weights.w2_bias, *kernels.gemm2, h_size, kPanelOutputs, i_size);
  const std::int64_t alignment = nodes > 1 ? kNodeAlignment : kHeaderBytes;
  starts_.assign(static_cast<std::size_t>(nodes) + 1, alignment);
  ends_.assign(static_cast<std::size_t>(nodes), 0);
  for (int node = 0; node < nodes; ++node) {
    std::int64_t bytes = 0;
    for (const Panels& p : {w13, w2}) {
      bytes += (first_panel(p, node + 1) - first_panel(p, node)) * p.bytes;
    }
    const std::int64_t end = node_start(node) + num_experts_ * bytes;
    ends_[static_cast<std::size_t>(node)] = end;
    starts_[static_cast<std::size_t>(node) + 1] = (end + alignment - 1) / alignment * alignment;
  }
}

std::int64_t PackedLayout::panel_offset(const Panels& panels, std::int64_t expert,
                                        std::int64_t panel) const {
  std::int64_t node = 0;
  while (node + 1 < nodes() && panel >= first_panel(panels, node + 1)) ++node;
  const std::int64_t w13_first = first_panel(w13, node);
  const std::int64_t w2_first = first_panel(w2, node);
  const std::int64_t w13_bytes = (first_panel(w13, node + 1) - w13_first) * w13.bytes;
  const std::int64_t w2_bytes = (first_panel(w2, node + 1) - w2_first) * w2.bytes;
  const std::int64_t base =
      starts_[static_cast<std::size_t>(node)] + expert * (w13_bytes + w2_bytes);
  return panels.is_w13 ? base + (panel - w13_first) * w13.bytes
                       : base + w13_bytes + (panel - w2_first) * w2.bytes;
}

WeightStorage::WeightStorage(const PlanSpec& spec, const ExpertWeights& weights,
                             const PackedLayout& layout, std::span<std::byte> given)
    : layout_(layout),
      facts_{spec.config.hidden_size,
             spec.config.intermediate_size,
             spec.num_local_experts,
             spec.gated() ? 1 : 0,
             static_cast<std::int64_t>(weights.w13.format),
             static_cast<std::int64_t>(weights.w2.format),
             weights.w13_bias.empty() ? 0 : 1,
             weights.w2_bias.empty() ? 0 : 1,
             kPanelOutputs,
             number_of(layout.w13.format.layout),
             number_of(layout.w2.format.layout),
             number_of(layout.w13.format.segments),
             number_of(layout.w2.format.segments),
             layout.nodes(),
             layout.storage_bytes()} {
  if (!given.empty()) {
    data_ = given.data();
    return;
  }
  // Pages of its own: release() can give them back and keep the addresses.
  void* pages = mmap(nullptr, static_cast<std::size_t>(bytes()), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) {
    throw Error(ErrorCode::out_of_memory,
                "weights: expected " + std::to_string(bytes()) +
                    " bytes for packed weights, got none from the system; free memory, or borrow");
  }
  // 2 to 8 % at 1 and 8 tokens (Zen 4); where the system has none, nothing is lost.
  madvise(pages, static_cast<std::size_t>(bytes()), MADV_HUGEPAGE);
  data_ = static_cast<std::byte*>(pages);
  owned_ = true;
  for (int node = 0; node < layout_.nodes() && layout_.nodes() > 1; ++node) {
    const std::int64_t start = layout_.node_start(node);
    bind_memory(data_ + start, static_cast<std::size_t>(layout_.node_start(node + 1) - start),
                node);
  }
}

WeightStorage::~WeightStorage() {
  if (owned_) munmap(data_, static_cast<std::size_t>(bytes()));
}

WeightStorage::Header* WeightStorage::header() const { return reinterpret_cast<Header*>(data_); }

void WeightStorage::begin_write() {
  std::memset(data_, 0, kHeaderBytes);
  std::memcpy(header()->magic, kMagic, sizeof(kMagic));
  std::memcpy(header()->facts, facts_, sizeof(facts_));
  if (owned_) return;  // pages of zeros
  // Equal weights are equal bytes, whatever the memory held where no panel lies.
  std::int64_t end = kHeaderBytes;
  for (int node = 0; node <= layout_.nodes(); ++node) {
    const std::int64_t start = layout_.node_start(node);
    std::memset(data_ + end, 0, static_cast<std::size_t>(start - end));
    if (node < layout_.nodes()) end = layout_.node_end(node);
  }
}

void WeightStorage::end_write() { header()->complete = 1; }

void WeightStorage::check_adoptable() const {
  static_assert(sizeof(Header) <= kHeaderBytes &&
                std::size(kFacts) == std::size(decltype(facts_){}));
  const Header* found = header();
  const auto refuse = [](const std::string& expected, const std::string& got) {
    throw Error(ErrorCode::invalid_argument, "options.storage: expected " + expected + ", got " +
                                                 got +
                                                 "; pack into it with weight_storage = caller");
  };
  if (std::memcmp(found->magic, kMagic, sizeof(kMagic)) != 0) {
    refuse("weights that a CPU plan of this version packed", "other memory");
  }
  for (std::size_t i = 0; i < std::size(kFacts); ++i) {
    if (found->facts[i] == facts_[i]) continue;
    refuse(std::string(kFacts[i]) + " = " + std::to_string(facts_[i]),
           std::to_string(found->facts[i]));
  }
  if (found->complete != 1) refuse("complete weights", "weights whose packing was broken off");
}

void WeightStorage::release() {
  if (owned_) madvise(data_, static_cast<std::size_t>(bytes()), MADV_DONTNEED);
}

}  // namespace fusedmoe::cpu
