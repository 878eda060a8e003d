// One peer of bench --compare: an adapter's process, spoken to in the protocol of
// bench/peers/README.md. Whatever goes wrong becomes the reason why it does not run.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "peer_process.h"
#include "shared_memory.h"

namespace fusedmoe::tool {

// What can be compared: programs in the folder of FUSEDMOE_PEERS_DIR, else in that of the source
// tree or of the installation. A name that starts with '_' or has a suffix other than .py is none.
struct Adapter {
  std::string name;  // "vllm_cpu"
  std::string path;
};
std::vector<Adapter> find_adapters();

class Peer {
 public:
  // Starts the adapter. Does not throw for a peer that is not installed: see reason().
  Peer(const Adapter& adapter, int threads);

  const std::string& name() const { return name_; }
  const std::string& version() const { return version_; }  // empty when it is not installed
  const std::string& about() const { return about_; }
  pid_t pid() const { return process_ ? process_->pid() : -1; }

  // Why it does not run the layer that was loaded last; empty when it does.
  const std::string& reason() const { return reason_; }
  bool runs() const { return reason_.empty(); }
  // It died or broke the protocol: no layer will run.
  bool failed() const { return failed_; }

  // "a8" when it rounds activations to eight bits, for the layer that was loaded last.
  const std::string& mode() const { return mode_; }

  // These do nothing unless runs(); what goes wrong becomes the reason.

  // One layer more, from the memory. shape and tensors: as in the protocol.
  void add_layer(const nlohmann::json& shape, const SharedMemory& memory,
                 const nlohmann::json& tensors);
  void forget(const SharedMemory& memory);
  void set_inputs(const nlohmann::json& inputs);
  // Leaves its output in the memory of set_inputs.
  void apply(std::int64_t layer, std::int64_t routing);
  // steps: [steps][layers] numbers of routings. Returns microseconds of each step; empty when
  // something went wrong.
  std::vector<double> time(const std::vector<std::vector<std::int64_t>>& steps);

  // The outputs are not ours, so its times say nothing: until the next layers.
  void reject(const std::string& why) { reason_ = why; }
  // Drops the layers; a peer that only refused them runs again.
  void clear();

 private:
  nlohmann::json ask(const nlohmann::json& request, double seconds);
  void fail(const std::string& why);

  std::string name_, version_, about_, reason_, mode_ = "a16";
  bool failed_ = false;
  std::unique_ptr<PeerProcess> process_;
};

// The interpreter of the adapters: FUSEDMOE_PEERS_PYTHON, else python3.
std::string peers_python();

}  // namespace fusedmoe::tool
