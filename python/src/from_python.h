// The dataclasses of fusedmoe/config.py as the structs of the library.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "array.h"
#include "fusedmoe/config.h"
#include "fusedmoe/expert_map.h"
#include "fusedmoe/routing.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::python {

// Keeps Python objects alive for C++, which may destroy it on any thread, without the GIL.
std::shared_ptr<const void> hold(std::vector<nb::object> objects);

// ExpertWeights as an object of Python: for fusedmoe.torch, which passes its address on.
struct NativeWeights {
  ExpertWeights weights = {};
};

struct OwnedOptions {
  PlanOptions options = {};
  std::shared_ptr<const void> storage_owner = {};
};

struct OwnedRouting {
  RoutingConfig config = {};
  std::vector<nb::object> owners = {};
};

// A counter that the owner of weights bumps.
struct WeightsVersion {
  std::atomic<std::uint64_t> value{0};
};

MoeConfig to_config(nb::handle config);
OwnedOptions to_options(nb::handle options);  // None = the defaults
// Takes an ExpertWeights, or the weights of a checkpoint's layer. `device`: the plan's.
// Owners of what the views show are in it.
ExpertWeights to_weights(nb::handle weights, const Device& device);
OwnedRouting to_routing(nb::handle config);
// A list of int32, from an ExpertMap, a sequence or an array.
std::vector<std::int32_t> to_map(const char* name, nb::handle map);

// The other way, for what the library tells of itself.
nb::object from_config(const MoeConfig& config);

}  // namespace fusedmoe::python
