// Implementation of matrix_reader.h.
#include "checkpoint/matrix_reader.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "checkpoint/text.h"
#include "checkpoint/unpack.h"
#include "formats/float_bits.h"

namespace fusedmoe::checkpoint {
namespace {

std::string type_list(std::span<const TensorType> types) {
  std::string list;
  for (const TensorType type : types) (list += list.empty() ? "" : ", ").append(to_string(type));
  return list;
}

// What stated scales hold in place of zero points that every expert has. Never read.
constexpr std::byte kSomeZeroPoints{};

// One number of a part that has one for each expert; f32, f16 or bf16.
float scalar_at(const Tensor& tensor, std::int64_t index) {
  if (tensor.type == TensorType::f32) {
    float value;
    std::memcpy(&value, tensor.data + 4 * index, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, tensor.data + 2 * index, sizeof bits);
  return tensor.type == TensorType::f16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

class Reader {
 public:
  Reader(const MatrixTensors& tensors, const MatrixContext& context,
         std::vector<std::string>& notes)
      : tensors_(tensors), layout_(*tensors.layout), context_(context), notes_(notes) {}

  StoredMatrix read() {
    const std::optional<std::string> reason = misfit(context_.extent, layout_, context_.numbers);
    if (reason)
      fail(ErrorCode::io, data(), "cannot be " + std::string(layout_.name) + ": " + *reason);
    for (const PartRule& rule : layout_.parts) {
      for (const Tensor* const tensor : part(rule.part)) check(*tensor, rule);
    }
    result_.stacked = context_.style != ExpertStyle::per_expert;
    state_shape();
    result_.conversion = layout_.conversion;
    if (layout_.conversion == Conversion::zeros && part(Part::zero_point).empty()) {
      result_.conversion = Conversion::none;
    }
    result_.zero_offset = context_.numbers.zero_offset;
    for (const PartRule& rule : layout_.parts) keep(rule.part);
    check_stated_shape();
    check_group_order();
    note_largest_zeros();
    read_globals();
    read_numbers(Part::input_scale, layout_.global_divides, result_.input_scales);
    return std::move(result_);
  }

 private:
  [[noreturn]] static void fail(ErrorCode code, const Tensor& tensor, const std::string& text) {
    fail_tensor(code, tensor.file, tensor.name, text);
  }

  // The tensors of a part; data has another name where the weights are unquantised.
  const std::vector<const Tensor*>& part(Part which) const {
    return tensors_.parts[static_cast<std::size_t>(which == Part::data ? tensors_.data : which)];
  }
  const Tensor& data() const { return *part(Part::data).front(); }

  void check(const Tensor& tensor, const PartRule& rule) const {
    const Tensor& first = *part(rule.part).front();
    if (tensor.type != first.type) {
      fail(ErrorCode::io, tensor,
           std::string("has dtype ") + to_string(tensor.type) + ", but " + quote(first.name) +
               " has " + to_string(first.type) + "; a matrix has one dtype over all experts");
    }
    if (std::find(rule.types.begin(), rule.types.end(), tensor.type) == rule.types.end()) {
      const bool plain = layout_.scales == ScaleLayout::none && rule.part == Part::data;
      fail(plain ? ErrorCode::unsupported : ErrorCode::io, tensor,
           std::string("has dtype ") + to_string(tensor.type) + "; expected " +
               type_list(rule.types) + " (" + std::string(layout_.name) + ")");
    }
    std::vector<std::int64_t> due =
        part_shape(rule.shape, context_.extent, layout_, context_.numbers);
    const bool one_by_one = context_.style == ExpertStyle::per_expert;
    // A number for one expert is [] or [1].
    if (rule.shape == PartShape::scalar && one_by_one && tensor.shape.size() == 1) due = {1};
    if (context_.style == ExpertStyle::stacked) due.insert(due.begin(), context_.num_experts);
    if (context_.style == ExpertStyle::flattened) due.front() *= context_.num_experts;
    check_shape(tensor, due, context_.config_file);
  }

  void state_shape() {
    const Extent& extent = context_.extent;
    WeightTensor& shape = result_.shape;
    shape.experts = context_.num_experts;
    shape.outputs = extent.outputs;
    shape.inputs = extent.inputs;
    shape.format = format();
    const bool as_stored = layout_.find(Part::data)->shape == PartShape::matrix;
    shape.layout = as_stored ? extent.layout : WeightLayout::nk;
    if (layout_.find(Part::data)->shape == PartShape::words &&
        layout_.format == WeightFormat::int4 && extent.inputs % 8 != 0) {
      shape.row_stride = (extent.inputs + 7) / 8 * 8;  // rows are whole words
    }
    WeightScales& scales = shape.scales;
    scales.layout = layout_.scales;
    if (layout_.scales == ScaleLayout::none) return;
    scales.type = stored_scale_type();
    scales.group_size = layout_.group != 0 ? layout_.group : context_.numbers.group_size;
    if (layout_.scales == ScaleLayout::group) {
      // A group that is the row.
      if (scales.group_size == 0) scales.layout = ScaleLayout::channel;
      scales.transposed = layout_.scales_transposed && scales.layout == ScaleLayout::group;
    }
    if (layout_.scales == ScaleLayout::block) {
      scales.block_n = context_.numbers.block_n;
      scales.block_k = context_.numbers.block_k;
      scales.transposed = extent.layout == WeightLayout::kn;
      if (extent.two_parts) scales.parts = ScaleParts::halves;
    }
    if (scales.layout != ScaleLayout::group) scales.group_size = 0;
    if (!part(Part::zero_point).empty()) scales.zero_points = &kSomeZeroPoints;
  }

  WeightFormat format() const {
    const TensorType type = data().type;
    if (const std::optional<WeightFormat> plain = plain_format(type)) return *plain;
    if (type == TensorType::f8_e5m2) return WeightFormat::fp8_e5m2;
    return layout_.format;
  }

  ScaleType stored_scale_type() const {
    switch (layout_.conversion) {
      case Conversion::q8_0:
      case Conversion::q4_0:
        return ScaleType::f16;
      case Conversion::mxfp4_blocks:
        return ScaleType::e8m0;
      case Conversion::nvfp4_blocks:
        return ScaleType::e4m3;
      default:
        return *scale_type(part(Part::scale).front()->type);
    }
  }

  void keep(Part which) {
    const std::vector<const Tensor*>& tensors = part(which);
    if (tensors.empty()) return;
    PartBytes& bytes = result_.parts[static_cast<std::size_t>(which)];
    if (context_.style != ExpertStyle::per_expert) {
      bytes = PartBytes(tensors.front()->data, tensors.front()->bytes / context_.num_experts);
      return;
    }
    std::vector<const std::byte*> experts;
    experts.reserve(tensors.size());
    for (const Tensor* const tensor : tensors) experts.push_back(tensor->data);
    bytes = PartBytes(std::move(experts));
  }

  void check_stated_shape() const {
    for (const Tensor* const tensor : part(Part::shape)) {
      std::int64_t stated[2];
      std::memcpy(stated, tensor->data, sizeof stated);
      const Extent& extent = context_.extent;
      if (stated[0] == extent.outputs && stated[1] == extent.inputs) continue;
      fail(ErrorCode::io, *tensor,
           "says that the shape is " + shape_text(stated) + "; expected " +
               shape_text(std::vector<std::int64_t>{extent.outputs, extent.inputs}) +
               " by the sizes in " + quote(context_.config_file));
    }
  }

  void check_group_order() const {
    const std::int64_t k = context_.extent.inputs;
    const std::int64_t group = context_.numbers.group_size != 0 ? context_.numbers.group_size : k;
    for (const Tensor* const tensor : part(Part::group_index)) {
      if (is_group_order(tensor->data, k, group)) continue;
      fail(ErrorCode::unsupported, *tensor,
           "gives groups in another order than k / " + std::to_string(group) +
               ": activation order (act-order, desc_act) is not supported; quantise without it");
    }
  }

  void note_largest_zeros() {
    if (!context_.numbers.may_store_largest_zero) return;
    for (const Tensor* const tensor : part(Part::zero_point)) {
      if (!has_largest_zero(tensor->data, tensor->bytes / 4)) continue;
      notes_.push_back(std::string(tensor->file) + ": tensor " + quote(tensor->name) +
                       " stores zero points of 15, read as 16 (z - 1 is stored, as exllama reads "
                       "it); other readers take them for 0");
      return;
    }
  }

  // The numbers of a part, one for each expert.
  void read_numbers(Part which, bool divides, std::vector<float>& numbers) const {
    for (const Tensor* const tensor : part(which)) {
      const std::int64_t count =
          context_.style == ExpertStyle::per_expert ? 1 : context_.num_experts;
      for (std::int64_t i = 0; i < count; ++i) {
        const float value = scalar_at(*tensor, i);
        if (divides && value == 0.0F && which == Part::global) {
          fail(ErrorCode::io, *tensor, "is 0, although weights are divided by it");
        }
        numbers.push_back(!divides ? value : value == 0.0F ? 0.0F : 1.0F / value);
      }
    }
  }

  void read_globals() {
    if (part(Part::global).empty()) {
      // GGUF leaves it out where it is 1.
      if (result_.shape.format == WeightFormat::nvfp4) {
        result_.globals.assign(static_cast<std::size_t>(context_.num_experts), 1.0F);
      }
      return;
    }
    std::vector<float> numbers;
    read_numbers(Part::global, layout_.global_divides, numbers);
    if (result_.shape.format == WeightFormat::nvfp4) {
      result_.globals = std::move(numbers);
      return;
    }
    if (std::all_of(numbers.begin(), numbers.end(), [](float x) { return x == 1.0F; })) return;
    const bool f16_scales =
        layout_.conversion == Conversion::q8_0 || layout_.conversion == Conversion::q4_0;
    if (!f16_scales) {
      fail(ErrorCode::unsupported, *part(Part::global).front(),
           "multiplies experts of type " + std::string(to_string(data().type)) +
               " by numbers other than 1, for which that type has no place; only Q4_0, Q8_0 and "
               "NVFP4 have");
    }
    result_.factors = std::move(numbers);
    result_.shape.scales.type = ScaleType::f32;
  }

  const MatrixTensors& tensors_;
  const StorageLayout& layout_;
  const MatrixContext& context_;
  std::vector<std::string>& notes_;
  StoredMatrix result_;
};

}  // namespace

void fail_tensor(ErrorCode code, std::string_view file, std::string_view name,
                 const std::string& text) {
  throw Error(code, std::string(file) + ": tensor " + quote(name) + " " + text);
}

void check_shape(const Tensor& tensor, const std::vector<std::int64_t>& expected,
                 std::string_view config_file) {
  if (tensor.shape == expected) return;
  fail_tensor(ErrorCode::io, tensor.file, tensor.name,
              "has shape " + shape_text(tensor.shape) + "; expected " + shape_text(expected) +
                  " by the sizes in " + quote(config_file));
}

StoredMatrix read_stored_matrix(const MatrixTensors& tensors, const MatrixContext& context,
                                std::vector<std::string>& notes) {
  return Reader(tensors, context, notes).read();
}

}  // namespace fusedmoe::checkpoint
