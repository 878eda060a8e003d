#include "torch_op/plan_record.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "fusedmoe/error.h"

namespace fusedmoe::torch_op {
namespace {

std::atomic<bool> g_forked{false};

struct Table {
  WriterFirstMutex mutex;
  std::unordered_map<std::int64_t, std::shared_ptr<PlanRecord>> records;
  std::int64_t last = 0;
};

Table* make_table() {
  static Table* made = new Table;  // never destroyed: calls may come while the process exits
  pthread_atfork(
      [] {
        made->mutex.lock();
        for (const auto& [number, record] : made->records) record->before_fork();
      },
      [] {
        for (const auto& [number, record] : made->records) record->after_fork_in_parent();
        made->mutex.unlock();
      },
      [] {
        for (const auto& [number, record] : made->records) record->after_fork_in_child();
        made->mutex.initialise();
        g_forked.store(true);
      });
  return made;
}

Table& table() {
  static Table* const kept = make_table();
  return *kept;
}

void point(WeightScales& scales, int part, const void* data) {
  switch (part) {
    case 0:
      scales.data = data;
      break;
    case 1:
      scales.zero_points = data;
      break;
    default:
      scales.global = static_cast<const float*>(data);
  }
}

// Makes the part of `weights` that has this role lie at `data`.
void point(ExpertWeights& weights, Role role, const void* data) {
  switch (role) {
    case Role::w13:
      weights.w13.data = data;
      break;
    case Role::w13_up:
      weights.w13_up.data = data;
      break;
    case Role::w2:
      weights.w2.data = data;
      break;
    case Role::w13_bias:
      weights.w13_bias.data = data;
      break;
    case Role::w2_bias:
      weights.w2_bias.data = data;
      break;
    case Role::w13_scales:
    case Role::w13_zero_points:
    case Role::w13_global_scales:
      point(weights.w13.scales, static_cast<int>(role) - static_cast<int>(Role::w13_scales), data);
      break;
    case Role::w13_up_scales:
    case Role::w13_up_zero_points:
    case Role::w13_up_global_scales:
      point(weights.w13_up.scales, static_cast<int>(role) - static_cast<int>(Role::w13_up_scales),
            data);
      break;
    case Role::w2_scales:
    case Role::w2_zero_points:
    case Role::w2_global_scales:
      point(weights.w2.scales, static_cast<int>(role) - static_cast<int>(Role::w2_scales), data);
      break;
    case Role::kept:
      break;
  }
}

}  // namespace

void WriterFirstMutex::initialise() {
  pthread_rwlockattr_t attributes;
  pthread_rwlockattr_init(&attributes);
  // Without recursion: no call takes the lock again while it holds it.
  pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
  pthread_rwlock_init(&lock_, &attributes);
  pthread_rwlockattr_destroy(&attributes);
}

bool in_forked_child() noexcept { return g_forked.load(std::memory_order_relaxed); }

std::int64_t add_record(std::shared_ptr<PlanRecord> record) {
  Table& all = table();
  const std::unique_lock lock(all.mutex);
  all.records.emplace(++all.last, std::move(record));
  return all.last;
}

void remove_record(std::int64_t number) {
  std::shared_ptr<PlanRecord> last;  // destroyed outside of the lock
  Table& all = table();
  const std::unique_lock lock(all.mutex);
  const auto found = all.records.find(number);
  if (found == all.records.end()) return;
  last = std::move(found->second);
  all.records.erase(found);
}

std::shared_ptr<PlanRecord> find_record(std::int64_t number) {
  Table& all = table();
  const std::shared_lock lock(all.mutex);
  const auto found = all.records.find(number);
  if (found != all.records.end()) return found->second;
  throw Error(ErrorCode::invalid_argument,
              "plan: expected the handle of a living plan, got " + std::to_string(number) +
                  "; keep the fusedmoe.torch.FusedMoe that it came from");
}

void PlanRecord::watch(const ExpertWeights& weights, std::vector<Tensor> tensors,
                       const std::vector<std::int64_t>& roles, Before before) {
  if (tensors.size() != roles.size()) {
    throw Error(ErrorCode::invalid_argument, "roles: expected one for each of " +
                                                 std::to_string(tensors.size()) + " tensors, got " +
                                                 std::to_string(roles.size()) + "; give as many");
  }
  std::vector<Role> new_roles;
  std::vector<Tensor> watched, kept;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto role = static_cast<Role>(roles[i]);
    if (role != Role::kept) new_roles.push_back(role);
    (role == Role::kept ? kept : watched).push_back(std::move(tensors[i]));
  }
  std::vector<Tensor> aliases = aliases_of(watched);
  const std::unique_lock lock(mutex_);
  // Before they are read: a change while they are read is a change not seen.
  std::vector<Fingerprint> prints;
  prints.reserve(watched.size());
  for (const Tensor& tensor : watched) prints.push_back(Fingerprint::of(tensor));
  if (before == Before::refresh) native_.plan->refresh(weights);
  if (before == Before::release) native_.plan->release_weights();
  weights_ = weights;
  weights_.owner = nullptr;  // the tensors are held here
  roles_ = std::move(new_roles);
  watched_.swap(watched);  // the old ones are destroyed after the lock is open again
  kept_.swap(kept);
  read_.swap(aliases);
  prints_ = std::move(prints);
}

