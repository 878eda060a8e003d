#include "core/weights_state.h"

#include <pthread.h>

#include <string>

#include "core/workspace_use.h"
#include "fusedmoe/error.h"

namespace fusedmoe {
namespace {

constexpr std::uint64_t kReaders = (std::uint64_t{1} << 32) - 1;
constexpr std::uint64_t kClosed = std::uint64_t{1} << 32;
constexpr int kGenerationShift = 33;

std::atomic<std::uint64_t> g_generation{0};

void after_fork_in_child() noexcept {
  g_generation.fetch_add(1);
  WorkspaceUse::forget_all();
}

}  // namespace

std::uint64_t fork_generation() noexcept {
  static const int installed = pthread_atfork(nullptr, nullptr, &after_fork_in_child);
  (void)installed;
  return g_generation.load(std::memory_order_relaxed);
}

std::uint64_t ApplyGate::load_current() noexcept {
  const std::uint64_t generation = fork_generation() << kGenerationShift;
  std::uint64_t state = state_.load();
  while ((state >> kGenerationShift) << kGenerationShift != generation) {
    if (state_.compare_exchange_weak(state, generation)) return generation;
  }
  return state;
}

void ApplyGate::enter() noexcept {
  std::uint64_t state = load_current();
  for (;;) {
    if ((state & kClosed) != 0) {
      state_.wait(state);
      state = state_.load();
    } else if (state_.compare_exchange_weak(state, state + 1)) {
      return;
    }
  }
}

void ApplyGate::leave() noexcept {
  const std::uint64_t before = state_.fetch_sub(1);
  if ((before & kClosed) != 0 && (before & kReaders) == 1) state_.notify_all();
}

bool ApplyGate::close(RefreshWait wait) noexcept {
  std::uint64_t state = load_current();
  for (;;) {  // one refresh at a time
    if ((state & kClosed) != 0 || (wait == RefreshWait::no_wait && (state & kReaders) != 0)) {
      if (wait == RefreshWait::no_wait) return false;
      state_.wait(state);
      state = state_.load();
    } else if (state_.compare_exchange_weak(state, state | kClosed)) {
      break;
    }
  }
  for (state = state_.load(); (state & kReaders) != 0; state = state_.load()) state_.wait(state);
  return true;
}

void ApplyGate::open() noexcept {
  state_.fetch_and(~kClosed);
  state_.notify_all();
}

bool WeightsState::moved() const noexcept {
  return source_version_ != nullptr && source_version_->load(std::memory_order_acquire) != seen_;
}

WeightsState::Lease::Lease(WeightsState& state,
                           const std::function<void(const ExpertWeights&)>& write)
    : state_(state) {
  for (;;) {
    state.gate_.enter();
    const Status status = state.status_.load();
    const bool moved = state.moved();
    if (status == Status::fresh && !moved) return;
    const bool automatic =
        status == Status::fresh && moved && state.policy_ == StalePolicy::refresh;
    const std::uint64_t seen = state.seen_;
    const std::uint64_t now = moved ? state.source_version_->load() : seen;
    state.gate_.leave();
    if (automatic) {
      // Another thread may have been first: to refresh, or to release.
      state.update(
          RefreshWait::wait, nullptr, [&] { write(state.kept_); },
          [&] { return state.usable() && state.moved(); });
      continue;
    }
    if (status == Status::released) {
      throw Error(ErrorCode::stale_weights,
                  "weights: expected weights, got a plan whose weights were released; call "
                  "refresh(weights) first");
    }
    if (status != Status::fresh) {
      throw Error(ErrorCode::stale_weights,
                  "weights: expected complete weights, got a plan whose last refresh failed "
                  "midway; call refresh(weights) until it succeeds");
    }
    throw Error(ErrorCode::stale_weights,
                "weights: expected version " + std::to_string(seen) +
                    ", which the plan was made from, got version " + std::to_string(now) +
                    " at their owner; call refresh(weights), or build the plan with "
                    "on_stale = refresh");
  }
}

void WeightsState::update(RefreshWait wait, const ExpertWeights* kept,
                          const std::function<void()>& write, const std::function<bool()>& needed) {
  if (!gate_.close(wait)) {
    throw Error(ErrorCode::busy,
                "refresh: expected no running apply, got some; pass RefreshWait::wait, or call it "
                "between steps");
  }
  struct Open {
    ApplyGate& gate;
    ~Open() { gate.open(); }
  } open{gate_};
  if (needed && !needed()) return;
  const Status before = status_.load();
  if (kept != nullptr) {
    ExpertWeights copy;  // before anything changes: copying may throw
    if (policy_ == StalePolicy::refresh) {
      copy = *kept;
    } else {  // a source may hold what its owner wants freed
      copy.version = kept->version;
      copy.version_owner = kept->version_owner;
    }
    kept_ = std::move(copy);
    source_version_ = kept_.version;
  }
  // Read before the weights: a bump while they are read is a version not seen.
  const std::uint64_t seen =
      source_version_ != nullptr ? source_version_->load(std::memory_order_acquire) : 0;
  status_.store(before == Status::empty ? Status::empty : Status::failed);
  write();
  seen_ = seen;
  status_.store(Status::fresh);
  version_.fetch_add(1);
}

void WeightsState::release(RefreshWait wait, const std::function<void()>& drop) {
  if (!gate_.close(wait)) {
    throw Error(ErrorCode::busy,
                "release_weights: expected no running apply, got some; pass RefreshWait::wait, or "
                "call it between steps");
  }
  status_.store(Status::released);
  drop();
  kept_ = {};
  source_version_ = nullptr;
  gate_.open();
}

}  // namespace fusedmoe
