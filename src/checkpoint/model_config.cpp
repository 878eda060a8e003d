// Implementation of model_config.h: what the keys of config.json mean.
#include "checkpoint/model_config.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "checkpoint/config_reader.h"
#include "checkpoint/json_value.h"
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
constexpr std::string_view kLayers[] = {"num_hidden_layers", "n_layers"};

void refuse_quantized(const ConfigReader& config) {
  for (const std::string_view key : {"quantization_config", "compression_config"}) {
    const ConfigReader::Found found = config.find({key});
    if (!found) continue;
    const JsonValue* const method = found.value->find("quant_method");
    config.fail_unsupported("the checkpoint is quantised (" + std::string(key) + ", quant_method " +
                            (method == nullptr ? "not given" : to_text(*method)) +
                            "); only f32, f16 and bf16 experts are read by this build");
  }
}

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

// true for each layer with experts.
using LayerFlags = std::vector<bool>;

LayerFlags listed_layers(const ConfigReader& config, std::int64_t num_layers) {
  const std::optional<std::int64_t> step =
      config.integer({"interleave_moe_layer_step"}, 1, kMaxLayers);
  const std::optional<std::vector<std::int64_t>> list =
      config.integers({"moe_layers"}, 0, num_layers - 1);
  LayerFlags from_list(static_cast<std::size_t>(num_layers), false);
  LayerFlags from_step = from_list;
  for (std::int64_t l = 0; l < num_layers; ++l) from_step[l] = (l + 1) % step.value_or(1) == 0;
  if (!list) return from_step;
  for (const std::int64_t l : *list) from_list[l] = true;
  if (step && from_list != from_step) {
    config.fail("moe_layers", "and interleave_moe_layer_step name different layers");
  }
  return from_list;
}

// Empty when neither key is there.
LayerFlags block_types(const ConfigReader& config) {
  LayerFlags from_list;
  if (const JsonValue* const value = config.find({"layers_block_type"}).value) {
    const auto* const array = value->as<JsonArray>();
    if (array == nullptr) config.fail("layers_block_type", "is no list of names");
    for (const JsonValue& type : *array) {
      const auto* const name = type.as<std::string>();
      if (name == nullptr) config.fail("layers_block_type", "holds " + to_text(type));
      from_list.push_back(*name == "moe");
    }
  }
  const std::optional<std::string> pattern = config.text({"hybrid_override_pattern"});
  if (!pattern) return from_list;
  LayerFlags from_pattern;
  for (const char c : *pattern) {
    if (std::string_view("M*-E").find(c) == std::string_view::npos) {
      config.fail("hybrid_override_pattern",
                  "is " + quote(*pattern) + "; expected only M, *, - and E (experts)");
    }
    from_pattern.push_back(c == 'E');
  }
  if (!from_list.empty() && from_list != from_pattern) {
    config.fail("layers_block_type", "and hybrid_override_pattern name different layers");
  }
  return from_pattern;
}

LayerFlags moe_layers(const ConfigReader& config, LayerRule rule) {
  if (rule == LayerRule::block_types) {
    LayerFlags flags = block_types(config);
    const std::optional<std::int64_t> count = config.integer(kLayers, 1, kMaxLayers);
    if (flags.empty() || flags.size() > static_cast<std::size_t>(kMaxLayers)) {
      config.fail("layers_block_type", "or hybrid_override_pattern must name 1 to " +
                                           std::to_string(kMaxLayers) + " layers");
    }
    if (count && static_cast<std::size_t>(*count) != flags.size()) {
      config.fail("num_hidden_layers", "is " + std::to_string(*count) + ", but the types of " +
                                           std::to_string(flags.size()) + " layers are named");
    }
    return flags;
  }
  const std::int64_t n = config.require_integer(kLayers, 1, kMaxLayers);
  if (rule == LayerRule::listed) return listed_layers(config, n);
  LayerFlags flags(static_cast<std::size_t>(n), true);
  const auto keep = [&](auto&& has_experts) {
    for (std::int64_t l = 0; l < n; ++l) flags[l] = has_experts(l);
  };
  switch (rule) {
    case LayerRule::first_k_dense: {
      const std::int64_t dense = config.require_integer({"first_k_dense_replace"}, 0, kMaxLayers);
      const std::int64_t step = config.integer({"moe_layer_freq"}, 1, kMaxLayers).value_or(1);
      keep([&](std::int64_t l) { return l >= dense && l % step == 0; });
      break;
    }
    case LayerRule::sparse_step: {
      const std::int64_t step = config.integer({"decoder_sparse_step"}, 1, kMaxLayers).value_or(1);
      keep([&](std::int64_t l) { return (l + 1) % step == 0; });
      const auto dense = config.integers({"mlp_only_layers"}, 0, kMaxLayers);
      for (const std::int64_t l : dense.value_or(std::vector<std::int64_t>())) {
        if (l < n) flags[l] = false;
      }
      break;
    }
    case LayerRule::start_interval: {
      const std::int64_t start = config.require_integer({"moe_layer_start_index"}, 0, kMaxLayers);
      const std::int64_t step = config.integer({"moe_layer_interval"}, 1, kMaxLayers).value_or(1);
      const std::int64_t given =
          config.integer({"moe_layer_end_index"}, -1, kMaxLayers).value_or(-1);
      const std::int64_t end = given < 0 ? n - 1 : given;
      keep([&](std::int64_t l) { return l >= start && l <= end && (l + 1) % step == 0; });
      break;
    }
    case LayerRule::period_offset: {
      const std::int64_t period = config.require_integer({"expert_layer_period"}, 1, kMaxLayers);
      const std::int64_t offset = config.require_integer({"expert_layer_offset"}, 0, period - 1);
      keep([&](std::int64_t l) { return l % period == offset; });
      break;
    }
    default:
      break;
  }
  return flags;
}

