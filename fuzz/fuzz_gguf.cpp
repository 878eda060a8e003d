// libFuzzer target: any bytes as a GGUF file. Either refused with an Error, or every tensor lies
// inside the bytes; and where the metadata describes a model, its layers are refused or every
// expert can be read.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

#include "checkpoint/gguf.h"
#include "checkpoint/gguf_config.h"
#include "fusedmoe/error.h"
#include "read_all.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace fusedmoe::checkpoint;
  const auto bytes = std::as_bytes(std::span(data, size));
  try {
    const auto file = std::make_shared<GgufFile>(bytes, "fuzz.gguf");
    for (const Tensor& tensor : file->tensors()) {
      const std::ptrdiff_t begin = tensor.data - bytes.data();
      const bool inside = tensor.bytes >= 0 && begin >= 0 &&
                          begin + tensor.bytes <= static_cast<std::ptrdiff_t>(size) &&
                          (tensor.bytes == 0 || begin == tensor.offset);
      if (!inside) std::abort();
    }
    const ModelConfig model = read_gguf_config(*file);
    ProblemList problems;
    for (const MoeLayer& layer : read_layers(model, file, problems)) read_layer(layer);
  } catch (const fusedmoe::Error&) {
  }
  return 0;
}
