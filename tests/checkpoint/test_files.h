// What the checkpoint tests write to disk: temporary folders, safetensors files. GGUF files are in
// gguf_files.h.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/text.h"
#include "fusedmoe/error.h"

namespace fusedmoe::checkpoint {

inline const std::filesystem::path kGolden = FUSEDMOE_GOLDEN_DIR;

class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "fusedmoe-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path write(const std::string& name, const std::string& content) const {
    std::ofstream(path_ / name, std::ios::binary) << content;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

// Length, header, data.
inline std::string safetensors_text(const std::string& header, const std::string& data) {
  const std::uint64_t length = header.size();
  std::string text(sizeof length, '\0');
  std::memcpy(text.data(), &length, sizeof length);
  return text + header + data;
}

struct NewTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  std::string type = "BF16";
  std::string data = {};  // empty: bytes that count up
};

inline std::int64_t elements(const NewTensor& tensor) {
  std::int64_t product = 1;
  for (const std::int64_t size : tensor.shape) product *= size;
  return product;
}

inline std::int64_t element_bytes(const std::string& type) {
  if (type == "F64" || type == "I64") return 8;
  if (type == "F32" || type == "I32") return 4;
  return type == "BF16" || type == "F16" ? 2 : 1;
}

// The bytes of some values.
template <typename T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// Bytes without order, the same for the same seed.
inline std::string random_bytes(std::int64_t count, std::uint32_t seed) {
  std::string bytes;
  std::uint32_t state = seed * 2654435761U + 1;
  for (std::int64_t i = 0; i < count; ++i) {
    state = state * 1664525U + 1013904223U;
    bytes += static_cast<char>(state >> 24U);
  }
  return bytes;
}

// Bytes count up from a start that differs from tensor to tensor.
inline std::string make_safetensors(const std::vector<NewTensor>& tensors) {
  std::string header = "{\"__metadata__\":{\"format\":\"pt\"}";
  std::string data;
  for (const NewTensor& tensor : tensors) {
    const auto begin = data.size();
    const std::int64_t bytes = elements(tensor) * element_bytes(tensor.type);
    const auto start = static_cast<unsigned>(std::hash<std::string>()(tensor.name));
    if (!tensor.data.empty()) {
      EXPECT_EQ(static_cast<std::int64_t>(tensor.data.size()), bytes) << tensor.name;
      data += tensor.data;
    } else {
      for (std::int64_t i = 0; i < bytes; ++i) {
        data += static_cast<char>(start + static_cast<unsigned>(i));
      }
    }
    header += ",\"" + tensor.name + "\":{\"dtype\":\"" + tensor.type +
              "\",\"shape\":" + shape_text(tensor.shape) + ",\"data_offsets\":[" +
              std::to_string(begin) + "," + std::to_string(data.size()) + "]}";
  }
  return safetensors_text(header + "}", data);
}

// Calls `body`, which must throw Error with that code and each of `parts` in its message.
template <typename Body>
void expect_error(ErrorCode code, const std::vector<std::string>& parts, Body&& body) {
  try {
    body();
    ADD_FAILURE() << "nothing was thrown; expected: " << (parts.empty() ? "" : parts.front());
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << error.what();
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << "'" << part << "' is not in: " << error.what();
    }
  }
}

}  // namespace fusedmoe::checkpoint
