// Implementation of layer_builder.h.
#include "checkpoint/layer_builder.h"

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "checkpoint/expert_names.h"
#include "checkpoint/matrix_reader.h"
#include "checkpoint/stored_matrix.h"
#include "checkpoint/text.h"

namespace fusedmoe::checkpoint {
namespace {

using MatchSpan = std::span<const Match>;

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

Extent extent_of(Matrix matrix, const ExpertPattern& pattern, const MoeConfig& config) {
  const std::int64_t h = config.hidden_size;
  const std::int64_t i = config.intermediate_size;
  const bool interleaved = pattern.gate_up_layout == GateUpLayout::interleaved;
  switch (matrix) {
    case Matrix::gate_up:
      return {2 * i, h, pattern.w13_layout, !interleaved, interleaved};
    case Matrix::down:
      return {h, i, pattern.w2_layout};
    case Matrix::gate_up_bias:
      return {2 * i, 1};
    case Matrix::gate_bias:
    case Matrix::up_bias:
      return {i, 1};
    case Matrix::down_bias:
      return {h, 1};
    default:
      return {i, h, pattern.w13_layout};
  }
}

// The tensors found of one matrix, or of one bias.
struct Found {
  MatchSpan matches;
  const StorageLayout* layout = nullptr;
  Part data = Part::data;  // Part::plain: unquantised weights with a name of their own

  MatchSpan of(Part part) const {
    const auto [begin, end] =
        std::equal_range(matches.begin(), matches.end(), Match{.part = part},
                         [](const Match& a, const Match& b) { return a.part < b.part; });
    return {begin, end};
  }
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
    settle_pattern(matches);
    std::sort(matches.begin(), matches.end(), [](const Match& a, const Match& b) {
      return std::tie(a.pattern, a.tensor, a.part, a.expert) <
             std::tie(b.pattern, b.tensor, b.part, b.expert);
    });
    const ExpertPattern& pattern = family_.patterns[matches.empty() ? 0 : matches.front().pattern];
    const std::int64_t per_matrix =
        pattern.style == ExpertStyle::per_expert ? layer_.config.num_experts : 1;
    check_experts(matches, per_matrix);
    std::vector<Found> found(pattern.tensors.size());
    for (std::size_t t = 0; t < found.size(); ++t) {
      const auto [begin, end] =
          std::equal_range(matches.begin(), matches.end(), Match{.tensor = t},
                           [](const Match& a, const Match& b) { return a.tensor < b.tensor; });
      found[t].matches = {begin, end};
      choose_layout(pattern, pattern.tensors[t].matrix, found[t]);
    }
    check_complete(pattern, found, per_matrix);
    layer_.config.gate_up_layout = pattern.gate_up_layout;
    auto table = std::make_shared<ExpertTable>();
    table->source = source_;
    table->num_experts = layer_.config.num_experts;
    for (std::size_t t = 0; t < found.size(); ++t) {
      read(pattern, pattern.tensors[t].matrix, found[t], *table);
    }
    finish(*table);
    layer_.weights = expert_weights(std::move(table));
    read_router();
    return std::move(layer_);
  }

 private:
  // A name may belong to several patterns: all become those of the one that has them all.
  void settle_pattern(Matches& matches) const {
    const auto latest =
        std::max_element(matches.begin(), matches.end(),
                         [](const Match& a, const Match& b) { return a.pattern < b.pattern; });
    if (latest == matches.end()) return;
    const Match decisive = *latest;
    for (Match& match : matches) {
      if (match.pattern == decisive.pattern) continue;
      const std::optional<ExpertName> again =
          match_expert_name(family_, model_.quant.layout, match.name, decisive.pattern);
      if (!again || !again->known || again->pattern != decisive.pattern) {
        fail_tensor(ErrorCode::io, source_->location(), decisive.name,
                    "stores experts of layer " + std::to_string(layer_.index) +
                        " another way than " + quote(match.name) + "; keep one of the two ways");
      }
      match = {again->pattern, again->tensor, again->part, again->expert, match.name};
    }
  }

  void check_experts(const Matches& matches, std::int64_t per_matrix) const {
    for (const Match& match : matches) {
      if (match.expert < per_matrix) continue;
      fail_tensor(ErrorCode::io, source_->location(), match.name,
                  "belongs to expert " + std::to_string(match.expert) + ", but " +
                      quote(model_.file) + " says that there are " +
                      std::to_string(layer_.config.num_experts) + " (0 to " +
                      std::to_string(layer_.config.num_experts - 1) + ")");
    }
  }

