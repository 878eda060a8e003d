// What a config says of quantised weights: the layout of an expert's matrix and its numbers. Which
// matrices really have it is seen when the tensors are read (layer_reader.h).
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/config_reader.h"
#include "checkpoint/storage_layouts.h"

namespace fusedmoe::checkpoint {

struct QuantScheme {
  const StorageLayout* layout = nullptr;  // null = unquantised
  QuantNumbers numbers = {};
  // The config lists modules that stay unquantised, or quantises only some.
  bool lists_exceptions = false;
  std::vector<std::string> notes = {};  // what a user should know
};
bool operator==(const QuantScheme& a, const QuantScheme& b);

// quantization_config or compression_config of a config.json; unquantised when there is neither.
// Throws Error{io} for keys that are missing, wrong or contradict each other, Error{unsupported}
// for a method that is not read.
QuantScheme read_quant_scheme(const ConfigReader& config);

// hf_quant_config.json, which ModelOpt writes beside config.json. `scheme`: what config.json says;
// the two must agree. Throws as above.
void merge_modelopt_file(const std::filesystem::path& file, QuantScheme& scheme);

// One of the weights of config_groups and its format: quant_config.cpp's part for
// compressed-tensors, in compressed_tensors_config.cpp.
QuantScheme read_compressed_tensors(const ConfigReader& config);

}  // namespace fusedmoe::checkpoint
