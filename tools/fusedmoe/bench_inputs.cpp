#include "bench_inputs.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace fusedmoe::tool {
namespace {

constexpr std::int64_t kFewestRoutings = 8;
constexpr std::uint64_t kSeed = 20240229;

}  // namespace

BenchInputs::BenchInputs(const BenchSetup& setup, std::int64_t num_tokens, std::int64_t num_layers)
    : num_tokens_(num_tokens),
      num_layers_(num_layers),
      top_k_(setup.shape.config.top_k),
      hidden_size_(setup.shape.config.hidden_size),
      dtype_(setup.shape.config.dtype) {
  const std::int64_t bytes = num_tokens * hidden_size_ * bytes_per_element(dtype_);
  hidden_.resize(static_cast<std::size_t>((bytes + 7) / 8));
  fill_random(hidden_, signed_floats(dtype_, -1), kSeed, setup.threads);

  const std::vector<std::int32_t> map =
      setup.options.expert_map.resolve(setup.shape.config.num_experts);
  std::vector<std::int32_t> experts(static_cast<std::size_t>(setup.shape.config.num_experts));
  std::iota(experts.begin(), experts.end(), 0);
  std::mt19937_64 random(kSeed);
  std::uniform_real_distribution<float> weight(0.5F, 1.5F);
  const std::int64_t sets = (kFewestRoutings + num_layers - 1) / num_layers;
  routings_.resize(static_cast<std::size_t>(sets * num_layers));
  for (Routing& routing : routings_) {
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      float sum = 0;
      const std::size_t first = routing.topk_weights.size();
      for (std::int64_t k = 0; k < top_k_; ++k) {  // the first steps of a shuffle
        std::uniform_int_distribution<std::size_t> pick(static_cast<std::size_t>(k),
                                                        experts.size() - 1);
        std::swap(experts[static_cast<std::size_t>(k)], experts[pick(random)]);
        routing.topk_ids.push_back(experts[static_cast<std::size_t>(k)]);
        routing.topk_weights.push_back(weight(random));
        sum += routing.topk_weights.back();
      }
      for (std::size_t i = first; i < routing.topk_weights.size(); ++i) {
        routing.topk_weights[i] /= sum;
      }
    }
    routing.work = count_work(setup.shape, setup.format, routing.topk_ids, map);
  }
}

ConstMatrixView BenchInputs::hidden() const {
  return {hidden_.data(), dtype_, num_tokens_, hidden_size_};
}

ConstMatrixView BenchInputs::topk_ids(const Routing& routing) const {
  return {routing.topk_ids.data(), DType::i32, num_tokens_, top_k_};
}

ConstMatrixView BenchInputs::topk_weights(const Routing& routing) const {
  return {routing.topk_weights.data(), DType::f32, num_tokens_, top_k_};
}

const Routing& BenchInputs::routing(std::int64_t step, std::int64_t layer) const {
  return routings_[static_cast<std::size_t>(routing_index(step, layer))];
}

std::int64_t BenchInputs::routing_index(std::int64_t step, std::int64_t layer) const {
  const auto sets = static_cast<std::int64_t>(routings_.size()) / num_layers_;
  const std::int64_t set = step % sets;
  const std::int64_t turn = step / sets;
  return set * num_layers_ + (layer + turn) % num_layers_;
}

}  // namespace fusedmoe::tool
