// libFuzzer target: a config.json and a list of tensors as a quantised checkpoint. Either refused
// with an Error, or every expert can be read. The input is text: the config, a line "---", and a
// line for each tensor, "name dtype size,size fill", where fill is a byte for all of its bytes, or
// "gN" for 32-bit k / N, or "sN,K" for two numbers of 64 bits.
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/model_config.h"
#include "fusedmoe/error.h"
#include "read_all.h"

namespace {

using namespace fusedmoe::checkpoint;

constexpr std::int64_t kMaxBytes = 1 << 20;

std::vector<std::int64_t> numbers(std::string_view text) {
  std::vector<std::int64_t> result;
  while (!text.empty()) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || value < 0) return {};
    result.push_back(value);
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    if (!text.empty()) text.remove_prefix(1);
  }
  return result;
}

// Tensors in memory of their own, so that a byte too far is seen.
class ListedSource final : public TensorSource {
 public:
  explicit ListedSource(const std::string& lines) {
    std::istringstream stream(lines);
    for (std::string line; std::getline(stream, line);) add(line);
  }

  const std::string& location() const noexcept override { return location_; }
  std::vector<std::string_view> names() const override {
    std::vector<std::string_view> result;
    for (const auto& [name, tensor] : tensors_) result.emplace_back(name);
    return result;
  }
  const Tensor* find(std::string_view name) override {
    const auto found = tensors_.find(std::string(name));
    return found == tensors_.end() ? nullptr : &found->second;
  }

 private:
  void add(const std::string& line) {
    std::istringstream words(line);
    std::string name, type, shape, fill;
    words >> name >> type >> shape >> fill;
    const auto known = parse_tensor_type(type);
    if (!known || name.empty()) return;
    Tensor tensor{.name = name,
                  .type = *known,
                  .shape = shape == "-" ? std::vector<std::int64_t>() : numbers(shape)};
    std::int64_t bits = bits_per_element(*known);
    for (const std::int64_t size : tensor.shape) {
      if (__builtin_mul_overflow(bits, size, &bits)) return;
    }
    tensor.bytes = bits / 8;
    if (bits % 8 != 0 || tensor.bytes > kMaxBytes - total_) return;
    total_ += tensor.bytes;
    memory_.push_back(std::make_unique<std::byte[]>(static_cast<std::size_t>(tensor.bytes)));
    std::byte* const data = memory_.back().get();
    write(data, tensor.bytes, fill);
    tensor.data = data;
    tensor.file = location_;
    tensors_.emplace(name, std::move(tensor));
  }

  static void write(std::byte* data, std::int64_t bytes, const std::string& fill) {
    const std::vector<std::int64_t> values =
        fill.empty() ? std::vector<std::int64_t>() : numbers(std::string_view(fill).substr(1));
    if (fill.starts_with("g") && values.size() == 1 && values[0] > 0) {
      for (std::int64_t i = 0; 4 * i + 4 <= bytes; ++i) {
        const auto index = static_cast<std::int32_t>(i / values[0]);
        std::memcpy(data + 4 * i, &index, 4);
      }
    } else if (fill.starts_with("s")) {
      const auto count =
          std::min<std::int64_t>(bytes, 8 * static_cast<std::int64_t>(values.size()));
      if (count > 0) std::memcpy(data, values.data(), static_cast<std::size_t>(count));
    } else if (bytes > 0) {
      const std::vector<std::int64_t> byte = numbers(fill);
      std::memset(data, byte.empty() ? 0x3c : static_cast<int>(byte[0] & 255),
                  static_cast<std::size_t>(bytes));
    }
  }

  std::string location_ = "fuzz.safetensors";
  std::map<std::string, Tensor> tensors_;
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  std::int64_t total_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const std::size_t end = text.find("\n---\n");
  if (end == std::string::npos) return 0;
  try {
    const ModelConfig model = parse_model_config(text.substr(0, end), "config.json");
    const auto source = std::make_shared<ListedSource>(text.substr(end + 5));
    ProblemList problems;
    for (const MoeLayer& layer : read_layers(model, source, problems)) read_layer(layer);
  } catch (const fusedmoe::Error&) {
  }
  return 0;
}
