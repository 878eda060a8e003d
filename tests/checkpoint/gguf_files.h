// GGUF files that the tests write, sound ones and others.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "test_files.h"

namespace fusedmoe::checkpoint {

template <typename T>
std::string raw(T value) {
  return bytes_of<T>({value});
}
inline std::string gguf_string(const std::string& text) {
  return raw<std::uint64_t>(text.size()) + text;
}

// Numbers of value types and of tensor types in a file.
enum GgufValueType : std::uint32_t { kU32 = 4, kF32 = 6, kBool = 7, kText = 8, kArray = 9 };
enum GgmlType : std::uint32_t {
  kGgmlF32 = 0,
  kGgmlF16 = 1,
  kGgmlQ4_0 = 2,
  kGgmlQ8_0 = 8,
  kGgmlQ2K = 10,
  kGgmlQ4K = 12,
  kGgmlQ5K = 13,
  kGgmlBf16 = 30,
  kGgmlMxfp4 = 39,
  kGgmlNvfp4 = 40
};

// A pair of the metadata.
inline std::string pair_u32(const std::string& key, std::uint32_t value) {
  return gguf_string(key) + raw<std::uint32_t>(kU32) + raw(value);
}
inline std::string pair_f32(const std::string& key, float value) {
  return gguf_string(key) + raw<std::uint32_t>(kF32) + raw(value);
}
inline std::string pair_bool(const std::string& key, bool value) {
  return gguf_string(key) + raw<std::uint32_t>(kBool) + raw<std::uint8_t>(value ? 1 : 0);
}
inline std::string pair_text(const std::string& key, const std::string& value) {
  return gguf_string(key) + raw<std::uint32_t>(kText) + gguf_string(value);
}

struct GgufTensor {
  std::string name;
  std::vector<std::int64_t> shape;  // outermost first; the file has it the other way round
  std::uint32_t type = kGgmlF32;
  std::string data;
};

struct GgufText {
  std::uint32_t version = 3;
  std::uint64_t alignment = 32;
  std::vector<std::string> pairs = {};
  std::vector<GgufTensor> tensors = {};

  std::string text() const {
    std::string out = "GGUF" + raw(version) + raw<std::uint64_t>(tensors.size()) +
                      raw<std::uint64_t>(pairs.size());
    for (const std::string& pair : pairs) out += pair;
    std::string data;
    for (const GgufTensor& tensor : tensors) {
      data.resize((data.size() + alignment - 1) / alignment * alignment);
      out += gguf_string(tensor.name) + raw(static_cast<std::uint32_t>(tensor.shape.size()));
      for (auto size = tensor.shape.rbegin(); size != tensor.shape.rend(); ++size) {
        out += raw<std::uint64_t>(*size);
      }
      out += raw(tensor.type) + raw<std::uint64_t>(data.size());
      data += tensor.data;
    }
    out.resize((out.size() + alignment - 1) / alignment * alignment);
    return out + data;
  }
};

inline std::string f32_data(const std::vector<float>& values) { return bytes_of(values); }

}  // namespace fusedmoe::checkpoint
