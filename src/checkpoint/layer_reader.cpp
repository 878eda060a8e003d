// Implementation of layer_reader.h.
#include "checkpoint/layer_reader.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "checkpoint/expert_names.h"
#include "checkpoint/layer_builder.h"
#include "checkpoint/storage_layouts.h"
#include "checkpoint/text.h"

namespace fusedmoe::checkpoint {
namespace {

constexpr std::size_t kMaxProblems = 100;

// Sorts names into layers; names that only look like experts are problems at once.
std::map<std::int64_t, Matches> match_names(const ModelConfig& model, const TensorSource& source,
                                            ProblemList& problems) {
  std::map<std::int64_t, Matches> layers;
  std::vector<std::string_view> names = source.names();
  std::sort(names.begin(), names.end());
  for (const std::string_view name : names) {
    const std::optional<ExpertName> match =
        match_expert_name(*model.family, model.quant.layout, name);
    if (!match) continue;
    if (match->known) {
      layers[match->layer].push_back(
          {match->pattern, match->tensor, match->part, match->expert, name});
      continue;
    }
    const bool quantized = looks_quantized(name);
    const std::string layout(model.quant.layout == nullptr ? "nothing of a quantisation"
                                                           : model.quant.layout->name);
    problems.add(
        quantized ? ErrorCode::unsupported : ErrorCode::io,
        source.location() + ": tensor " + quote(name) +
            (quantized ? " belongs to experts that are quantised otherwise than " +
                             quote(model.file) + " says (" + layout + ")"
                       : " stands among the experts of layer " + std::to_string(match->layer) +
                             " but fits no name of family " + std::string(model.family->name)));
  }
  return layers;
}

}  // namespace

void ProblemList::add(ErrorCode code, std::string message) {
  if (list_.size() == kMaxProblems) {
    ++num_dropped_;
  } else {
    list_.push_back({code, std::move(message)});
  }
}

std::vector<MoeLayer> read_layers(const ModelConfig& model,
                                  const std::shared_ptr<TensorSource>& source,
                                  ProblemList& problems) {
  std::map<std::int64_t, Matches> found = match_names(model, *source, problems);
  std::vector<LayerConfig> due = model.layers;
  for (const auto& [layer, matches] : found) {
    if (model.find(layer) != nullptr) continue;
    if (layer >= model.num_layers && layer - model.num_layers < model.num_extra_layers) {
      due.push_back({layer, model.layers.back().moe});
      continue;
    }
    const bool beyond = layer >= model.num_layers;
    problems.add(ErrorCode::io,
                 source->location() + ": tensor " + quote(matches.front().name) +
                     " belongs to an expert of layer " + std::to_string(layer) + ", but by " +
                     quote(model.file) +
                     (beyond ? " there are " + std::to_string(model.num_layers) + " layers"
                             : std::string(" that layer has no experts")));
  }
  std::vector<MoeLayer> layers;
  for (const LayerConfig& layer : due) {
    try {
      layers.push_back(build_layer(model, layer, source, std::move(found[layer.layer])));
    } catch (const Error& error) {
      problems.add(error.code(), error.what());
    }
  }
  return layers;
}

}  // namespace fusedmoe::checkpoint
