// Whether a plan's weights are usable and who is using them: the gate between apply and refresh,
// and the version that the plan has seen.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "fusedmoe/fused_moe.h"
#include "fusedmoe/weights.h"

namespace fusedmoe {

// Many applies or one refresh. Nothing is allocated; a fork in mid-call leaves the child's gate
// open.
class ApplyGate {
 public:
  void enter() noexcept;  // waits for a running refresh
  void leave() noexcept;
  // Closes the gate and waits for running applies; false when they run and `wait` is no_wait.
  bool close(RefreshWait wait) noexcept;
  void open() noexcept;

 private:
  // Bits 0..31: running applies; bit 32: closed; bits 33..63: the fork generation of the process.
  // A state of another generation counts as open and empty: its threads did not survive the fork.
  std::uint64_t load_current() noexcept;
  std::atomic<std::uint64_t> state_{0};
};

class WeightsState {
 public:
  // `policy` and the views are kept for refreshes that apply starts itself.
  explicit WeightsState(StalePolicy policy) : policy_(policy) {}

  // Around apply. Throws stale_weights; refreshes first where the policy says so.
  class Lease {
   public:
    Lease(WeightsState& state, const std::function<void(const ExpertWeights&)>& write);
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease() { state_.gate_.leave(); }

   private:
    WeightsState& state_;
  };

  // Runs `write` while no apply runs; the plan is stale from its start until its success. `kept`
  // is what a later automatic refresh reads again; null keeps what was there. `needed` is asked
  // first, with no apply running: when it says no or throws, nothing happens.
  void update(RefreshWait wait, const ExpertWeights* kept, const std::function<void()>& write,
              const std::function<bool()>& needed = nullptr);
  // Runs `drop` while no apply runs; afterwards apply throws until update succeeds.
  void release(RefreshWait wait, const std::function<void()>& drop);
  // For updates of some experts: the others must be there and sound.
  bool usable() const noexcept { return status_.load() == Status::fresh; }
  std::uint64_t version() const noexcept { return version_.load(); }

 private:
  enum class Status : std::uint8_t { empty, fresh, failed, released };
  bool moved() const noexcept;

  StalePolicy policy_;
  ApplyGate gate_;
  std::atomic<Status> status_{Status::empty};
  std::atomic<std::uint64_t> version_{0};
  // Written while the gate is closed, read inside it.
  ExpertWeights kept_;
  const std::atomic<std::uint64_t>* source_version_ = nullptr;
  std::uint64_t seen_ = 0;
};

// Counts forks: the generation of this process. Installs the handlers on first use.
std::uint64_t fork_generation() noexcept;

}  // namespace fusedmoe
