// Implementation of gguf_config.h. Keys are those of the GGUF specification and of llama.cpp.
#include "checkpoint/gguf_config.h"

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include "checkpoint/config_reader.h"
#include "checkpoint/expert_names.h"
#include "checkpoint/text.h"

namespace fusedmoe::checkpoint {
namespace {

// Look-ups under "<architecture>.".
class Metadata {
 public:
  Metadata(const GgufFile& file, std::string architecture)
      : reader_(file.metadata(), "", file.location()), prefix_(std::move(architecture) + ".") {}

  std::string key(std::string_view name) const { return prefix_ + std::string(name); }
  bool has(std::string_view name) const { return static_cast<bool>(reader_.find({key(name)})); }

  std::optional<std::int64_t> integer(std::string_view name, std::int64_t min,
                                      std::int64_t max) const {
    return reader_.integer({key(name)}, min, max);
  }
  std::int64_t require_integer(std::string_view name, std::int64_t min, std::int64_t max) const {
    return reader_.require_integer({key(name)}, min, max);
  }
  std::optional<bool> boolean(std::string_view name) const { return reader_.boolean({key(name)}); }
  // 0 stands for "none" in files of llama.cpp.
  std::optional<double> factor(std::string_view name) const {
    const ConfigReader::Found found = reader_.find({key(name)});
    const auto* const number = found ? found.value->as<double>() : nullptr;
    if (number != nullptr && *number == 0.0) return std::nullopt;
    return reader_.positive_number({key(name)});
  }
  // One value, or one for each layer.
  std::optional<std::vector<std::int64_t>> by_layer(std::string_view name,
                                                    std::int64_t num_layers) const {
    if (!has(name)) return std::nullopt;
    return reader_.integer_by_layer({key(name)}, 0, kMaxSize, num_layers);
  }

  const ConfigReader& reader() const noexcept { return reader_; }