  // Whether a matrix is quantised is seen from its tensors; what the config says must allow it.
  void choose_layout(const ExpertPattern& pattern, Matrix matrix, Found& found) const {
    found.layout = &storage_layout(LayoutId::plain);
    if (is_bias(matrix) || model_.quant.layout == nullptr) return;
    const StorageLayout& layout = layout_for(pattern, model_.quant.layout);
    const MatchSpan data = found.of(Part::data);
    if (model_.quant.layout == &storage_layout(LayoutId::gguf)) {
      found.layout = &layout;
      if (data.empty()) return;
      const Tensor& tensor = find(data.front().name);
      found.layout = gguf_layout(tensor.type);
      if (found.layout != nullptr) return;
      fail_tensor(ErrorCode::unsupported, tensor.file, tensor.name,
                  std::string("is of type ") + to_string(tensor.type) +
                      ", which is not read; read are F32, F16, BF16, Q8_0, Q4_0, MXFP4, NVFP4, "
                      "Q4_K, Q5_K and Q6_K");
    }
    const MatchSpan plain = found.of(Part::plain);
    const bool plain_data = !data.empty() && plain_format(find(data.front().name).type).has_value();
    if (plain.empty() && !plain_data && &layout == model_.quant.layout) {
      found.layout = &layout;
      return;
    }
    const Match& first = plain.empty() ? found.matches.front() : plain.front();
    for (const Match& match : found.matches) {
      if (match.part == (plain.empty() ? Part::data : Part::plain)) continue;
      fail_tensor(ErrorCode::io, source_->location(), match.name,
                  "is there, although " + quote(first.name) + " is unquantised; keep one of them");
    }
    if (!model_.quant.lists_exceptions) {
      fail_tensor(ErrorCode::io, source_->location(), first.name,
                  "is unquantised, but by " + quote(model_.file) + " all experts are quantised (" +
                      std::string(model_.quant.layout->name) + ") and no exception is listed");
    }
    if (!plain.empty()) found.data = Part::plain;
  }

  bool is_required(const PartRule& rule) const {
    return rule.need == Need::required ||
           (rule.need == Need::if_asymmetric && model_.quant.numbers.asymmetric);
  }

  // Every part that is due, for every expert. Names are unique, so the counts tell whether any is
  // missing; then look for the first.
  void check_complete(const ExpertPattern& pattern, const std::vector<Found>& found,
                      std::int64_t per_matrix) const {
    std::int64_t missing = 0;
    std::string first;
    for (std::size_t t = 0; t < found.size(); ++t) {
      for (const PartRule& rule : found[t].layout->parts) {
        if (is_bias(pattern.tensors[t].matrix) && rule.part != Part::data) continue;
        const MatchSpan have = found[t].of(rule.part == Part::data ? found[t].data : rule.part);
        check_allowed(rule, have);
        if (have.empty() && !is_required(rule)) continue;
        missing += per_matrix - static_cast<std::int64_t>(have.size());
        if (!first.empty() || static_cast<std::int64_t>(have.size()) == per_matrix) continue;
        std::size_t at = 0;
        while (at < have.size() && have[at].expert == static_cast<std::int64_t>(at)) ++at;
        first = expert_tensor_name(family_, layer_.index, pattern.tensors[t], rule.suffix,
                                   static_cast<std::int64_t>(at));
      }
    }
    if (missing == 0) return;
    std::string text = "is missing";
    if (missing > 1) {
      text += ", and " + std::to_string(missing - 1) + " more of the experts of layer " +
              std::to_string(layer_.index);
    }
    fail_tensor(ErrorCode::io, source_->location(), first, text + "; fetch the checkpoint again");
  }

