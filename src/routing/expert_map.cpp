// ExpertMap: which experts of a model are on this rank.
#include "fusedmoe/expert_map.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>
#include <utility>

#include "fusedmoe/error.h"

namespace fusedmoe {
namespace {

using std::to_string;

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::invalid_argument, message);
}

void check_rank(int rank, int size) {
  if (size <= 0) {
    refuse("expert_map: expected size > 0, got size=" + to_string(size) +
           "; it is the number of ranks");
  }
  if (rank < 0 || rank >= size) {
    refuse("expert_map: expected rank in 0.." + to_string(size - 1) + " of size=" +
           to_string(size) + ", got rank=" + to_string(rank) + "; ranks count from 0");
  }
}

std::vector<std::int32_t> linear_table(std::int64_t num_experts, int rank, int size) {
  const std::int64_t base = num_experts / size;
  const std::int64_t extra = num_experts % size;  // the first ranks get one more
  const std::int64_t begin = rank * base + std::min<std::int64_t>(rank, extra);
  const std::int64_t count = base + (rank < extra ? 1 : 0);
  std::vector<std::int32_t> table(static_cast<std::size_t>(num_experts), -1);
  for (std::int64_t i = 0; i < count; ++i) {
    table[static_cast<std::size_t>(begin + i)] = static_cast<std::int32_t>(i);
  }
  return table;
}

std::vector<std::int32_t> round_robin_table(std::int64_t num_experts, int rank, int size) {
  std::vector<std::int32_t> table(static_cast<std::size_t>(num_experts), -1);
  for (std::int64_t g = rank; g < num_experts; g += size) {
    table[static_cast<std::size_t>(g)] = static_cast<std::int32_t>(g / size);
  }
  return table;
}

// In range and no local id twice: then the n local ids are 0..n-1 without a hole.
void check_explicit(const std::vector<std::int32_t>& map, std::int64_t num_experts) {
  if (static_cast<std::int64_t>(map.size()) != num_experts) {
    refuse("expert_map: expected num_experts=" + to_string(num_experts) + " entries, got " +
           to_string(map.size()) + "; give one per global expert, -1 where it is not local");
  }
  const auto num_local = static_cast<std::int64_t>(
      std::count_if(map.begin(), map.end(), [](std::int32_t local) { return local >= 0; }));
  std::vector<std::int64_t> owner(static_cast<std::size_t>(num_local), -1);
  for (std::size_t g = 0; g < map.size(); ++g) {
    const std::int32_t local = map[g];
    if (local == -1) continue;
    const std::string entry = "expert_map[" + to_string(g) + "]: ";
    if (local < -1) {
      refuse(entry + "expected a local id or -1, got " + to_string(local) +
             "; -1 alone means not on this rank");
    }
    if (local >= num_local) {
      refuse(entry + "expected a local id in 0.." + to_string(num_local - 1) + " or -1, got " +
             to_string(local) + "; the map has " + to_string(num_local) +
             " local experts: number them from 0 without a hole");
    }
    std::int64_t& first = owner[static_cast<std::size_t>(local)];
    if (first >= 0) {
      refuse(entry + "expected a local id of its own, got " + to_string(local) +
             ", which global expert " + to_string(first) + " has; global experts " +
             to_string(first) + " and " + to_string(g) + " need two local ids");
    }
    first = static_cast<std::int64_t>(g);
  }
}

}  // namespace

ExpertMap ExpertMap::linear(int rank, int size) {
  check_rank(rank, size);
  ExpertMap result;
  result.kind_ = Kind::linear;
  result.rank_ = rank;
  result.size_ = size;
  return result;
}

ExpertMap ExpertMap::round_robin(int rank, int size) {
  check_rank(rank, size);
  ExpertMap result;
  result.kind_ = Kind::round_robin;
  result.rank_ = rank;
  result.size_ = size;
  return result;
}

ExpertMap ExpertMap::explicit_map(std::vector<std::int32_t> map) {
  ExpertMap result;
  result.kind_ = Kind::explicit_map;
  result.map_ = std::move(map);
  return result;
}

std::vector<std::int32_t> ExpertMap::resolve(std::int64_t num_experts) const {
  if (num_experts <= 0 || num_experts > std::numeric_limits<std::int32_t>::max()) {
    refuse("num_experts: expected 1..2147483647, got " + to_string(num_experts) +
           "; it counts the experts of the whole model");
  }
  switch (kind_) {
    case Kind::identity:
      return linear_table(num_experts, 0, 1);
    case Kind::linear:
      return linear_table(num_experts, rank_, size_);
    case Kind::round_robin:
      return round_robin_table(num_experts, rank_, size_);
    case Kind::explicit_map:
      break;
  }
  check_explicit(map_, num_experts);
  return map_;
}

}  // namespace fusedmoe