std::vector<Tensor> PlanRecord::aliases_of(const std::vector<Tensor>& tensors) const {
  std::vector<Tensor> aliases;
  if (!contents_) return aliases;
  aliases.reserve(tensors.size());
  for (const Tensor& tensor : tensors) aliases.push_back(alias_of(tensor));
  return aliases;
}

void PlanRecord::reread() {
  std::vector<Tensor> dropped;
  const std::unique_lock lock(mutex_);
  if (watched_.empty()) {
    throw Error(ErrorCode::invalid_argument,
                "weights: expected tensors, got none, and the plan watches none; pass them");
  }
  dropped = refresh({});
}

bool PlanRecord::fresh(std::span<const Tensor> given) const {
  for (std::size_t i = 0; i < watched_.size(); ++i) {
    const Tensor& now = given.empty() ? watched_[i] : given[i];
    if (!prints_[i].fits(now, contents_)) return false;
  }
  return true;
}

std::shared_lock<WriterFirstMutex> PlanRecord::check(std::span<const Tensor> given) {
  for (;;) {
    std::shared_lock lock(mutex_);
    if (!given.empty() && given.size() != watched_.size()) {
      throw Error(
          ErrorCode::invalid_argument,
          "weights: expected the " + std::to_string(watched_.size()) +
              " tensors that the plan watches, got " + std::to_string(given.size()) +
              "; pass those of create in the order w13, w13_up, w2, w13_bias, w2_bias, then "
              "scales, zero points and global scales of each, and call refresh() after "
              "release_weights()");
    }
    if (fresh(given)) return lock;
    if (on_stale_ == StalePolicy::raise) {
      throw Error(ErrorCode::stale_weights,
                  "weights: expected the tensors that the plan was made from, unchanged, got "
                  "others or changed ones; call refresh(), or build the plan with "
                  "on_stale='refresh'");
    }
    lock.unlock();
    std::vector<Tensor> dropped;
    const std::unique_lock writer(mutex_);
    if (!fresh(given)) dropped = refresh(given);
    // Others may come before the next turn, with other tensors: look again.
  }
}

std::vector<Tensor> PlanRecord::refresh(std::span<const Tensor> given) {
  std::vector<Tensor> tensors = watched_;
  if (!given.empty()) tensors.assign(given.begin(), given.end());
  std::vector<Fingerprint> prints;
  ExpertWeights weights = weights_;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    prints.push_back(Fingerprint::of(tensors[i]));
    if (!prints[i].same_shape(prints_[i])) {
      throw Error(ErrorCode::stale_weights,
                  "weights: expected tensors of the shapes, dtypes and device that the plan was "
                  "made from, got others; build another plan for them");
    }
    point(weights, roles_[i], tensors[i].data_ptr());
  }
  native_.plan->refresh(weights);
  weights_ = std::move(weights);
  std::vector<Tensor> aliases = aliases_of(tensors);
  watched_.swap(tensors);
  read_.swap(aliases);
  prints_ = std::move(prints);
  std::move(aliases.begin(), aliases.end(), std::back_inserter(tensors));
  return tensors;
}

}  // namespace fusedmoe::torch_op
