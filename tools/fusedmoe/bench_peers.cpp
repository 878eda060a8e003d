#include "bench_peers.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "device_option.h"
#include "formats/format.h"
#include "formats/scales.h"
#include "fusedmoe/error.h"
#include "progress.h"
#include "text.h"

namespace fusedmoe::tool {
namespace {

nlohmann::json describe_scales(const FormatSpec& format, const WeightTensor& w13) {
  constexpr const char* kParts[] = {"one", "halves", "interleaved"};
  return {{"layout", fusedmoe::to_string(w13.scales.layout)},
          {"type", fusedmoe::to_string(w13.scales.type)},
          {"group_size", w13.scales.group_size},
          {"block_n", w13.scales.block_n},
          {"block_k", w13.scales.block_k},
          {"w13_parts", kParts[static_cast<int>(w13.scales.parts)]},
          {"zero_points", format.zero_points}};
}

nlohmann::json describe_shape(const BenchSetup& setup) {
  const MoeConfig& config = setup.shape.config;
  return {{"hidden_size", config.hidden_size},
          {"intermediate_size", config.intermediate_size},
          {"num_experts", setup.shape.num_local_experts()},
          {"top_k", config.top_k},
          {"format", fusedmoe::to_string(setup.format.format)},
          {"scales", describe_scales(setup.format, w13_of(setup.format, config, 1))},
          {"mode", mode_name(setup.options.mode)},
          {"dtype", dtype_name(config.dtype)},
          {"activation", fusedmoe::to_string(config.activation.kind)},
          {"interleaved", config.gate_up_layout == GateUpLayout::interleaved},
          {"bias", setup.shape.bias},
          {"expert_parallel", setup.shape.ep_size > 1}};
}

nlohmann::json span(std::size_t offset, std::size_t bytes) { return {offset, bytes}; }

std::size_t bytes_of(std::int64_t count, std::int64_t element) {
  return static_cast<std::size_t>(count * element);
}

// Memory of one expert that becomes a tensor.
struct Part {
  std::string name;
  const void* data;
  std::size_t bytes;
};

// one: experts = 1 in every tensor.
std::vector<Part> parts_of(const ExpertWeights& one) {
  std::vector<Part> parts;
  const auto add = [&](const std::string& name, const void* data, std::int64_t count,
                       std::int64_t element) {
    if (data != nullptr) parts.push_back({name, data, bytes_of(count, element)});
  };
  const auto add_tensor = [&](const std::string& name, const WeightTensor& tensor) {
    const std::int64_t scales = scale_shape(tensor).count();
    add(name, tensor.data, format_info(tensor.format).bytes(expert_stride_of(tensor)), 1);
    add(name + "_scales", tensor.scales.data, scales, bytes_per_scale(tensor.scales.type));
    add(name + "_zero_points", tensor.scales.zero_points, scales, 1);
    add(name + "_global", tensor.scales.global, globals_per_expert(tensor), sizeof(float));
  };
  add_tensor("w13", one.w13);
  add_tensor("w2", one.w2);
  add("w13_bias", one.w13_bias.data, one.w13_bias.size, sizeof(float));
  add("w2_bias", one.w2_bias.data, one.w2_bias.size, sizeof(float));
  return parts;
}

}  // namespace

Peers::Peers(const std::vector<std::string>& names, int threads) : named_(!names.empty()) {
  std::vector<Adapter> chosen = find_adapters();
  if (named_) {
    std::string known;
    for (const Adapter& adapter : chosen) known += (known.empty() ? "" : ", ") + adapter.name;
    std::vector<Adapter> asked;
    for (const std::string& name : names) {
      const auto found = std::find_if(chosen.begin(), chosen.end(),
                                      [&](const Adapter& adapter) { return adapter.name == name; });
      if (found == chosen.end()) {
        throw Error(ErrorCode::invalid_argument,
                    fmt::format("--compare: expected some of {}, got '{}'; name one of these",
                                known, name));
      }
      asked.push_back(*found);
    }
    chosen = asked;
  }
  for (const Adapter& adapter : chosen) {
    peers_.emplace_back(adapter, threads);
    const Peer& peer = peers_.back();
    if (named_ && !peer.runs()) {
      throw DeviceNotAvailable("--compare: expected a peer that is installed for " +
                               peers_python() + ", got " + peer.name() + ": " + peer.reason() +
                               "; or set FUSEDMOE_PEERS_PYTHON to an interpreter that has it");
    }
  }
}

std::int64_t Peers::count() const {
  return std::count_if(peers_.begin(), peers_.end(),
                       [](const Peer& peer) { return !peer.failed(); });
}

bool Peers::lost_a_named_one() const {
  return named_ && count() < static_cast<std::int64_t>(peers_.size());
}

void Peers::load(const BenchSetup& setup, std::int64_t num_layers) {
  for (Peer& peer : peers_) peer.clear();
  RandomExperts experts(setup, 1);
  const nlohmann::json shape = describe_shape(setup);
  Progress progress("packing the peers' layer", num_layers);
  for (std::int64_t layer = 0; layer < num_layers && count() > 0; ++layer) {
    const ExpertWeights weights = experts.as_source(static_cast<std::uint64_t>(layer));
    const std::int64_t num_experts = setup.shape.num_local_experts();
    SharedLayout layout;
    nlohmann::json tensors;
    std::vector<std::size_t> offsets;
    const auto sizes = parts_of(weights.source(0));
    for (const Part& part : sizes) {
      const std::size_t stack = part.bytes * static_cast<std::size_t>(num_experts);
      offsets.push_back(layout.add(stack));
      tensors[part.name] = span(offsets.back(), stack);
    }
    weights_.reserve(layout.bytes());
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
      const std::vector<Part> parts = parts_of(weights.source(expert));
      for (std::size_t i = 0; i < parts.size(); ++i) {
        std::memcpy(
            weights_.data() + offsets[i] + parts[i].bytes * static_cast<std::size_t>(expert),
            parts[i].data, parts[i].bytes);
      }
    }
    for (Peer& peer : peers_) peer.add_layer(shape, weights_, tensors);
    progress.step();
  }
  for (Peer& peer : peers_) peer.forget(weights_);
  weights_.clear();
}

