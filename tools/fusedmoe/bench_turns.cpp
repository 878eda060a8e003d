#include "bench_turns.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "formats/float_bits.h"

namespace fusedmoe::tool {
namespace {

// Waking the threads costs about 50 us, once a turn; the first apply of a turn is not timed.
constexpr double kTurnSeconds = 0.02;
constexpr std::int64_t kMostStepsPerTurn = 100;
// bf16 and f16 round the output and what lies between the GEMMs at places of their own: kernels
// that agree differ by 2e-3 to 5e-3. fp32 kernels differ by their order of sums.
constexpr double kTolerance = 2e-2;
constexpr double kToleranceF32 = 1e-3;
// Activations in steps of a 127th of the largest, rounded twice: 1e-2 to 2e-2, and where ours and
// theirs are, both.
constexpr double kToleranceA8 = 5e-2;

float value_at(const std::byte* data, std::int64_t index, DType dtype) {
  if (dtype == DType::f32) {
    float value = 0;
    std::memcpy(&value, data + index * 4, 4);
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, data + index * 2, 2);
  return dtype == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

}  // namespace

double relative_l2(const std::byte* other, const std::byte* ours, std::int64_t count, DType dtype) {
  double difference = 0;
  double norm = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const double expected = value_at(ours, i, dtype);
    const double got = value_at(other, i, dtype);
    if (!std::isfinite(got)) return std::numeric_limits<double>::infinity();
    difference += (got - expected) * (got - expected);
    norm += expected * expected;
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

PeerTurns::PeerTurns(Peers* peers, const BenchSetup& setup, const BenchInputs& inputs,
                     std::int64_t num_layers)
    : peers_(peers), setup_(setup), inputs_(inputs), num_layers_(num_layers) {
  if (peers_ == nullptr) return;
  peers_->set_inputs(setup, inputs);
  for (const Peer& peer : peers_->all()) {
    results_.push_back({.name = peer.name(),
                        .version = peer.version(),
                        .mode = peer.mode(),
                        .reason = {},
                        .time_us = {}});
  }
  times_.resize(results_.size());
}

std::vector<pid_t> PeerTurns::processes() const {
  std::vector<pid_t> ids;
  if (peers_ == nullptr) return ids;
  for (const Peer& peer : peers_->all()) {
    if (peer.pid() > 0) ids.push_back(peer.pid());
  }
  return ids;
}

void PeerTurns::check(const std::function<const std::byte*(std::int64_t layer)>& ours) {
  const MoeConfig& config = setup_.shape.config;
  const DType dtype = config.output_dtype.value_or(config.dtype);
  const auto tolerance = [&](const Peer& one) {
    if (one.mode() == "a8" || setup_.options.mode == ComputeMode::a8) return kToleranceA8;
    return dtype == DType::f32 ? kToleranceF32 : kTolerance;
  };
  const std::int64_t count = inputs_.hidden().rows * config.hidden_size;
  if (empty()) return;
  for (std::int64_t layer = 0; layer < num_layers_; ++layer) {
    const std::byte* expected = ours(layer);
    for (std::size_t i = 0; i < results_.size(); ++i) {
      // What the peer before left there would pass for this one's.
      std::memset(peers_->output(), 0xff,
                  static_cast<std::size_t>(count * bytes_per_element(dtype)));
      peer(i).apply(layer, inputs_.routing_index(0, layer));
      if (!peer(i).runs()) continue;
      const double error = relative_l2(peers_->output(), expected, count, dtype);
      results_[i].rel_l2 = std::max(results_[i].rel_l2, error);
    }
  }
  for (std::size_t i = 0; i < results_.size(); ++i) {
    if (!peer(i).runs() || results_[i].rel_l2 <= tolerance(peer(i))) continue;
    peer(i).reject(fmt::format("its output does not match ours: relative L2 {:.2g}, above {:.2g}",
                               results_[i].rel_l2, tolerance(peer(i))));
  }
}

std::int64_t PeerTurns::steps_per_turn(double seconds) const {
  if (empty()) return 1;
  const double steps = std::ceil(kTurnSeconds / std::max(seconds, 1e-9));
  return static_cast<std::int64_t>(std::clamp(steps, 1.0, static_cast<double>(kMostStepsPerTurn)));
}

void PeerTurns::park_peers() {
  for (std::size_t i = 0; i < results_.size(); ++i) {
    if (peer(i).pid() > 0) results_[i].parked &= wait_until_asleep(peer(i).pid());
  }
}

void PeerTurns::run(std::int64_t first, std::int64_t count) {
  std::vector<std::vector<std::int64_t>> steps(static_cast<std::size_t>(count));
  for (std::int64_t s = 0; s < count; ++s) {
    for (std::int64_t layer = 0; layer < num_layers_; ++layer) {
      steps[static_cast<std::size_t>(s)].push_back(inputs_.routing_index(first + s, layer));
    }
  }
  for (std::size_t i = 0; i < results_.size(); ++i) {
    if (!peer(i).runs()) continue;
    park_peers();
    results_[i].parked &= wait_until_asleep(getpid());
    for (const double time : peer(i).time(steps)) {
      times_[i].push_back(time / static_cast<double>(num_layers_));
    }
  }
}

std::vector<PeerResult> PeerTurns::results() {
  for (std::size_t i = 0; i < results_.size(); ++i) {
    results_[i].reason = peer(i).reason();
    if (peer(i).runs() && times_[i].empty()) results_[i].reason = "no step was timed";
    if (results_[i].reason.empty()) results_[i].time_us = spread_of(std::move(times_[i]));
  }
  return results_;
}

}  // namespace fusedmoe::tool
