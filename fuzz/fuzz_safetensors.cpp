// libFuzzer target: any bytes as a safetensors file. Either refused with an Error, or every tensor
// lies inside the bytes.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "checkpoint/safetensors.h"
#include "fusedmoe/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace fusedmoe::checkpoint;
  const auto bytes = std::as_bytes(std::span(data, size));
  try {
    const SafetensorsContent content = parse_safetensors(bytes, "fuzz.safetensors");
    for (const Tensor& tensor : content.tensors) {
      const std::ptrdiff_t begin = tensor.data - bytes.data();
      const bool inside = begin == tensor.offset && begin >= 0 && tensor.bytes >= 0 &&
                          begin + tensor.bytes <= static_cast<std::ptrdiff_t>(size);
      if (!inside) std::abort();
      // Let the sanitizer see both ends.
      if (tensor.bytes > 0) {
        volatile std::byte ends = tensor.data[0] ^ tensor.data[tensor.bytes - 1];
        static_cast<void>(ends);
      }
    }
  } catch (const fusedmoe::Error&) {
  }
  return 0;
}
