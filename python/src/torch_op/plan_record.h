// What an operator's `plan` number stands for: a plan, and the tensors that it was made from, which
// are held and watched.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <span>
#include <utility>
#include <vector>

#include "fusedmoe/fused_moe.h"
#include "native_plan.h"
#include "torch_op/tensor_view.h"

namespace fusedmoe::torch_op {

// Which tensor of ExpertWeights a watched one is; fusedmoe/torch.py counts the same way.
enum class Role : std::int64_t {
  w13 = 0,
  w13_up,
  w2,
  w13_bias,
  w2_bias,
  w13_scales,
  w13_zero_points,
  w13_global_scales,
  w13_up_scales,
  w13_up_zero_points,
  w13_up_global_scales,
  w2_scales,
  w2_zero_points,
  w2_global_scales,
  kept
};

// What watch() does before it watches.
enum class Before : std::int64_t { nothing = 0, refresh, release };

// A std::shared_mutex prefers readers: calls that follow each other could hold a refresh back for
// seconds. Here a waiting writer goes first.
class WriterFirstMutex {
 public:
  WriterFirstMutex() { initialise(); }
  WriterFirstMutex(const WriterFirstMutex&) = delete;
  WriterFirstMutex& operator=(const WriterFirstMutex&) = delete;
  ~WriterFirstMutex() { pthread_rwlock_destroy(&lock_); }

  void lock() { pthread_rwlock_wrlock(&lock_); }
  void unlock() { pthread_rwlock_unlock(&lock_); }
  void lock_shared() { pthread_rwlock_rdlock(&lock_); }
  void unlock_shared() { pthread_rwlock_unlock(&lock_); }
  void initialise();  // also in a forked child, whose other threads did not survive

 private:
  pthread_rwlock_t lock_;
};

class PlanRecord {
 public:
  // `contents`: whether in-place changes matter (packed weights), or only where they lie
  // (borrowed).
  PlanRecord(python::NativePlan native, StalePolicy on_stale, bool contents)
      : native_(std::move(native)), on_stale_(on_stale), contents_(contents) {}

  const FusedMoe& plan() const noexcept { return *native_.plan; }

  // From now on holds and watches these instead: tensors[i] is roles[i] of `weights`, which the
  // plan has read; those of Role::kept are held only. Before::refresh: the plan reads them first;
  // Before::release: it gives its packed weights back, in one step with the change of the watch.
  void watch(const ExpertWeights& weights, std::vector<Tensor> tensors,
             const std::vector<std::int64_t>& roles, Before before);

  // The plan reads the watched tensors again, whether they have changed or not.
  void reread();

  // Compares what the plan has read with the watched tensors as they are now or, when `given` is
  // not empty, with those, in the order of watch(). On a difference throws stale_weights, or
  // refreshes, as the policy says. As long as the lock that it returns is held, nobody else makes
  // the plan read other tensors. Safe from any thread.
  [[nodiscard]] std::shared_lock<WriterFirstMutex> check(std::span<const Tensor> given);

  // Around a fork: no refresh is halfway, and the child's lock is open.
  void before_fork() { mutex_.lock_shared(); }
  void after_fork_in_parent() { mutex_.unlock_shared(); }
  void after_fork_in_child() { mutex_.initialise(); }

 private:
  bool fresh(std::span<const Tensor> given) const;
  // Returns what is no longer held, to be destroyed when the lock is open: that may wait for
  // Python's lock, which a fork holds while it waits for this one.
  [[nodiscard]] std::vector<Tensor> refresh(std::span<const Tensor> given);
  std::vector<Tensor> aliases_of(const std::vector<Tensor>& tensors) const;

  const python::NativePlan native_;
  WriterFirstMutex mutex_;  // readers are calls, writers what changes the members below
  const StalePolicy on_stale_;
  const bool contents_;
  ExpertWeights weights_ = {};  // shapes and layouts, and addresses as of the last refresh
  std::vector<Role> roles_ = {};
  std::vector<Tensor> watched_ = {};
  std::vector<Fingerprint> prints_ = {};
  // Aliases of what was read into a packed copy: until the next refresh its memory is nobody
  // else's, so that an address that is equal is the same memory. Borrowed weights have no copy.
  std::vector<Tensor> read_ = {};
  std::vector<Tensor> kept_ = {};
};

// Numbers of living records, from 1 on; a number is never used twice.
std::int64_t add_record(std::shared_ptr<PlanRecord> record);
void remove_record(std::int64_t number);
// Whether this process was forked from one that had records.
bool in_forked_child() noexcept;
// Throws Error{invalid_argument} for a number that names none.
std::shared_ptr<PlanRecord> find_record(std::int64_t number);

}  // namespace fusedmoe::torch_op
