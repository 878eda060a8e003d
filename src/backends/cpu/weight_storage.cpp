#include "backends/cpu/weight_storage.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "backends/cpu/kernels/kernels.h"
#include "formats/format.h"
#include "fusedmoe/error.h"

namespace fusedmoe::cpu {
namespace {

constexpr std::int64_t kHeaderBytes = 256;
constexpr char kMagic[8] = {'F', 'M', 'O', 'E', 'C', 'P', 'U', '1'};

std::int64_t round_up(std::int64_t value) { return (value + 63) / 64 * 64; }

// Names of facts_, in order: what two plans must share to share packed weights.
constexpr const char* kFacts[] = {"hidden_size", "intermediate_size", "local experts",
                                  "gated",       "format of w13",     "format of w2",
                                  "w13 bias",    "w2 bias",           "outputs per panel",
                                  "bytes"};

}  // namespace

struct WeightStorage::Header {
  char magic[8];
  std::int64_t complete;
  std::int64_t facts[std::size(kFacts)];
};

PackedLayout::PackedLayout(const PlanSpec& spec, const ExpertWeights& weights)
    : num_experts(spec.num_local_experts) {
  const std::int64_t h_size = spec.config.hidden_size;
  const std::int64_t i_size = spec.config.intermediate_size;
  const auto panel_bytes = [](const WeightTensor& tensor, std::int64_t k) {
    return k * kPanelOutputs * format_info(tensor.format).bits_per_weight / 8;
  };
  const std::int64_t channels = spec.gated() ? kGatedOutputs : kPanelOutputs;
  w13_panels = (i_size + channels - 1) / channels;
  w2_panels = (h_size + kPanelOutputs - 1) / kPanelOutputs;
  w13_panel_bytes = panel_bytes(weights.w13, h_size);
  w2_panel_bytes = panel_bytes(weights.w2, i_size);
  w2_offset = round_up(w13_panels * w13_panel_bytes);
  std::int64_t end = round_up(w2_offset + w2_panels * w2_panel_bytes);
  constexpr std::int64_t kBiasBytes = kPanelOutputs * sizeof(float);
  w13_bias_offset = weights.w13_bias.empty() ? -1 : end;
  if (w13_bias_offset >= 0) end += w13_panels * kBiasBytes;
  w2_bias_offset = weights.w2_bias.empty() ? -1 : end;
  if (w2_bias_offset >= 0) end += w2_panels * kBiasBytes;
  expert_bytes = end;
}

std::int64_t PackedLayout::storage_bytes() const {
  return kHeaderBytes + num_experts * expert_bytes;
}

WeightStorage::WeightStorage(const PlanSpec& spec, const ExpertWeights& weights,
                             std::span<std::byte> given)
    : layout_(spec, weights),
      facts_{spec.config.hidden_size,
             spec.config.intermediate_size,
             spec.num_local_experts,
             spec.gated() ? 1 : 0,
             static_cast<std::int64_t>(weights.w13.format),
             static_cast<std::int64_t>(weights.w2.format),
             weights.w13_bias.empty() ? 0 : 1,
             weights.w2_bias.empty() ? 0 : 1,
             kPanelOutputs,
             layout_.storage_bytes()} {
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
}

WeightStorage::~WeightStorage() {
  if (owned_) munmap(data_, static_cast<std::size_t>(bytes()));
}

WeightStorage::Header* WeightStorage::header() const { return reinterpret_cast<Header*>(data_); }

std::byte* WeightStorage::expert(std::int64_t index) const {
  return data_ + kHeaderBytes + index * layout_.expert_bytes;
}

void WeightStorage::begin_write() {
  std::memset(data_, 0, kHeaderBytes);
  std::memcpy(header()->magic, kMagic, sizeof(kMagic));
  std::memcpy(header()->facts, facts_, sizeof(facts_));
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
