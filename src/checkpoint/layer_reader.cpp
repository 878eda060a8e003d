// Implementation of layer_reader.h.
#include "checkpoint/layer_reader.h"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "checkpoint/expert_names.h"
#include "checkpoint/text.h"

namespace fusedmoe::checkpoint {
namespace {

constexpr std::size_t kMaxProblems = 100;

struct Match {
  std::size_t pattern = 0;
  std::size_t tensor = 0;
  std::int64_t expert = 0;
  std::string_view name;
};
using Matches = std::vector<Match>;

std::optional<WeightFormat> weight_format(TensorType type) {
  switch (type) {
    case TensorType::f32:
      return WeightFormat::f32;
    case TensorType::f16:
      return WeightFormat::f16;
    case TensorType::bf16:
      return WeightFormat::bf16;
    default:
      return std::nullopt;
  }
}

std::optional<DType> float_dtype(TensorType type) {
  switch (type) {
    case TensorType::f32:
      return DType::f32;
    case TensorType::f16:
      return DType::f16;
    case TensorType::bf16:
      return DType::bf16;
    default:
      return std::nullopt;
  }
}

// Thrown inside a layer and turned into a Problem at its border.
[[noreturn]] void fail_tensor(ErrorCode code, std::string_view file, std::string_view name,
                              const std::string& text) {
  throw Error(code, std::string(file) + ": tensor " + quote(name) + " " + text);
}

// N and K of a matrix that belongs to one expert.
struct Extent {
  std::int64_t outputs = 0;
  std::int64_t inputs = 0;
  WeightLayout layout = WeightLayout::nk;

  std::int64_t rows() const { return layout == WeightLayout::nk ? outputs : inputs; }
  std::int64_t columns() const { return layout == WeightLayout::nk ? inputs : outputs; }
  std::int64_t elements() const { return outputs * inputs; }
};

bool is_bias(Matrix matrix) {
  return matrix == Matrix::gate_up_bias || matrix == Matrix::down_bias;
}

Extent extent_of(Matrix matrix, const ExpertPattern& pattern, const MoeConfig& config) {
  const std::int64_t h = config.hidden_size;
  const std::int64_t i = config.intermediate_size;
  switch (matrix) {
    case Matrix::gate_up:
      return {2 * i, h, pattern.w13_layout};
    case Matrix::down:
      return {h, i, pattern.w2_layout};
    case Matrix::gate_up_bias:
      return {2 * i, 1, WeightLayout::nk};
    case Matrix::down_bias:
      return {h, 1, WeightLayout::nk};
    default:
      return {i, h, pattern.w13_layout};
  }
}

std::vector<std::int64_t> expected_shape(ExpertStyle style, Matrix matrix, const Extent& extent,
                                         std::int64_t experts) {
  if (is_bias(matrix)) return {experts, extent.outputs};
  switch (style) {
    case ExpertStyle::stacked:
      return {experts, extent.rows(), extent.columns()};
    case ExpertStyle::flattened:
      return {experts * extent.rows(), extent.columns()};
    default:
      return {extent.rows(), extent.columns()};
  }
}

// One matrix of all experts: either `stack`, or one address for each expert.
struct MatrixData {
  WeightTensor shape = {};  // data is set for a stack
  std::vector<const std::byte*> experts = {};

  WeightTensor expert(std::size_t index) const {
    WeightTensor tensor = shape;
    if (tensor.empty()) return tensor;
    tensor.data = experts[index];
    tensor.experts = 1;
    return tensor;
  }
};

struct ExpertTable {
  std::shared_ptr<TensorSource> source;  // keeps the maps alive
  MatrixData w13, w13_up, w2;
};

class LayerBuilder {
 public:
  LayerBuilder(const ModelConfig& model, const LayerConfig& layer,
               const std::shared_ptr<TensorSource>& source)
      : model_(model), family_(*model.family), source_(source) {
    layer_.index = layer.layer;
    layer_.config = layer.moe;
  }

