#include "model_shapes.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <system_error>

#include "fusedmoe/error.h"

namespace fusedmoe::tool {
namespace {

ModelShape shape(const std::string& name, std::int64_t hidden_size, std::int64_t intermediate_size,
                 std::int64_t num_experts, std::int64_t top_k) {
  ModelShape result{.name = name, .config = {}};
  result.config.hidden_size = hidden_size;
  result.config.intermediate_size = intermediate_size;
  result.config.num_experts = num_experts;
  result.config.top_k = top_k;
  return result;
}

std::vector<ModelShape> make_shapes() {
  std::vector<ModelShape> shapes = {shape("qwen3-30b-a3b", 2048, 768, 128, 8),
                                    shape("qwen3.6-35b-a3b", 2048, 512, 256, 8),
                                    shape("gpt-oss-20b", 2880, 2880, 32, 4),
                                    shape("mixtral-8x7b", 4096, 14336, 8, 2),
                                    shape("olmoe", 2048, 1024, 64, 8),
                                    shape("deepseek-v3", 7168, 2048, 256, 8),
                                    shape("tiny", 256, 128, 8, 2)};
  for (ModelShape& one : shapes) {
    if (one.name == "gpt-oss-20b") {
      one.config.activation.kind = Activation::swigluoai;
      one.config.gate_up_layout = GateUpLayout::interleaved;
      one.bias = true;
    } else if (one.name == "deepseek-v3") {
      one.ep_size = 8;  // as it is served: no single machine of this kind holds a whole layer
    }
  }
  return shapes;
}

}  // namespace

ExpertMap ModelShape::expert_map() const {
  return ep_size == 1 ? ExpertMap() : ExpertMap::linear(0, ep_size);
}

std::int64_t ModelShape::num_local_experts() const {
  // As ExpertMap::linear: the first ranks get one more.
  return (config.num_experts + ep_size - 1) / ep_size;
}

const std::vector<ModelShape>& model_shapes() {
  static const std::vector<ModelShape> shapes = make_shapes();
  return shapes;
}

ModelShape find_model(const std::string& name) {
  std::string known;
  for (const ModelShape& one : model_shapes()) {
    if (one.name == name) return one;
    known += (known.empty() ? "" : ", ") + one.name;
  }
  throw Error(ErrorCode::invalid_argument, "--model: expected one of " + known + ", got '" + name +
                                               "'; name one of these, or give --shape H,I,E,K");
}

ModelShape parse_shape(const std::string& text) {
  std::array<std::int64_t, 4> values{};
  const char* at = text.data();
  const char* const end = text.data() + text.size();
  bool good = true;
  for (std::size_t i = 0; i < values.size() && good; ++i) {
    const auto [next, error] = std::from_chars(at, end, values[i]);
    const bool last = i + 1 == values.size();
    good = error == std::errc() && values[i] > 0 && (last ? next == end : next != end);
    if (good && !last) {
      good = *next == ',';
      at = next + 1;
    }
  }
  if (!good) {
    throw Error(ErrorCode::invalid_argument,
                "--shape: expected hidden_size,intermediate_size,num_experts,top_k, four numbers "
                "above zero, got '" +
                    text + "'; write for example 2048,768,128,8");
  }
  return shape(text, values[0], values[1], values[2], values[3]);
}

}  // namespace fusedmoe::tool
