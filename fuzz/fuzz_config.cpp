// libFuzzer target: any text as config.json. Either refused with an Error, or every layer has
// sizes that a plan may be built from.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "checkpoint/model_config.h"
#include "fusedmoe/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace fusedmoe::checkpoint;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const ModelConfig model = parse_model_config(text, "config.json");
    if (model.family == nullptr || model.layers.empty()) std::abort();
    for (const LayerConfig& layer : model.layers) {
      const fusedmoe::MoeConfig& moe = layer.moe;
      const bool sound = layer.layer >= 0 && layer.layer < model.num_layers && moe.top_k > 0 &&
                         moe.hidden_size > 0 && moe.intermediate_size > 0 &&
                         moe.num_experts >= moe.top_k;
      if (!sound || model.find(layer.layer) != &layer) std::abort();
    }
  } catch (const fusedmoe::Error&) {
  }
  return 0;
}
