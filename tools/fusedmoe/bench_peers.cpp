#include "bench_peers.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "device_option.h"
#include "formats/format.h"
#include "fusedmoe/error.h"
#include "progress.h"
#include "text.h"

namespace fusedmoe::tool {
namespace {

nlohmann::json describe_shape(const BenchSetup& setup) {
  const MoeConfig& config = setup.shape.config;
  return {{"hidden_size", config.hidden_size},
          {"intermediate_size", config.intermediate_size},
          {"num_experts", setup.shape.num_local_experts()},
          {"top_k", config.top_k},
          {"format", to_string(setup.format)},
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
    std::vector<std::size_t> bytes;    // of one expert
    std::vector<std::size_t> offsets;  // of the stack
    const auto add = [&](const char* name, std::int64_t elements, std::int64_t element) {
      bytes.push_back(bytes_of(elements, element));
      const std::size_t stack = bytes.back() * static_cast<std::size_t>(num_experts);
      offsets.push_back(layout.add(stack));
      tensors[name] = span(offsets.back(), stack);
    };
    const std::int64_t element = format_info(setup.format.format).block_bytes;
    add("w13", weights.w13.outputs * weights.w13.inputs, element);
    add("w2", weights.w2.outputs * weights.w2.inputs, element);
    if (setup.shape.bias) {
      add("w13_bias", weights.w13.outputs, sizeof(float));
      add("w2_bias", weights.w2.outputs, sizeof(float));
    }
    weights_.reserve(layout.bytes());
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
      const ExpertWeights one = weights.source(expert);
      const void* parts[] = {one.w13.data, one.w2.data, one.w13_bias.data, one.w2_bias.data};
      for (std::size_t i = 0; i < bytes.size(); ++i) {
        std::memcpy(weights_.data() + offsets[i] + bytes[i] * static_cast<std::size_t>(expert),
                    parts[i], bytes[i]);
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
