#include "formats/check.h"

#include <string>

#include "formats/format.h"
#include "formats/scales.h"

namespace fusedmoe {
namespace {

template <class Enum>
std::string legal_names(unsigned mask) {
  std::string names;
  for (int i = 0; mask >> i != 0; ++i) {
    if ((mask >> i & 1) == 0) continue;
    names += (names.empty() ? "" : " or ") + std::string(to_string(static_cast<Enum>(i)));
  }
  return names;
}

void check_scale_sizes(const std::string& name, const WeightTensor& tensor) {
  const WeightScales& scales = tensor.scales;
  const FormatInfo& format = format_info(tensor.format);
  const auto positive = [&](const char* field, std::int64_t value) {
    if (value > 0 && value <= kMaxSize) return;
    refuse(name + field, "a count from 1 to 2^31", std::to_string(value),
           "state how many elements share a scale");
  };
  if (scales.layout == ScaleLayout::group) {
    const std::int64_t due = format.scales.group_size;
    if (due != 0 && scales.group_size != due) {
      refuse(name + ".group_size", std::to_string(due), std::to_string(scales.group_size),
             std::string("that is what ") + format.name + " means");
    }
    if (scales.group_size == -1) {
      refuse(name + ".group_size", "a count from 1 to 2^31", "-1",
             "say layout channel: one group per row");
    }
    positive(".group_size", scales.group_size);
  }
  if (scales.layout == ScaleLayout::block) {
    positive(".block_n", scales.block_n);
    positive(".block_k", scales.block_k);
  }
  if (scales.parts != ScaleParts::one && tensor.outputs % 2 != 0) {
    refuse(name + ".parts", "one for an odd number of outputs", "two of them",
           "only gate and up in one tensor are two parts");
  }
  if (scales.layout == ScaleLayout::block && scales.parts == ScaleParts::interleaved) {
    refuse(name + ".parts", "one or halves for block scales", "interleaved",
           "rows that alternate cannot share blocks: give gate and up as w13 and w13_up");
  }
}

void check_scales(const std::string& tensor_name, const WeightTensor& tensor, bool shapes_only) {
  const std::string name = tensor_name + ".scales";
  const WeightScales& scales = tensor.scales;
  const FormatInfo& format = format_info(tensor.format);
  check_enum((name + ".layout").c_str(), scales.layout, ScaleLayout::block);
  check_enum((name + ".type").c_str(), scales.type, ScaleType::e4m3);
  check_enum((name + ".parts").c_str(), scales.parts, ScaleParts::interleaved);
  const bool some = scales.data != nullptr || scales.zero_points != nullptr ||
                    scales.global != nullptr || scales.layout != ScaleLayout::none;
  if (format.takes(ScaleLayout::none)) {
    if (some) {
      refuse(name, std::string("none for ") + format.name, "some",
             format.block_elements == 1 ? "leave scales empty for unquantised weights"
                                        : "its scales lie in its blocks");
    }
    return;
  }
  if (!format.takes(scales.layout)) {
    refuse(name + ".layout",
           legal_names<ScaleLayout>(format.scales.layouts) + " for " + format.name,
           to_string(scales.layout), "state how the checkpoint keeps them");
  }
  if (!format.takes(scales.type)) {
    refuse(name + ".type", legal_names<ScaleType>(format.scales.types) + " for " + format.name,
           to_string(scales.type), "convert them: they are not rounded silently");
  }
  check_scale_sizes(name, tensor);
  const bool read = !shapes_only && tensor.experts > 0;
  if (scales.data == nullptr && read) {
    const ScaleShape due = scale_shape(tensor);
    refuse(name + ".data",
           std::string(to_string(scales.type)) + " [" + std::to_string(tensor.experts) + ", " +
               std::to_string(due.rows) + ", " + std::to_string(due.columns) + "]",
           "a null pointer", "give the address of the scales");
  }
  if (scales.zero_points != nullptr && !format.scales.zero_points) {
    refuse(name + ".zero_points", std::string("none for ") + format.name, "some", "leave them out");
  }
  if (scales.global != nullptr && !format.scales.global) {
    refuse(name + ".global", std::string("none for ") + format.name, "some",
           "multiply them into the scales");
  }
  if (scales.global == nullptr && format.scales.global && read) {
    refuse(name + ".global", "f32 global scales", "a null pointer",
           "give them as they multiply: some checkpoints store the reciprocal");
  }
}

}  // namespace

std::string shape_text(const WeightTensor& t) {
  const bool nk = t.layout == WeightLayout::nk;
  return "[" + std::to_string(t.experts) + ", " + std::to_string(nk ? t.outputs : t.inputs) + ", " +
         std::to_string(nk ? t.inputs : t.outputs) + "]";
}

void check_weight_tensor(const std::string& name, const WeightTensor& tensor, bool shapes_only) {
  check_enum((name + ".format").c_str(), tensor.format, WeightFormat::q6_k);
  check_enum((name + ".layout").c_str(), tensor.layout, WeightLayout::kn);
  const FormatInfo& format = format_info(tensor.format);
  const std::int64_t experts = tensor.experts, outputs = tensor.outputs, inputs = tensor.inputs;
  for (const std::int64_t size : {experts, outputs, inputs}) {
    if (size > 0 && size <= kMaxSize) continue;
    refuse(name, "sizes from 1 to 2^31", shape_text(tensor), "state the tensor's shape");
  }
  if (tensor.data == nullptr && !shapes_only && experts > 0) {
    refuse(name, "data", "a null pointer", "give the address of the weights, or a source");
  }
  if (tensor.layout == WeightLayout::kn && !format.scales.any_order) {
    refuse(name + ".layout", std::string("nk for ") + format.name, "kn",
           "its elements share bytes along K: keep [experts, outputs, inputs]");
  }
  if (!format.encode && inputs % format.block_elements != 0) {
    refuse(name,
           std::string("inputs in multiples of ") + std::to_string(format.block_elements) +
               " for " + format.name,
           std::to_string(inputs), "quantise to a format with shorter groups");
  }
  constexpr std::int64_t kPadding = 64;  // what packing may add to a dimension
  if (!in_memory(outputs + kPadding, inputs + kPadding) ||
      !in_memory(experts, (outputs + kPadding) * (inputs + kPadding))) {
    refuse(name, "a tensor that memory can hold", shape_text(tensor), "check the sizes in config");
  }
  const bool nk = tensor.layout == WeightLayout::nk;
  const std::int64_t row = nk ? inputs : outputs;
  const std::int64_t rows = nk ? outputs : inputs;
  if (tensor.row_stride != 0 && (tensor.row_stride < row || !in_memory(rows, tensor.row_stride))) {
    refuse(name + ".row_stride", "0 or at least " + std::to_string(row) + ", within memory",
           std::to_string(tensor.row_stride), "rows must not overlap");
  }
  const std::int64_t least = row_stride_of(tensor) * (rows - 1) + row;
  if (tensor.expert_stride != 0 &&
      (tensor.expert_stride < least || !in_memory(experts, tensor.expert_stride))) {
    refuse(name + ".expert_stride", "0 or at least " + std::to_string(least) + ", within memory",
           std::to_string(tensor.expert_stride), "experts must not overlap");
  }
  if (row_stride_of(tensor) % format.block_elements != 0 ||
      expert_stride_of(tensor) % format.block_elements != 0) {
    refuse(name + ".row_stride and expert_stride",
           "multiples of " + std::to_string(format.block_elements) + " elements",
           std::to_string(tensor.row_stride) + " and " + std::to_string(tensor.expert_stride),
           std::string(format.name) + " elements share bytes: rows start whole ones");
  }
  check_scales(name, tensor, shapes_only);
}

}  // namespace fusedmoe