void Peers::set_inputs(const BenchSetup& setup, const BenchInputs& inputs) {
  const ConstMatrixView hidden = inputs.hidden();
  const MoeConfig& config = setup.shape.config;
  const std::size_t hidden_bytes =
      bytes_of(hidden.rows * hidden.columns, bytes_per_element(config.dtype));
  const std::size_t output_bytes = bytes_of(
      hidden.rows * hidden.columns, bytes_per_element(config.output_dtype.value_or(config.dtype)));
  SharedLayout layout;
  const std::size_t hidden_offset = layout.add(hidden_bytes);
  output_offset_ = layout.add(output_bytes);
  nlohmann::json routings = nlohmann::json::array();
  std::vector<std::pair<std::size_t, std::size_t>> offsets;
  for (const Routing& routing : inputs.routings()) {
    const std::size_t ids = routing.topk_ids.size() * sizeof(std::int32_t);
    const std::size_t weights = routing.topk_weights.size() * sizeof(float);
    offsets.emplace_back(layout.add(ids), layout.add(weights));
    routings.push_back({span(offsets.back().first, ids), span(offsets.back().second, weights)});
  }
  inputs_.reserve(layout.bytes());
  std::memcpy(inputs_.data() + hidden_offset, hidden.data, hidden_bytes);
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    const Routing& routing = inputs.routings()[i];
    std::memcpy(inputs_.data() + offsets[i].first, routing.topk_ids.data(),
                routing.topk_ids.size() * sizeof(std::int32_t));
    std::memcpy(inputs_.data() + offsets[i].second, routing.topk_weights.data(),
                routing.topk_weights.size() * sizeof(float));
  }
  const nlohmann::json request = {{"do", "inputs"},
                                  {"memory", inputs_.fd()},
                                  {"num_tokens", hidden.rows},
                                  {"hidden", span(hidden_offset, hidden_bytes)},
                                  {"output", span(output_offset_, output_bytes)},
                                  {"routings", routings}};
  for (Peer& peer : peers_) peer.set_inputs(request);
}

nlohmann::ordered_json describe(const std::vector<Peer>& peers) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Peer& peer : peers) {
    nlohmann::ordered_json one = {{"name", peer.name()}};
    if (!peer.version().empty()) one["version"] = peer.version();
    if (!peer.about().empty()) one["about"] = peer.about();
    if (!peer.runs()) one["reason"] = peer.reason();
    list.push_back(one);
  }
  return list;
}

}  // namespace fusedmoe::tool
