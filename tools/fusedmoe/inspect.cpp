// `fusedmoe inspect PATH`: what a checkpoint holds and everything that is wrong with it, without
// running anything. A bare .safetensors or .gguf file also lists its tensors.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>

#include "checkpoint/checkpoint.h"
#include "checkpoint/gguf.h"
#include "checkpoint/golden.h"
#include "checkpoint/safetensors.h"
#include "fusedmoe/error.h"
#include "report.h"
#include "text.h"

namespace fusedmoe::tool {
namespace {

namespace fs = std::filesystem;
using checkpoint::LayerListing;
using checkpoint::Listing;
using Json = nlohmann::ordered_json;

struct InspectOptions {
  ReportOptions report;
  std::string path;
  std::string config;
};

// A text or, when there is nothing to say, null.
Json text_or_null(const std::string& text) { return text.empty() ? Json() : Json(text); }

std::string activation_text(const MoeConfig& config) {
  std::string text = to_string(config.activation.kind);
  if (config.activation.kind == Activation::swigluoai) {
    text += fmt::format(" (alpha {}, limit {})", config.activation.alpha, config.activation.limit);
  }
  if (config.activation.kind == Activation::swiglustep) {
    text += fmt::format(" (limit {})", config.activation.limit);
  }
  if (config.clamp_limit) text += fmt::format(", clamped to {}", *config.clamp_limit);
  return text;
}

Json layer_row(const LayerListing& layer) {
  const MoeConfig& config = layer.config;
  return {{"layer", layer.index},
          {"complete", layer.complete},
          {"format", text_or_null(formats_text(layer.formats))},
          {"hidden_size", config.hidden_size},
          {"intermediate_size", config.intermediate_size},
          {"num_experts", config.num_experts},
          {"top_k", config.top_k},
          {"dtype", dtype_name(config.dtype)},
          {"activation", to_string(config.activation.kind)},
          {"gate_up_layout", to_string(config.gate_up_layout)},
          {"apply_router_weight_on_input", config.apply_router_weight_on_input},
          {"bytes", layer.bytes}};
}

// The tensors of one file. Throws when it is broken.
Json tensor_rows(const fs::path& path) {
  Json rows = Json::array();
  const auto add = [&rows](const checkpoint::Tensor& tensor) {
    rows.push_back({{"name", tensor.name},
                    {"type", checkpoint::to_string(tensor.type)},
                    {"shape", tensor.shape},
                    {"bytes", tensor.bytes}});
  };
  if (path.extension() == ".gguf") {
    const checkpoint::GgufFile file(path);
    for (const checkpoint::Tensor& tensor : file.tensors()) add(tensor);
  } else {
    const checkpoint::SafetensorsFile file(path);
    for (const checkpoint::Tensor& tensor : file.tensors()) add(tensor);
  }
  return rows;
}

// Sizes of the first layer stand for the model; `layer_list` has each layer's own.
Json listing_row(const Listing& listing) {
  Json row;
  row["path"] = listing.path.string();
  row["family"] = text_or_null(listing.family);
  row["layers"] = listing.layers.size();
  row["format"] = text_or_null(formats_text(listing.formats));
  const bool known = !listing.layers.empty();
  const MoeConfig config = known ? listing.layers.front().config : MoeConfig{};
  const auto size = [&](std::int64_t value) { return known ? Json(value) : Json(); };
  row["hidden_size"] = size(config.hidden_size);
  row["intermediate_size"] = size(config.intermediate_size);
  row["num_experts"] = size(config.num_experts);
  row["top_k"] = size(config.top_k);
  row["dtype"] = known ? Json(dtype_name(config.dtype)) : Json();
  row["activation"] = known ? Json(to_string(config.activation.kind)) : Json();
  row["bytes"] = listing.bytes;
  row["tensors"] = listing.num_tensors;
  row["layer_list"] = Json::array();
  for (const LayerListing& layer : listing.layers) row["layer_list"].push_back(layer_row(layer));
  row["problems"] = listing.problems;
  row["notes"] = listing.notes;
  return row;
}

void print_layers(const Listing& listing) {
  const MoeConfig& config = listing.layers.front().config;
  fmt::print("activation   {}\n", activation_text(config));
  fmt::print("dtype        {}{}\n", dtype_name(config.dtype),
             config.apply_router_weight_on_input ? ", router weight on the input" : "");
  fmt::print("\n{:>5}  {:<10} {:>6} {:>12} {:>7} {:>5}  {:<11} {:>10}\n", "layer", "format",
             "hidden", "intermediate", "experts", "top_k", "gate/up", "bytes");
  for (const LayerListing& layer : listing.layers) {
    fmt::print("{:>5}  {:<10} {:>6} {:>12} {:>7} {:>5}  {:<11} {:>10}\n", layer.index,
               layer.complete ? formats_text(layer.formats) : "incomplete",
               layer.config.hidden_size, layer.config.intermediate_size, layer.config.num_experts,
               layer.config.top_k,
               layer.complete && is_gated(layer.config.activation.kind)
                   ? to_string(layer.config.gate_up_layout)
                   : "-",
               bytes_text(layer.bytes));
  }
}

void print(const Listing& listing, const Json& tensor_list) {
  fmt::print("path         {}\n", listing.path.string());
  fmt::print("family       {}\n", listing.family.empty() ? "not known" : listing.family);
  fmt::print("layers       {} with experts\n", listing.layers.size());
  fmt::print("format       {}\n",
             listing.formats.empty() ? "not known" : formats_text(listing.formats));
  fmt::print("experts      {}, in a checkpoint of {} tensors\n", bytes_text(listing.bytes),
             listing.num_tensors);
  if (!listing.problems.empty()) fmt::print("problems     {}\n", listing.problems.size());
  for (const std::string& note : listing.notes) fmt::print("note         {}\n", note);
  if (!listing.layers.empty()) print_layers(listing);
  if (!tensor_list.empty()) fmt::print("\n");
  for (const Json& tensor : tensor_list) {
    fmt::print("{:<5} {:<18} {:>10}  {}\n", tensor["type"].get<std::string>(),
               tensor["shape"].dump(), bytes_text(tensor["bytes"].get<std::int64_t>()),
               tensor["name"].get<std::string>());
  }
}

int inspect(const InspectOptions& options) {
  Report report(options.report);
  const fs::path path = options.path;
  std::optional<fs::path> config;
  if (!options.config.empty()) config = options.config;
  Listing listing;
  Json tensor_list = Json::array();
  std::error_code error;
  const bool bare = (path.extension() == ".safetensors" || path.extension() == ".gguf") &&
                    !fs::is_directory(path, error);
  if (bare && checkpoint::is_golden_file(path)) {
    listing.path = path;  // no checkpoint, but a file whose tensors can be listed
  } else {
    listing = checkpoint::inspect_checkpoint(path, config);
  }
  if (bare) {
    try {
      tensor_list = tensor_rows(path);
      listing.num_tensors = static_cast<std::int64_t>(tensor_list.size());
    } catch (const Error& broken) {
      const std::string text = broken.what();
      if (std::find(listing.problems.begin(), listing.problems.end(), text) ==
          listing.problems.end()) {
        listing.problems.push_back(text);
      }
    }
  }
  Json row = listing_row(listing);
  if (bare) row["tensor_list"] = tensor_list;
  report.row(row);
  if (report.table()) print(listing, tensor_list);
  std::fflush(stdout);
  for (const std::string& problem : listing.problems) {
    fmt::print(stderr, "fusedmoe: {}\n", problem);
  }
  return listing.problems.empty() ? kExitFine : kExitInput;
}

}  // namespace

void add_inspect(CLI::App& app, Verb& verb) {
  CLI::App* sub = app.add_subcommand(
      "inspect", "A checkpoint's family, layers, config, formats, bytes and problems");
  sub->footer(
      "Examples:\n"
      "  fusedmoe inspect path/to/checkpoint\n"
      "  fusedmoe inspect model.safetensors --config elsewhere/config.json --json\n"
      "  fusedmoe inspect model.gguf\n"
      "\n"
      "Exit code 2 when there are problems; all of them are listed on stderr.");
  const auto options = std::make_shared<InspectOptions>();
  sub->add_option("PATH", options->path, "A checkpoint folder, a bare .safetensors or a .gguf file")
      ->required();
  sub->add_option("--config", options->config, "The config.json, when it is not beside the weights")
      ->type_name("FILE");
  add_report_options(*sub, options->report);
  sub->callback([options, &verb] { verb.run = [options] { return inspect(*options); }; });
}

}  // namespace fusedmoe::tool