// Refuses a value other than the one that the family's rule stands for.
void expect_text(const ConfigReader& config, std::string_view key, std::string_view expected) {
  const std::optional<std::string> value = config.text({key});
  if (value && *value != expected) {
    config.fail_unsupported(std::string(key) + " is " + quote(*value) + "; supported here is " +
                            quote(expected));
  }
}

void read_groups(const ConfigReader& config, RouterSpec& router, std::int64_t num_experts,
                 std::int64_t top_k) {
  router.n_group = config.require_integer({"n_group"}, 1, num_experts);
  router.topk_group = config.require_integer({"topk_group"}, 1, router.n_group);
  if (num_experts % router.n_group != 0) {
    config.fail("n_group", "is " + std::to_string(router.n_group) + "; expected a divisor of " +
                               std::to_string(num_experts) + " experts");
  }
  const std::int64_t open = num_experts / router.n_group * router.topk_group;
  if (top_k > open) {
    config.fail("topk_group", "leaves " + std::to_string(open) + " experts to choose " +
                                  std::to_string(top_k) + " from");
  }
}

RouterSpec read_router(const ConfigReader& config, RouterRule rule, const MoeConfig& moe) {
  RouterSpec router;
  const auto norm_topk = [&](bool otherwise) {
    return config.boolean({"norm_topk_prob"}).value_or(otherwise);
  };
  switch (rule) {
    case RouterRule::softmax_renormalized:
      router.renormalize = norm_topk(true);
      break;
    case RouterRule::softmax_norm_topk: {
      const std::optional<bool> normalize = config.boolean({"norm_topk_prob"});
      if (!normalize) config.fail("norm_topk_prob", "is missing; expected true or false");
      router.renormalize = *normalize;
      break;
    }
    case RouterRule::softmax_plain:
      break;
    case RouterRule::softmax_of_chosen:
      router.kind = RouterKind::topk_softmax;
      break;
    case RouterRule::softmax_bias:
      router.kind = RouterKind::softmax_bias;
      router.renormalize = true;
      router.epsilon_rule = EpsilonRule::max;
      router.epsilon = config.positive_number({"moe_norm_min"}).value_or(1e-12);
      break;
    case RouterRule::softmax_groups:
      expect_text(config, "scoring_func", "softmax");
      router.kind = RouterKind::softmax_grouped;
      router.renormalize = norm_topk(false);
      router.epsilon_rule = EpsilonRule::add;
      router.epsilon = 1e-20;
      router.scaling = config.require_positive_number({"routed_scaling_factor"});
      // greedy is the same with one group.
      if (config.require_text({"topk_method"}) != "greedy") {
        expect_text(config, "topk_method", "group_limited_greedy");
        read_groups(config, router, moe.num_experts, moe.top_k);
      }
      break;
    case RouterRule::sigmoid_bias:
      expect_text(config, "scoring_func", "sigmoid");
      router.kind = RouterKind::sigmoid_bias;
      router.renormalize = true;
      break;
    case RouterRule::sigmoid_bias_groups:
      expect_text(config, "scoring_func", "sigmoid");
      expect_text(config, "topk_method", "noaux_tc");
      router.kind = RouterKind::sigmoid_bias_grouped;
      router.renormalize = norm_topk(true);
      router.epsilon_rule = EpsilonRule::add;
      router.epsilon = 1e-20;
      router.scaling = config.require_positive_number({"routed_scaling_factor"});
      read_groups(config, router, moe.num_experts, moe.top_k);
      break;
    case RouterRule::sigmoid_of_chosen:
      router.kind = RouterKind::topk_sigmoid;
      break;
    case RouterRule::sparsemixer:
      router.kind = RouterKind::sparsemixer;
      break;
    case RouterRule::softmax_p_norm: {
      // The 1-norm of softmax's output is its sum.
      const std::optional<double> p = config.positive_number({"moe_normalize_expert_weights"});
      if (p.value_or(1.0) != 1.0) router.kind = RouterKind::softmax_p_norm;
      router.renormalize = p.has_value();
      break;
    }
  }
  return router;
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
  const LayerFlags flags = moe_layers(config, family.layers);
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
  model.router = read_router(config, family.router, model.layers.front().moe);
  return model;
}

}  // namespace

const char* to_string(RouterKind kind) noexcept {
  switch (kind) {
    case RouterKind::softmax_topk:
      return "softmax_topk";
    case RouterKind::topk_softmax:
      return "topk_softmax";
    case RouterKind::topk_sigmoid:
      return "topk_sigmoid";
    case RouterKind::softmax_bias:
      return "softmax_bias";
    case RouterKind::softmax_grouped:
      return "softmax_grouped";
    case RouterKind::sigmoid_bias:
      return "sigmoid_bias";
    case RouterKind::sigmoid_bias_grouped:
      return "sigmoid_bias_grouped";
    case RouterKind::softmax_p_norm:
      return "softmax_p_norm";
    case RouterKind::sparsemixer:
      return "sparsemixer";
  }
  return "?";
}

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
  refuse_quantized(config);
  return read_model(config, *family);
}

ModelConfig read_model_config(const std::filesystem::path& file) {
  return parse_model_config(read_text_file(file, kMaxConfigBytes), file.string());
}

}  // namespace fusedmoe::checkpoint
