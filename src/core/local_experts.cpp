// One rank's experts out of weights that hold them all.
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "formats/format.h"
#include "fusedmoe/error.h"
#include "fusedmoe/expert_map.h"
#include "fusedmoe/weights.h"

namespace fusedmoe {
namespace {

BiasTensor one_expert(BiasTensor stack, std::int64_t expert) {
  if (stack.empty()) return stack;
  stack.data = static_cast<const std::byte*>(stack.data) +
               expert * stack.size * bytes_per_element(stack.dtype);
  stack.experts = 1;
  return stack;
}

}  // namespace

ExpertWeights local_experts(const ExpertWeights& all, std::span<const std::int32_t> expert_map) {
  const auto num_experts = static_cast<std::int64_t>(expert_map.size());
  std::vector<std::int64_t> counts = {all.w13.experts, all.w2.experts};
  if (!all.w13_up.empty()) counts.push_back(all.w13_up.experts);
  if (!all.w13_bias.empty()) counts.push_back(all.w13_bias.experts);
  if (!all.w2_bias.empty()) counts.push_back(all.w2_bias.experts);
  for (const std::int64_t count : counts) {
    if (count == num_experts) continue;
    throw Error(ErrorCode::invalid_argument,
                "expert_map: expected an entry for each of the " + std::to_string(count) +
                    " experts of every tensor, got " + std::to_string(num_experts) +
                    "; give a local id or -1 for each");
  }
  // Checks the local ids, too.
  const std::vector<std::int32_t> map =
      ExpertMap::explicit_map({expert_map.begin(), expert_map.end()}).resolve(num_experts);
  std::vector<std::int64_t> global_of(map.size());
  std::int64_t count = 0;
  for (std::int64_t global = 0; global < num_experts; ++global) {
    const std::int32_t local = map[static_cast<std::size_t>(global)];
    if (local < 0) continue;
    global_of[static_cast<std::size_t>(local)] = global;
    ++count;
  }
  global_of.resize(static_cast<std::size_t>(count));
  ExpertWeights stated = all;
  for (WeightTensor* tensor : {&stated.w13, &stated.w13_up, &stated.w2}) {
    if (tensor->empty()) continue;
    tensor->experts = count;
    tensor->data = nullptr;
    tensor->scales.data = nullptr;
    tensor->scales.global = nullptr;  // zero_points stay: they say that there are some
  }
  for (BiasTensor* bias : {&stated.w13_bias, &stated.w2_bias}) {
    if (bias->empty()) continue;
    bias->experts = count;
    bias->data = nullptr;
  }
  stated.source = [from = all, global_of = std::move(global_of)](std::int64_t local) {
    const std::int64_t global = global_of.at(static_cast<std::size_t>(local));
    if (from.source) return from.source(global);
    ExpertWeights one = from;
    one.w13 = expert_of(from.w13, global);
    one.w13_up = expert_of(from.w13_up, global);
    one.w2 = expert_of(from.w2, global);
    one.w13_bias = one_expert(from.w13_bias, global);
    one.w2_bias = one_expert(from.w2_bias, global);
    return one;
  };
  return stated;
}

}  // namespace fusedmoe
