// Small quantised checkpoints that the tests write: one layer of qwen3_moe.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "formats/format.h"
#include "test_files.h"

namespace fusedmoe::checkpoint {

struct Sizes {
  std::int64_t hidden = 64;
  std::int64_t intermediate = 32;
  std::int64_t experts = 2;
};

inline const std::string kQwenBlock = "model.layers.0.mlp.";

inline std::string qwen_config(const Sizes& sizes, const std::string& quantization) {
  return R"({"model_type":"qwen3_moe","hidden_size":)" + std::to_string(sizes.hidden) +
         R"(,"moe_intermediate_size":)" + std::to_string(sizes.intermediate) +
         R"(,"num_experts":)" + std::to_string(sizes.experts) +
         R"(,"num_experts_per_tok":1,"num_hidden_layers":1,"norm_topk_prob":true,
              "hidden_act":"silu","dtype":"bfloat16")" +
         (quantization.empty() ? "" : ",\"quantization_config\":" + quantization) + "}";
}

// The tensors of one matrix [n, k]; their names begin with `stem`.
using MatrixWriter =
    std::function<std::vector<NewTensor>(const std::string& stem, std::int64_t n, std::int64_t k)>;

inline std::vector<NewTensor> qwen_tensors(const Sizes& sizes, const MatrixWriter& write) {
  std::vector<NewTensor> tensors = {{kQwenBlock + "gate.weight", {sizes.experts, sizes.hidden}}};
  for (std::int64_t e = 0; e < sizes.experts; ++e) {
    const std::string stem = kQwenBlock + "experts." + std::to_string(e) + ".";
    for (const auto& [name, n, k] : {std::tuple{"gate_proj", sizes.intermediate, sizes.hidden},
                                     std::tuple{"up_proj", sizes.intermediate, sizes.hidden},
                                     std::tuple{"down_proj", sizes.hidden, sizes.intermediate}}) {
      for (NewTensor& tensor : write(stem + name, n, k)) tensors.push_back(std::move(tensor));
    }
  }
  return tensors;
}

inline NewTensor& tensor_named(std::vector<NewTensor>& tensors, const std::string& ending) {
  for (NewTensor& tensor : tensors) {
    if (tensor.name.ends_with(ending)) return tensor;
  }
  ADD_FAILURE() << "no tensor " << ending;
  return tensors.front();
}

inline void remove_tensor(std::vector<NewTensor>& tensors, const std::string& ending) {
  const NewTensor& tensor = tensor_named(tensors, ending);
  tensors.erase(tensors.begin() + (&tensor - tensors.data()));
}

// The checkpoint in a folder of its own.
class QuantisedFiles {
 public:
  QuantisedFiles(const std::string& config, const std::vector<NewTensor>& tensors) {
    folder_.write("config.json", config);
    folder_.write("model.safetensors", make_safetensors(tensors));
  }
  const std::filesystem::path& path() const { return folder_.path(); }
  const TempFolder& folder() const { return folder_; }
  Checkpoint open() const { return Checkpoint::open(path()); }

  void expect_refused(ErrorCode code, const std::vector<std::string>& parts) const {
    expect_error(code, parts, [&] { open(); });
    EXPECT_FALSE(inspect_checkpoint(path()).problems.empty());
  }

 private:
  TempFolder folder_;
};

inline double value_at(const WeightTensor& tensor, std::int64_t n, std::int64_t k,
                       std::int64_t expert = 0) {
  return format_info(tensor.format).decode(tensor, expert, n, k);
}

// fp8 codes without NaN.
inline std::string fp8_bytes(std::int64_t count, std::uint32_t seed) {
  std::string bytes = random_bytes(count, seed);
  for (char& byte : bytes) byte = static_cast<char>(byte & 0xbf);  // below 2
  return bytes;
}

inline std::string f32_bytes(std::int64_t count, float first, float step) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i) values.push_back(first + step * static_cast<float>(i));
  return bytes_of(values);
}

}  // namespace fusedmoe::checkpoint