  // `matches`: every tensor of the layer's experts. Throws Error.
  MoeLayer build(Matches matches) {
    std::sort(matches.begin(), matches.end(), [](const Match& a, const Match& b) {
      return std::tie(a.pattern, a.tensor, a.expert) < std::tie(b.pattern, b.tensor, b.expert);
    });
    check_complete(matches);
    const ExpertPattern& pattern = family_.patterns[matches.front().pattern];
    layer_.config.gate_up_layout = pattern.gate_up_layout;
    auto table = std::make_shared<ExpertTable>();
    table->source = source_;
    auto next = matches.begin();
    for (std::size_t t = 0; t < pattern.tensors.size(); ++t) {
      const auto begin = next;
      while (next != matches.end() && next->tensor == t) ++next;
      read_matrix(pattern, pattern.tensors[t].matrix, {begin, next}, *table);
    }
    layer_.weights.w13 = table->w13.shape;
    layer_.weights.w13_up = table->w13_up.shape;
    layer_.weights.w2 = table->w2.shape;
    for (const WeightTensor* const tensor :
         {&layer_.weights.w13, &layer_.weights.w13_up, &layer_.weights.w2}) {
      const bool known = std::find(layer_.formats.begin(), layer_.formats.end(), tensor->format) !=
                         layer_.formats.end();
      if (!tensor->empty() && !known) layer_.formats.push_back(tensor->format);
    }
    if (pattern.style == ExpertStyle::per_expert) set_source(std::move(table));
    read_router();
    return std::move(layer_);
  }

 private:
  // Every expert of every matrix of one pattern, and none beyond. Matches are sorted.
  void check_complete(const Matches& matches) const {
    const std::size_t first_pattern = matches.empty() ? 0 : matches.front().pattern;
    if (!matches.empty() && matches.back().pattern != first_pattern) {
      fail_tensor(ErrorCode::io, source_->location(), matches.back().name,
                  "stores experts of layer " + std::to_string(layer_.index) + " another way than " +
                      quote(matches.front().name) + "; keep one of the two ways");
    }
    const ExpertPattern& pattern = family_.patterns[first_pattern];
    const std::int64_t per_matrix =
        pattern.style == ExpertStyle::per_expert ? layer_.config.num_experts : 1;
    for (const Match& match : matches) {
      if (match.expert < per_matrix) continue;
      fail_tensor(ErrorCode::io, source_->location(), match.name,
                  "belongs to expert " + std::to_string(match.expert) + ", but " +
                      quote(model_.file) + " says that there are " +
                      std::to_string(layer_.config.num_experts) + " (0 to " +
                      std::to_string(layer_.config.num_experts - 1) + ")");
    }
    // Names are unique, so the counts tell whether any is missing; then look for the first.
    const std::int64_t due = per_matrix * static_cast<std::int64_t>(pattern.tensors.size());
    const std::int64_t missing = due - static_cast<std::int64_t>(matches.size());
    if (missing <= 0) return;
    std::size_t at = 0;
    for (std::size_t t = 0; t < pattern.tensors.size(); ++t) {
      for (std::int64_t e = 0; e < per_matrix; ++e, ++at) {
        if (at < matches.size() && matches[at].tensor == t && matches[at].expert == e) continue;
        std::string text = "is missing";
        if (missing > 1) {
          text += ", and " + std::to_string(missing - 1) + " more of the experts of layer " +
                  std::to_string(layer_.index);
        }
        fail_tensor(ErrorCode::io, source_->location(),
                    expert_tensor_name(family_, layer_.index, pattern.tensors[t], e),
                    text + "; fetch the checkpoint again");
      }
    }
  }

  const Tensor& find(std::string_view name) const {
    const Tensor* const tensor = source_->find(name);
    if (tensor == nullptr) {
      fail_tensor(ErrorCode::io, source_->location(), name,
                  "is missing; fetch the checkpoint again");
    }
    return *tensor;
  }

  void check_shape(const Tensor& tensor, const std::vector<std::int64_t>& expected) const {
    if (tensor.shape == expected) return;
    fail_tensor(ErrorCode::io, tensor.file, tensor.name,
                "has shape " + shape_text(tensor.shape) + "; expected " + shape_text(expected) +
                    " by the sizes in " + quote(model_.file));
  }

  static void check_type(const Tensor& tensor) {
    if (weight_format(tensor.type)) return;
    fail_tensor(ErrorCode::unsupported, tensor.file, tensor.name,
                std::string("has dtype ") + to_string(tensor.type) +
                    "; only F32, F16 and BF16 are read by this build");
  }