 private:
  ConfigReader reader_;
  std::string prefix_;
};

const GgufFamily& find_gguf_family(const GgufFile& file, const std::string& architecture) {
  const GgufFamily* first = nullptr;
  const std::optional<std::int64_t> gating =
      Metadata(file, architecture).integer("expert_gating_func", 0, 100);
  for (const GgufFamily& row : gguf_families()) {
    if (row.architecture != architecture) continue;
    if (first == nullptr) first = &row;
    // Files from before that key have the first row's router.
    if (row.gating == 0 || gating.value_or(first->gating) == row.gating) return row;
  }
  std::string known;
  for (const GgufFamily& row : gguf_families()) {
    if (known.find(row.architecture) != std::string::npos) continue;
    (known += known.empty() ? "" : ", ").append(row.architecture);
  }
  const std::string text =
      first == nullptr ? "general.architecture '" + printable_ascii(architecture) +
                             "' is not a known family with experts; known are " + known
                       : architecture + ".expert_gating_func is " + std::to_string(*gating) +
                             ", which is not known for this architecture";
  throw Error(ErrorCode::unsupported, file.location() + ": " + text);
}

// Refuses what changes the layer in ways that are not read.
void refuse_unknown_features(const Metadata& metadata) {
  for (const std::string_view name :
       {"expert_latent_length", "moe_latent_size", "expert_group_scale", "experts_per_group",
        "router_logit_softcapping", "swiglu_clamp_exp"}) {
    if (metadata.has(name)) {
      metadata.reader().fail_unsupported(metadata.key(name) + " is set, which is not read");
    }
  }
}

void check_gating(const Metadata& metadata, const GgufFamily& row) {
  const std::optional<std::int64_t> gating = metadata.integer("expert_gating_func", 0, 100);
  if (!gating || *gating == 0 || row.gating != 0) return;
  std::int64_t due = 1;
  switch (row.family.router) {
    case RouterRule::sigmoid_bias:
    case RouterRule::sigmoid_bias_groups:
    case RouterRule::sigmoid_of_chosen:
      due = 2;
      break;
    case RouterRule::softmax_of_chosen:
      due = 3;
      break;
    default:
      break;
  }
  // Renormalised softmax and softmax over the chosen logits are one function.
  if (*gating == due || (*gating == 3 && row.family.router == RouterRule::softmax_renormalized) ||
      (*gating == 1 && row.family.router == RouterRule::softmax_of_chosen)) {
    return;
  }
  metadata.reader().fail_unsupported(metadata.key("expert_gating_func") + " is " +
                                     std::to_string(*gating) + "; supported for this " +
                                     "architecture is " + std::to_string(due));
}

RouterSpec read_router(const Metadata& metadata, RouterRule rule, const MoeConfig& moe) {
  RouterSpec router;
  bool renormalize = false;
  switch (rule) {
    case RouterRule::softmax_renormalized:
      renormalize = true;
      break;
    case RouterRule::softmax_of_chosen:
      router.kind = RouterKind::topk_softmax;
      break;
    case RouterRule::softmax_bias:
      router.kind = RouterKind::softmax_bias;
      renormalize = true;
      router.epsilon_rule = EpsilonRule::max;
      router.epsilon = 1e-12;
      break;
    case RouterRule::softmax_groups:
      router.kind = RouterKind::softmax_grouped;
      router.epsilon_rule = EpsilonRule::add;
      router.epsilon = 1e-20;
      break;
    case RouterRule::sigmoid_bias:
      router.kind = RouterKind::sigmoid_bias;
      renormalize = true;
      break;
    case RouterRule::sigmoid_bias_groups:
      router.kind = RouterKind::sigmoid_bias_grouped;
      renormalize = true;
      router.epsilon_rule = EpsilonRule::add;
      router.epsilon = 1e-20;
      break;
    case RouterRule::sigmoid_of_chosen:
      router.kind = RouterKind::topk_sigmoid;
      break;
    case RouterRule::sparsemixer:
      router.kind = RouterKind::sparsemixer;
      break;
    default:
      break;
  }
  const bool of_chosen =
      router.kind == RouterKind::topk_softmax || router.kind == RouterKind::topk_sigmoid;
  if (!of_chosen) {
    router.renormalize = metadata.boolean("expert_weights_norm").value_or(renormalize);
  }
  router.scaling = metadata.factor("expert_weights_scale").value_or(1.0);
  router.n_group = metadata.integer("expert_group_count", 0, moe.num_experts).value_or(1);
  if (router.n_group <= 1) {
    router.n_group = 1;
    return router;
  }
  if (rule != RouterRule::softmax_groups && rule != RouterRule::sigmoid_bias_groups) {
    metadata.reader().fail_unsupported(metadata.key("expert_group_count") + " is " +
                                       std::to_string(router.n_group) +
                                       ", but this architecture is not known to have groups");
  }
  router.topk_group = metadata.require_integer("expert_group_used_count", 1, router.n_group);
  if (moe.num_experts % router.n_group != 0 ||
      moe.top_k > moe.num_experts / router.n_group * router.topk_group) {
    metadata.reader().fail(metadata.key("expert_group_count"),
                           "is " + std::to_string(router.n_group) + ", of which " +
                               std::to_string(router.topk_group) +
                               " are used, which does not fit " + std::to_string(moe.num_experts) +
                               " experts of which " + std::to_string(moe.top_k) + " are used");
  }
  return router;
}

// One flag for each layer.
std::vector<bool> layers_with_experts(const GgufFile& file, const Metadata& metadata,
                                      const Family& family, std::int64_t num_layers) {
  const std::int64_t dense =
      metadata.integer("leading_dense_block_count", 0, kMaxLayers).value_or(0);
  const bool by_tensors =
      family.layers != LayerRule::all && family.layers != LayerRule::first_k_dense;
  std::unordered_set<std::int64_t> found;
  if (by_tensors) {
    for (const Tensor& tensor : file.tensors()) {
      const std::optional<ExpertName> name = match_expert_name(family, nullptr, tensor.name);
      if (name) found.insert(name->layer);
    }
  }
  std::vector<bool> flags;
  for (std::int64_t l = 0; l < num_layers; ++l) {
    flags.push_back(by_tensors ? found.count(l) > 0 : l >= dense);
  }
  return flags;
}

}  // namespace

ModelConfig read_gguf_config(const GgufFile& file) {
  const ConfigReader reader(file.metadata(), "", file.location());
  const std::string architecture = reader.require_text({"general.architecture"});
  if (reader.integer({"split.count"}, 0, 1'000'000).value_or(1) > 1) {
    reader.fail_unsupported("is one part of several (split.count); merge them into one file first");
  }
  const Metadata metadata(file, architecture);
  const GgufFamily& row = find_gguf_family(file, architecture);
  const Family& family = row.family;
  refuse_unknown_features(metadata);
  check_gating(metadata, row);

  ModelConfig model{.family = &family, .file = file.location()};
  model.quant.layout = &storage_layout(LayoutId::gguf);
  const std::int64_t blocks = metadata.require_integer("block_count", 1, kMaxLayers);
  model.num_extra_layers = metadata.integer("nextn_predict_layers", 0, blocks - 1).value_or(0);
  model.num_layers = blocks - model.num_extra_layers;
  MoeConfig moe;
  moe.dtype = DType::f32;
  moe.activation.kind = family.swigluoai ? Activation::swigluoai
                        : family.patterns.front().tensors.front().matrix == Matrix::up
                            ? Activation::relu2
                            : Activation::silu;
  moe.apply_router_weight_on_input = family.weight_on_input;
  moe.hidden_size = metadata.require_integer("embedding_length", 1, kMaxSize);
  moe.num_experts = metadata.require_integer("expert_count", 1, kMaxSize);
  moe.top_k = metadata.require_integer("expert_used_count", 1, kMaxSize);
  if (moe.top_k > moe.num_experts) {
    reader.fail(metadata.key("expert_used_count"),
                "is " + std::to_string(moe.top_k) + ", more than the " +
                    std::to_string(moe.num_experts) + " experts");
  }
  const char* const size_key = metadata.has("expert_feed_forward_length")
                                   ? "expert_feed_forward_length"
                                   : "feed_forward_length";
  const auto sizes = metadata.by_layer(size_key, blocks);
  if (!sizes) metadata.require_integer("expert_feed_forward_length", 1, kMaxSize);
  const std::vector<bool> flags = layers_with_experts(file, metadata, family, model.num_layers);
  for (std::int64_t l = 0; l < model.num_layers; ++l) {
    if (!flags[static_cast<std::size_t>(l)]) continue;
    moe.intermediate_size = (*sizes)[static_cast<std::size_t>(l)];
    if (moe.intermediate_size == 0) {
      reader.fail(metadata.key(size_key), "is 0 for layer " + std::to_string(l) +
                                              ", which has experts; expected their size");
    }
    model.layers.push_back({l, moe});
  }
  if (model.layers.empty()) {
    fail_io(file.location(), "has no layer with experts (tensors " +
                                 layer_tensor_name(family, 0, "ffn_down_exps.weight") +
                                 " and so on)");
  }
  model.router = read_router(metadata, family.router, moe);
  return model;
}

ModelConfig merge_gguf_config(const ModelConfig& from_gguf, const GgufFile& file,
                              const ModelConfig& from_json) {
  const std::string architecture =
      ConfigReader(file.metadata(), "", file.location()).require_text({"general.architecture"});
  const Metadata metadata(file, architecture);
  const auto differ = [&](const std::string& what, const std::string& here,
                          const std::string& there) {
    fail_io(file.location(), what + " is " + here + ", but " + quote(from_json.file) + " says " +
                                 there + "; they are of different models");
  };
  const auto compare = [&](std::string_view key, std::int64_t here, std::int64_t there) {
    if (here != there) differ(metadata.key(key), std::to_string(here), std::to_string(there));
  };
  if (from_json.quant.layout != nullptr) {
    fail_io(from_json.file, "has a quantization_config, but " + quote(file.location()) +
                                " says itself how its tensors are quantised; remove it");
  }
  const GgufFamily& row = find_gguf_family(file, architecture);
  if (from_json.family->name != row.family.name && from_json.family->name != row.also) {
    differ("general.architecture", quote(architecture),
           "model_type " + quote(from_json.family->name));
  }
  compare("block_count", from_gguf.num_layers, from_json.num_layers);
  compare("expert_count", from_gguf.layers.front().moe.num_experts,
          from_json.layers.front().moe.num_experts);
  ModelConfig merged = from_gguf;
  merged.router = from_json.router;
  for (LayerConfig& layer : merged.layers) {
    const LayerConfig* const other = from_json.find(layer.layer);
    if (other == nullptr) {
      differ("layer " + std::to_string(layer.layer), "one with experts", "that it has none");
    }
    const MoeConfig here = layer.moe;
    layer.moe = other->moe;
    compare("embedding_length", here.hidden_size, layer.moe.hidden_size);
    compare("expert_count", here.num_experts, layer.moe.num_experts);
    compare("expert_used_count", here.top_k, layer.moe.top_k);
    compare("expert_feed_forward_length", here.intermediate_size, layer.moe.intermediate_size);
  }
  if (merged.layers.size() != from_json.layers.size()) {
    differ("the number of layers with experts", std::to_string(merged.layers.size()),
           std::to_string(from_json.layers.size()));
  }
  const RouterSpec& here = from_gguf.router;
  const RouterSpec& there = from_json.router;
  if (metadata.has("expert_weights_norm") && here.renormalize != there.renormalize) {
    differ(metadata.key("expert_weights_norm"), here.renormalize ? "true" : "false", "the other");
  }
  if (metadata.factor("expert_weights_scale") &&
      static_cast<float>(here.scaling) != static_cast<float>(there.scaling)) {
    differ(metadata.key("expert_weights_scale"), std::to_string(here.scaling),
           std::to_string(there.scaling));
  }
  if (metadata.has("expert_group_count")) {
    compare("expert_group_count", here.n_group, there.n_group);
    compare("expert_group_used_count", here.topk_group, there.topk_group);
  }
  return merged;
}

}  // namespace fusedmoe::checkpoint
