// Implementation of model_config.h: sizes, dtype and activation. Which layers have experts is in
// layer_rules.cpp, the router in router_spec.cpp.
#include "checkpoint/model_config.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "checkpoint/config_reader.h"
#include "checkpoint/json_value.h"
#include "checkpoint/layer_rules.h"
#include "checkpoint/mapped_file.h"
#include "checkpoint/text.h"

namespace fusedmoe::checkpoint {
namespace {

constexpr std::size_t kMaxConfigBytes = 16'000'000;

// Families spell these differently; whatever stands there must agree.
constexpr std::string_view kExperts[] = {"num_experts", "num_local_experts", "n_routed_experts",
                                         "moe_num_experts"};
constexpr std::string_view kTopK[] = {"num_experts_per_tok", "experts_per_token", "moe_topk",
                                      "moe_k", "moe_top_k"};
constexpr std::string_view kHidden[] = {"hidden_size", "d_model"};

DType read_dtype(const ConfigReader& config) {
  std::string name = config.require_text({"dtype", "torch_dtype"});
  if (name.starts_with("torch.")) name.erase(0, 6);
  if (name == "float32") return DType::f32;
  if (name == "float16") return DType::f16;
  if (name == "bfloat16") return DType::bf16;
  config.fail_unsupported("dtype is " + quote(name) +
                          "; supported are float32, float16 and bfloat16");
}

std::string activation_name(const ConfigReader& config, const Family& family) {
  const JsonValue* const value = config.find({family.activation}).value;
  // DBRX names it in an object, and leaves it out where it is silu.
  if (family.activation == "ffn_act_fn") {
    if (value == nullptr) return "silu";
    const JsonValue* const name = value->find("name");
    const auto* const text = name == nullptr ? nullptr : name->as<std::string>();
    if (text == nullptr) {
      config.fail(family.activation, "is " + to_text(*value) + "; expected an object with a name");
    }
    return *text;
  }
  return config.require_text({family.activation});
}

bool is_gated_family(const Family& family) {
  const std::span<const TensorPattern> tensors = family.patterns.front().tensors;
  return std::any_of(tensors.begin(), tensors.end(), [](const TensorPattern& tensor) {
    return tensor.matrix == Matrix::gate || tensor.matrix == Matrix::gate_up;
  });
}

ActivationConfig read_activation(const ConfigReader& config, const Family& family) {
  constexpr std::pair<std::string_view, Activation> kNames[] = {
      {"silu", Activation::silu},
      {"swish", Activation::silu},
      {"gelu", Activation::gelu},
      {"gelu_new", Activation::gelu_tanh},
      {"gelu_pytorch_tanh", Activation::gelu_tanh},
      {"relu2", Activation::relu2},
  };
  const std::string name = activation_name(config, family);
  const auto* const row = std::find_if(std::begin(kNames), std::end(kNames),
                                       [&](const auto& entry) { return entry.first == name; });
  const auto refuse = [&](const std::string& reason) {
    config.fail_unsupported(std::string(family.activation) + " is " + quote(name) + "; " + reason);
  };
  if (row == std::end(kNames)) {
    refuse("supported are silu, swish, gelu, gelu_new, gelu_pytorch_tanh and relu2");
  }
  ActivationConfig activation{.kind = row->second};
  if (is_gated_family(family) == (activation.kind == Activation::relu2)) {
    refuse("it does not fit experts of family " + std::string(family.name) +
           (is_gated_family(family) ? ", which have a gate" : ", which have no gate"));
  }
  const std::optional<double> limit = config.positive_number({"swiglu_limit"});
  if (family.swigluoai) {
    if (activation.kind != Activation::silu) refuse("expected silu, by which swigluoai is meant");
    activation.kind = Activation::swigluoai;
    activation.limit = static_cast<float>(limit.value_or(7.0));
  } else if (limit) {
    config.fail_unsupported("swiglu_limit is set, which family " + std::string(family.name) +
                            " is not known to use");
  }
  return activation;
}

ModelConfig read_model(const ConfigReader& config, const Family& family) {
  ModelConfig model{.family = &family, .file = config.file()};
  MoeConfig moe;
  moe.dtype = read_dtype(config);
  moe.activation = read_activation(config, family);
  moe.apply_router_weight_on_input = family.weight_on_input;
  moe.hidden_size = config.require_integer(kHidden, 1, kMaxSize);
  if (config.find({"moe_latent_size"})) {
    config.fail_unsupported("moe_latent_size is set: experts in a latent space are not read");
  }
  const LayerFlags flags = read_layer_flags(config, family.layers);
  model.num_layers = static_cast<std::int64_t>(flags.size());

  const auto by_layer = [&](Keys keys) {
    if (family.sizes_by_layer) return config.integer_by_layer(keys, 1, kMaxSize, model.num_layers);
    return std::vector<std::int64_t>(flags.size(), config.require_integer(keys, 1, kMaxSize));
  };
  const std::vector<std::int64_t> experts = by_layer(kExperts);
  const std::vector<std::int64_t> top_k = by_layer(kTopK);
  const std::vector<std::int64_t> intermediate = by_layer({family.intermediate_size});
  for (std::size_t l = 0; l < flags.size(); ++l) {
    if (!flags[l]) continue;
    moe.num_experts = experts[l];
    moe.top_k = top_k[l];
    moe.intermediate_size = intermediate[l];
    if (moe.top_k > moe.num_experts) {
      config.fail("num_experts_per_tok", "is " + std::to_string(moe.top_k) + ", more than the " +
                                             std::to_string(moe.num_experts) + " experts");
    }
    model.layers.push_back({static_cast<std::int64_t>(l), moe});
  }
  if (model.layers.empty()) {
    config.fail("num_hidden_layers", "is " + std::to_string(model.num_layers) +
                                         ", but by the other keys no layer has experts");
  }
  if (family.layers == LayerRule::first_k_dense) {
    model.num_extra_layers =
        config.integer({"num_nextn_predict_layers"}, 0, kMaxLayers).value_or(0);
  }
  model.router = read_router_spec(config, family.router, model.layers.front().moe);
  return model;
}

}  // namespace

const LayerConfig* ModelConfig::find(std::int64_t layer) const noexcept {
  const auto found = std::lower_bound(
      layers.begin(), layers.end(), layer,
      [](const LayerConfig& entry, std::int64_t value) { return entry.layer < value; });
  return found != layers.end() && found->layer == layer ? &*found : nullptr;
}

ModelConfig parse_model_config(std::string_view text, std::string_view file) {
  const JsonValue root = parse_json(text, file);
  if (root.as<JsonObject>() == nullptr) {
    fail_io(file, "holds " + to_text(root) + "; expected an object");
  }
  const std::string model_type = ConfigReader(root, "", file).require_text({"model_type"});
  const Family* const family = find_family(model_type);
  if (family == nullptr) {
    std::string known;
    for (const Family& row : families()) (known += known.empty() ? "" : ", ").append(row.name);
    throw Error(ErrorCode::unsupported, std::string(file) + ": model_type " + quote(model_type) +
                                            " is not a known family; known are " + known);
  }
  const ConfigReader config(root, family->section, file);
  ModelConfig model = read_model(config, *family);
  model.quant = read_quant_scheme(config);
  return model;
}

ModelConfig read_model_config(const std::filesystem::path& file) {
  return parse_model_config(read_text_file(file, kMaxConfigBytes), file.string());
}

}  // namespace fusedmoe::checkpoint
