// Implementation of checkpoint.h: finds the files, then config, tensors, layers.
#include "checkpoint/checkpoint.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "checkpoint/gguf.h"
#include "checkpoint/gguf_config.h"
#include "checkpoint/golden.h"
#include "checkpoint/mapped_file.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/sharded.h"
#include "checkpoint/text.h"
#include "fusedmoe/error.h"

namespace fusedmoe::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kSingleName[] = "model.safetensors";
constexpr char kConfigName[] = "config.json";
constexpr char kModelOptName[] = "hf_quant_config.json";
constexpr std::size_t kMaxNotes = 20;

// `exists` that tells "not there" from "cannot be looked at".
bool is_there(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) return false;
  if (error) fail_io(path.string(), "cannot be examined: " + error.message());
  return true;
}

// What is to be read: exactly one of these, or an error.
struct Files {
  fs::path folder = {};
  fs::path index = {};   // empty = none
  fs::path single = {};  // empty = none
  fs::path gguf = {};    // empty = none
};

Files find_files_in_folder(const fs::path& folder) {
  Files files{.folder = folder};
  if (is_there(folder / kIndexName)) files.index = folder / kIndexName;
  if (is_there(folder / kSingleName)) files.single = folder / kSingleName;
  if (!files.index.empty() || !files.single.empty()) return files;

  std::size_t num_safetensors = 0;
  std::size_t num_gguf = 0;
  for (const fs::path& entry : list_folder(folder)) {
    if (entry.extension() == ".gguf" && ++num_gguf == 1) files.gguf = entry;
    if (entry.extension() == ".safetensors" && !is_golden_file(entry)) ++num_safetensors;
  }
  if (num_gguf == 1) return files;
  if (num_gguf > 1) {
    fail_io(folder.string(),
            "has " + std::to_string(num_gguf) + " .gguf files; give one of them as the path");
  }
  std::string text = std::string("has neither ") + kSingleName + " nor " + kIndexName;
  if (num_safetensors > 0) {
    text += "; it has " + std::to_string(num_safetensors) +
            " other .safetensors files: fetch the index, or give one of them as the path";
  }
  fail_io(folder.string(), text);
}

Files find_files(const fs::path& path) {
  if (!is_there(path)) fail_io(path.string(), "there is no such file or folder");
  std::error_code error;
  if (fs::is_directory(path, error)) return find_files_in_folder(path);
  if (path.extension() == ".gguf") return {.folder = path.parent_path(), .gguf = path};
  if (path.extension() != ".safetensors") {
    fail_io(path.string(), "is no checkpoint; expected a folder, a .safetensors or a .gguf file");
  }
  if (is_golden_file(path)) {
    fail_io(path.string(), "is a golden file, never weights; give the checkpoint beside it");
  }
  return {.folder = path.parent_path(), .single = path};
}

std::shared_ptr<TensorSource> open_source(const Files& files) {
  if (files.index.empty()) return std::make_shared<SafetensorsFile>(files.single);
  auto sharded = std::make_shared<ShardedSource>(files.index);
  // Readers differ in which of the two they take, so that the two may give different models.
  if (!files.single.empty() && !sharded->has_shard(kSingleName)) {
    fail_io(files.index.string(), std::string("does not name ") + kSingleName +
                                      ", which lies beside it; remove one of the two");
  }
  return sharded;
}

// Empty when there is no config and none was asked for.
fs::path find_config(const Files& files, const std::optional<fs::path>& config) {
  if (config) return *config;
  const fs::path beside = files.folder / kConfigName;
  return is_there(beside) ? beside : fs::path();
}

ModelConfig read_config(const Files& files, const fs::path& config) {
  if (config.empty()) {
    fail_io((files.folder / kConfigName).string(),
            "is missing; the sizes and the layout stand there: put it beside the weights or say "
            "where it is");
  }
  ModelConfig model = read_model_config(config);
  const fs::path modelopt = files.folder / kModelOptName;
  if (is_there(modelopt)) merge_modelopt_file(modelopt, model.quant);
  return model;
}

// A GGUF file says itself what it holds; a config beside it says more, and must agree.
ModelConfig read_config(const GgufFile& file, const fs::path& config) {
  ModelConfig model = read_gguf_config(file);
  if (config.empty()) return model;
  return merge_gguf_config(model, file, read_model_config(config));
}

template <typename T>
void add_once(std::vector<T>& list, const std::vector<T>& values) {
  for (const T& value : values) {
    if (std::find(list.begin(), list.end(), value) == list.end()) list.push_back(value);
  }
}