  void read_matrix(const ExpertPattern& pattern, Matrix matrix, std::span<const Match> matches,
                   ExpertTable& table) {
    const Extent extent = extent_of(matrix, pattern, layer_.config);
    const std::vector<std::int64_t> shape =
        expected_shape(pattern.style, matrix, extent, layer_.config.num_experts);
    MatrixData data;
    const Tensor* first = nullptr;
    for (const Match& match : matches) {
      const Tensor& tensor = find(match.name);
      if (first == nullptr) first = &tensor;
      if (tensor.type != first->type) {
        fail_tensor(ErrorCode::io, tensor.file, tensor.name,
                    std::string("has dtype ") + to_string(tensor.type) + ", but " +
                        quote(first->name) + " has " + to_string(first->type) +
                        "; a matrix has one dtype over all experts");
      }
      check_type(tensor);
      check_shape(tensor, shape);
      layer_.bytes += tensor.bytes;
      if (pattern.style == ExpertStyle::per_expert) data.experts.push_back(tensor.data);
    }
    if (is_bias(matrix)) {
      BiasTensor& bias =
          matrix == Matrix::down_bias ? layer_.weights.w2_bias : layer_.weights.w13_bias;
      bias = {first->data, *float_dtype(first->type), layer_.config.num_experts, extent.outputs};
      return;
    }
    data.shape.format = *weight_format(first->type);
    data.shape.layout = extent.layout;
    data.shape.experts = layer_.config.num_experts;
    data.shape.outputs = extent.outputs;
    data.shape.inputs = extent.inputs;
    if (pattern.style != ExpertStyle::per_expert) data.shape.data = first->data;
    // Without a gate, w13 is the up projection alone.
    const bool up_beside_gate = matrix == Matrix::up && !table.w13.shape.empty();
    MatrixData& target = matrix == Matrix::down ? table.w2
                         : up_beside_gate       ? table.w13_up
                                                : table.w13;
    target = std::move(data);
  }

  void set_source(std::shared_ptr<const ExpertTable> table) {
    layer_.weights.source = [table = std::move(table)](std::int64_t expert) {
      const auto count = static_cast<std::int64_t>(table->w2.experts.size());
      if (expert < 0 || expert >= count) {
        throw Error(ErrorCode::invalid_argument, "expert: expected 0 to " +
                                                     std::to_string(count - 1) + ", got " +
                                                     std::to_string(expert));
      }
      const auto index = static_cast<std::size_t>(expert);
      ExpertWeights weights;
      weights.w13 = table->w13.expert(index);
      weights.w13_up = table->w13_up.expert(index);
      weights.w2 = table->w2.expert(index);
      return weights;
    };
  }

  void read_router() {
    layer_.router = model_.router;
    const std::int64_t experts = layer_.config.num_experts;
    const auto full_name = [&](std::string_view rest) {
      return rest.empty() ? std::string() : layer_tensor_name(family_, layer_.index, rest);
    };
    layer_.router.weight = full_name(family_.router_weight);
    layer_.router.logit_bias = full_name(family_.logit_bias);
    layer_.router.selection_bias = full_name(family_.selection_bias);
    const Tensor& weight = find(layer_.router.weight);
    check_type(weight);
    check_shape(weight, {experts, layer_.config.hidden_size});
    layer_.router_weight = {weight.data, *float_dtype(weight.type), experts,
                            layer_.config.hidden_size};
    layer_.router_logit_bias = read_bias(layer_.router.logit_bias);
    layer_.router_selection_bias = read_bias(layer_.router.selection_bias);
  }

  // [E] or [1, E].
  ConstMatrixView read_bias(const std::string& name) const {
    if (name.empty()) return {};
    const std::int64_t experts = layer_.config.num_experts;
    const Tensor& bias = find(name);
    check_type(bias);
    if (bias.shape != std::vector<std::int64_t>{1, experts}) check_shape(bias, {experts});
    return {bias.data, *float_dtype(bias.type), 1, experts};
  }

  const ModelConfig& model_;
  const Family& family_;
  const std::shared_ptr<TensorSource>& source_;
  MoeLayer layer_;
};

// Sorts names into layers; names that only look like experts are problems at once.
std::map<std::int64_t, Matches> match_names(const ModelConfig& model, const TensorSource& source,
                                            ProblemList& problems) {
  std::map<std::int64_t, Matches> layers;
  std::vector<std::string_view> names = source.names();
  std::sort(names.begin(), names.end());
  for (const std::string_view name : names) {
    const std::optional<ExpertName> match = match_expert_name(*model.family, name);
    if (!match) continue;
    if (match->known) {
      layers[match->layer].push_back({match->pattern, match->tensor, match->expert, name});
      continue;
    }
    const bool quantized = looks_quantized(name);
    const std::string family(model.family->name);
    problems.add(
        quantized ? ErrorCode::unsupported : ErrorCode::io,
        source.location() + ": tensor " + quote(name) +
            (quantized ? " belongs to quantised experts, which this build does not read"
                       : " stands among the experts of layer " + std::to_string(match->layer) +
                             " but fits no name of family " + family));
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
      layers.push_back(LayerBuilder(model, layer, source).build(std::move(found[layer.layer])));
    } catch (const Error& error) {
      problems.add(error.code(), error.what());
    }
  }
  return layers;
}

}  // namespace fusedmoe::checkpoint
