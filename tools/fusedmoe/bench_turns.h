// The peers' part in the steps of bench: outputs are compared once, then everyone takes turns, and
// whoever's turn it is has the machine alone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench_floor.h"
#include "bench_peers.h"

namespace fusedmoe::tool {

struct PeerResult {
  std::string name;
  std::string version;
  std::string mode;
  std::string reason;  // why it was not timed; empty when it was
  double rel_l2 = -1;  // |its output - ours| / |ours|, worst layer; below 0: not compared
  Spread time_us;      // per layer, as ModeResult's
  bool parked = true;  // its threads slept before ours were timed, and the other way round
};

// |other - ours| / |ours| of count elements. Infinite when an element of other is no number.
double relative_l2(const std::byte* other, const std::byte* ours, std::int64_t count, DType dtype);

class PeerTurns {
 public:
  // peers may be null: then there is nobody, and nothing below does anything.
  PeerTurns(Peers* peers, const BenchSetup& setup, const BenchInputs& inputs,
            std::int64_t num_layers);

  bool empty() const { return results_.empty(); }
  std::vector<pid_t> processes() const;

  // Rejects peers whose output differs. ours(layer): the output of the layer at step 0.
  void check(const std::function<const std::byte*(std::int64_t layer)>& ours);
  // How many steps a turn takes, given the seconds of one of ours: enough for a few milliseconds,
  // so that waking up is a small part.
  std::int64_t steps_per_turn(double seconds) const;
  // Before a turn of ours: waits until the peers' threads sleep.
  void park_peers();
  // A turn of each peer: steps [first, first + count).
  void run(std::int64_t first, std::int64_t count);

  std::vector<PeerResult> results();

 private:
  Peer& peer(std::size_t i) { return peers_->all()[i]; }

  Peers* peers_;
  const BenchSetup& setup_;
  const BenchInputs& inputs_;
  std::int64_t num_layers_;
  std::vector<PeerResult> results_;
  std::vector<std::vector<double>> times_;
};

}  // namespace fusedmoe::tool