void add_notes(const ModelConfig& model, const std::vector<MoeLayer>& layers, Listing& listing) {
  listing.notes = model.quant.notes;
  bool input_scales = false;
  for (const MoeLayer& layer : layers) {
    input_scales = input_scales || layer.has_input_scales;
    for (const std::string& note : layer.notes) {
      if (listing.notes.size() < kMaxNotes) listing.notes.push_back(note);
    }
  }
  if (input_scales) {
    listing.notes.emplace_back(
        "static scales of activations (input_scale) are there; mode a16 does not use them");
  }
}

void list_layers(const ModelConfig& model, const std::vector<MoeLayer>& whole, Listing& listing) {
  for (const LayerConfig& layer : model.layers) {
    listing.layers.push_back({.index = layer.layer, .config = layer.moe});
  }
  for (const MoeLayer& layer : whole) {
    auto entry = std::find_if(listing.layers.begin(), listing.layers.end(),
                              [&](const LayerListing& row) { return row.index == layer.index; });
    if (entry == listing.layers.end()) entry = listing.layers.insert(entry, {.index = layer.index});
    entry->config = layer.config;
    entry->complete = true;
    entry->formats = layer.formats;
    entry->bytes = layer.bytes;
    add_once(listing.formats, layer.formats);
    listing.bytes += layer.bytes;
  }
}

}  // namespace

Checkpoint::Checkpoint(ModelConfig model, std::shared_ptr<TensorSource> source,
                       std::vector<MoeLayer> layers)
    : model_(std::move(model)), source_(std::move(source)), layers_(std::move(layers)) {}

Checkpoint Checkpoint::open(const fs::path& path, const std::optional<fs::path>& config) {
  const Files files = find_files(path);
  const fs::path config_file = find_config(files, config);
  ModelConfig model;
  std::shared_ptr<TensorSource> source;
  if (files.gguf.empty()) {
    model = read_config(files, config_file);
    source = open_source(files);
  } else {
    auto gguf = std::make_shared<GgufFile>(files.gguf);
    model = read_config(*gguf, config_file);
    source = std::move(gguf);
  }
  ProblemList problems;
  std::vector<MoeLayer> layers = read_layers(model, source, problems);
  if (!problems.empty()) {
    const Problem& first = problems.list().front();
    const std::size_t more = problems.list().size() - 1 + problems.num_dropped();
    throw Error(first.code, more == 0 ? first.message
                                      : first.message + " (and " + std::to_string(more) +
                                            " more problems: inspect lists them)");
  }
  return {std::move(model), std::move(source), std::move(layers)};
}

const MoeLayer* Checkpoint::find_layer(std::int64_t index) const noexcept {
  const auto found = std::find_if(layers_.begin(), layers_.end(),
                                  [index](const MoeLayer& layer) { return layer.index == index; });
  return found == layers_.end() ? nullptr : &*found;
}

Listing inspect_checkpoint(const fs::path& path, const std::optional<fs::path>& config) {
  Listing listing{.path = path};
  if (!is_there(path)) fail_io(path.string(), "there is no such file or folder");
  // Each step goes on after a fault of another one, as far as it can.
  const auto attempt = [&](auto&& step) {
    try {
      step();
    } catch (const Error& error) {
      listing.problems.emplace_back(error.what());
    }
  };
  std::optional<Files> files;
  std::optional<ModelConfig> model;
  std::shared_ptr<TensorSource> source;
  attempt([&] { files = find_files(path); });
  if (!files) return listing;
  std::shared_ptr<GgufFile> gguf;
  attempt([&] {
    if (files->gguf.empty()) {
      source = open_source(*files);
    } else {
      source = gguf = std::make_shared<GgufFile>(files->gguf);
    }
    listing.num_tensors = static_cast<std::int64_t>(source->names().size());
  });
  attempt([&] {
    const fs::path file = find_config(*files, config);
    std::error_code error;
    if (!files->gguf.empty()) {
      if (gguf == nullptr) return;
      model = read_config(*gguf, file);
    } else {
      if (file.empty() && !fs::is_directory(path, error)) return;
      model = read_config(*files, file);
    }
    listing.family = model->family->name;
  });
  if (!model) return listing;
  std::vector<MoeLayer> whole;
  if (source != nullptr) {
    ProblemList problems;
    whole = read_layers(*model, source, problems);
    for (const Problem& problem : problems.list()) listing.problems.push_back(problem.message);
    if (problems.num_dropped() > 0) {
      listing.problems.push_back("and " + std::to_string(problems.num_dropped()) + " more");
    }
  }
  list_layers(*model, whole, listing);
  add_notes(*model, whole, listing);
  return listing;
}

}  // namespace fusedmoe::checkpoint