  void check_allowed(const PartRule& rule, MatchSpan have) const {
    if (have.empty()) return;
    if (rule.need == Need::refused) {
      fail_tensor(ErrorCode::unsupported, source_->location(), have.front().name,
                  "orders groups by activation: act-order is not supported; quantise without it");
    }
    if (rule.need == Need::if_asymmetric && !model_.quant.numbers.asymmetric) {
      fail_tensor(
          ErrorCode::io, source_->location(), have.front().name,
          "holds zero points, but by " + quote(model_.file) + " there are none (symmetric)");
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

  static void check_float(const Tensor& tensor) {
    if (float_dtype(tensor.type)) return;
    fail_tensor(
        ErrorCode::unsupported, tensor.file, tensor.name,
        std::string("has dtype ") + to_string(tensor.type) + "; only F32, F16 and BF16 are read");
  }

  void read(const ExpertPattern& pattern, Matrix matrix, const Found& found, ExpertTable& table) {
    const Extent extent = extent_of(matrix, pattern, layer_.config);
    MatrixTensors tensors{.layout = found.layout, .data = found.data};
    for (const Match& match : found.matches) {
      const Tensor& tensor = find(match.name);
      layer_.bytes += tensor.bytes;
      tensors.parts[static_cast<std::size_t>(match.part)].push_back(&tensor);
    }
    if (is_bias(matrix)) {
      read_bias(matrix, *tensors.parts[0].front(), extent, table);
      return;
    }
    const MatrixContext context{.style = pattern.style,
                                .num_experts = layer_.config.num_experts,
                                .extent = extent,
                                .numbers = model_.quant.numbers,
                                .config_file = model_.file};
    // Without a gate, w13 is the up projection alone.
    const bool up_beside_gate = matrix == Matrix::up && !table.w13.empty();
    StoredMatrix& target = matrix == Matrix::down ? table.w2
                           : up_beside_gate       ? table.w13_up
                                                  : table.w13;
    target = read_stored_matrix(tensors, context, layer_.notes);
  }

  void read_bias(Matrix matrix, const Tensor& tensor, const Extent& extent, ExpertTable& table) {
    check_float(tensor);
    check_shape(tensor, {layer_.config.num_experts, extent.outputs}, model_.file);
    StoredBias& bias = matrix == Matrix::down_bias ? table.w2_bias
                       : matrix == Matrix::up_bias ? table.w13_up_bias
                                                   : table.w13_bias;
    bias = {tensor.data, *float_dtype(tensor.type), extent.outputs};
    if (matrix == Matrix::up_bias && bias.dtype != table.w13_bias.dtype) {
      fail_tensor(ErrorCode::io, tensor.file, tensor.name,
                  std::string("has dtype ") + to_string(tensor.type) +
                      ", another than the gate's bias; they must agree");
    }
  }

  // What is said of the layer once all matrices are read.
  void finish(ExpertTable& table) {
    for (const StoredMatrix* const matrix : {&table.w13, &table.w13_up, &table.w2}) {
      if (matrix->empty()) continue;
      const WeightFormat format = matrix->shape.format;
      if (std::find(layer_.formats.begin(), layer_.formats.end(), format) == layer_.formats.end()) {
        layer_.formats.push_back(format);
      }
      layer_.has_input_scales = layer_.has_input_scales || !matrix->input_scales.empty();
    }
    // The same hidden rows go into gate and up: a scale that holds for both.
    table.w13_input_scales = table.w13.input_scales;
    for (std::size_t e = 0; e < table.w13_up.input_scales.size(); ++e) {
      if (e >= table.w13_input_scales.size()) table.w13_input_scales.push_back(0);
      table.w13_input_scales[e] = std::max(table.w13_input_scales[e], table.w13_up.input_scales[e]);
    }
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
    check_float(weight);
    check_shape(weight, {experts, layer_.config.hidden_size}, model_.file);
    layer_.router_weight = {weight.data, *float_dtype(weight.type), experts,
                            layer_.config.hidden_size};
    layer_.router_logit_bias = read_router_bias(layer_.router.logit_bias);
    layer_.router_selection_bias = read_router_bias(layer_.router.selection_bias);
  }

  // [E] or [1, E].
  ConstMatrixView read_router_bias(const std::string& name) const {
    if (name.empty()) return {};
    const std::int64_t experts = layer_.config.num_experts;
    const Tensor& bias = find(name);
    check_float(bias);
    if (bias.shape != std::vector<std::int64_t>{1, experts}) {
      check_shape(bias, {experts}, model_.file);
    }
    return {bias.data, *float_dtype(bias.type), 1, experts};
  }

  const ModelConfig& model_;
  const Family& family_;
  const std::shared_ptr<TensorSource>& source_;
  MoeLayer layer_;
};

}  // namespace

MoeLayer build_layer(const ModelConfig& model, const LayerConfig& layer,
                     const std::shared_ptr<TensorSource>& source, Matches matches) {
  return LayerBuilder(model, layer, source).build(std::move(matches));
}

}  // namespace fusedmoe::checkpoint
