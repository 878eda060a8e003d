// The peers of bench --compare: other implementations of the layer that run beside ours on the same
// weights, tokens and routing. One of them is in peer.h; when each runs is in bench_turns.h.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench_inputs.h"
#include "bench_layers.h"
#include "peer.h"
#include "shared_memory.h"

namespace fusedmoe::tool {

class Peers {
 public:
  // names: those that are asked for; none = all that there are. Throws invalid_argument for a name
  // that is none, and DeviceNotAvailable for one that is not installed.
  Peers(const std::vector<std::string>& names, int threads);

  std::vector<Peer>& all() { return peers_; }
  // Those that may run layers: what memory must hold beside ours.
  std::int64_t count() const;
  // One that was asked for by name died or broke the protocol.
  bool lost_a_named_one() const;

  // Gives every peer the weights that build_layers() gave to ours.
  void load(const BenchSetup& setup, std::int64_t num_layers);
  // Before the steps of these inputs.
  void set_inputs(const BenchSetup& setup, const BenchInputs& inputs);
  // [num_tokens, hidden_size] in the output's dtype, after Peer::apply.
  std::byte* output() const { return inputs_.data() + output_offset_; }

 private:
  bool named_;
  SharedMemory weights_;
  SharedMemory inputs_;
  std::size_t output_offset_ = 0;
  std::vector<Peer> peers_;  // after the memory: processes are started when it is there
};

// name and version of those that ran, name and reason of the others.
nlohmann::ordered_json describe(const std::vector<Peer>& peers);

}  // namespace fusedmoe::tool
