// Top-k routing: one engine for every family (route), and the functions named after score
// functions. topk_check.h holds what is refused.
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "fusedmoe/routing.h"
#include "routing/element.h"
#include "routing/topk_check.h"

namespace fusedmoe {
namespace routing {
namespace {

// Keys of this many experts and groups are kept on the stack; beyond, they are computed again when
// they are needed. Models have up to 512 experts.
constexpr std::int64_t kCachedKeys = 1024;

// Strictly before in the order of selection: descending, NaN after everything.
bool before(float a, float b) { return a > b || (std::isnan(b) && !std::isnan(a)); }

// The forms below neither overflow nor lose small results: exp sees no positive argument.
float sigmoid(float x) {
  const float e = std::exp(-std::fabs(x));
  return x < 0.0F ? e / (1.0F + e) : 1.0F / (1.0F + e);
}

float softplus_sqrt(float x) {
  const float above = x < 0.0F ? 0.0F : x;  // NaN stays
  return std::sqrt(above + std::log1p(std::exp(-std::fabs(x))));
}

// One token. A key is what experts are chosen by: score + bias, or the logit where there is no
// bias, since every score function is increasing.
class Row {
 public:
  Row(const RoutingConfig& config, const ConstMatrixView& logits, std::int64_t token)
      : config_(config),
        num_experts_(logits.columns),
        group_size_(logits.columns / config.num_groups),
        drops_groups_(config.topk_group < config.num_groups),
        biased_(has_selection_bias(config)),
        logits_(static_cast<const std::byte*>(logits.data) +
                token * logits.row_stride * bytes_per_element(logits.dtype)),
        dtype_(logits.dtype) {
    if (*config.score_function == ScoreFunction::softmax) {
      normalise_over(num_experts_, [](std::int64_t i) { return i; });
    }
    if (num_experts_ <= kCachedKeys) {
      for (std::int64_t e = 0; e < num_experts_; ++e) keys_[e] = compute_key(e);
    }
    if (drops_groups_ && config.num_groups <= kCachedKeys) {
      for (std::int64_t g = 0; g < config.num_groups; ++g) {
        group_keys_[g] = compute_group_key(g);
      }
    }
  }

  float logit(std::int64_t expert) const { return load_float(logits_, dtype_, expert); }

  float key(std::int64_t expert) const {
    return num_experts_ <= kCachedKeys ? keys_[expert] : compute_key(expert);
  }

  // The weight before renormalising.
  float score(std::int64_t expert) const {
    switch (*config_.score_function) {
      case ScoreFunction::softmax:
      case ScoreFunction::softmax_of_chosen:
        return std::exp(logit(expert) - max_) / sum_;
      case ScoreFunction::sigmoid:
        return sigmoid(logit(expert));
      case ScoreFunction::softplus_sqrt:
        return softplus_sqrt(logit(expert));
    }
    return 0.0F;
  }

  // Fills ids[0 .. top_k) of a row, kept sorted on the way: no scratch but the output itself.
  void choose(void* ids, DType id_dtype) const {
    const Ranked last = drops_groups_ ? last_kept_group() : Ranked{};
    std::int64_t count = 0;
    float worst = 0.0F;
    for (std::int64_t g = 0; g < config_.num_groups; ++g) {
      if (drops_groups_ && beats(last, {group_key(g), g})) continue;
      for (std::int64_t e = g * group_size_; e < (g + 1) * group_size_; ++e) {
        const float mine = key(e);
        // Ids ascend, so that an equal key comes after those that are there.
        if (count == config_.top_k && !before(mine, worst)) continue;
        std::int64_t place = count < config_.top_k ? count++ : count - 1;
        for (; place > 0; --place) {
          const std::int64_t above = load_id(ids, id_dtype, place - 1);
          if (!before(mine, key(above))) break;
          store_id(ids, id_dtype, place, above);
        }
        store_id(ids, id_dtype, place, e);
        worst = key(load_id(ids, id_dtype, count - 1));
      }
    }
  }

  void weigh(const void* ids, DType id_dtype, void* weights, DType weight_dtype) {
    const auto chosen = [&](std::int64_t j) { return load_id(ids, id_dtype, j); };
    if (*config_.score_function == ScoreFunction::softmax_of_chosen) {
      normalise_over(config_.top_k, chosen);
    }
    float sum = 0.0F;
    for (std::int64_t j = 0; j < config_.top_k; ++j) sum += score(chosen(j));
    const float divisor = divide_by(sum);
    for (std::int64_t j = 0; j < config_.top_k; ++j) {
      float weight = score(chosen(j));
      if (config_.renormalise != Renormalise::none) {
        weight = divisor == 0.0F ? 0.0F : weight / divisor;
      }
      store_float(weights, weight_dtype, j, weight * config_.scaling_factor);
    }
  }

 private:
  struct Ranked {
    float key = 0.0F;
    std::int64_t index = 0;
  };
  static bool beats(const Ranked& a, const Ranked& b) {
    return before(a.key, b.key) || (!before(b.key, a.key) && a.index < b.index);
  }

  // What the bias is added to.
  float selection_score(std::int64_t expert) const {
    return *config_.score_function == ScoreFunction::softmax_of_chosen ? logit(expert)
                                                                       : score(expert);
  }

  float compute_key(std::int64_t expert) const {
    if (!biased_) return logit(expert);
    const ConstMatrixView& bias = config_.selection_bias;
    return selection_score(expert) + load_float(bias.data, bias.dtype, expert);
  }

  float compute_group_key(std::int64_t group) const {
    const std::int64_t begin = group * group_size_;
    std::int64_t best = begin;
    std::int64_t second = -1;
    for (std::int64_t e = begin + 1; e < begin + group_size_; ++e) {
      if (before(key(e), key(best))) {
        second = best;
        best = e;
      } else if (second < 0 || before(key(e), key(second))) {
        second = e;
      }
    }
    if (config_.group_score == GroupScore::best) return key(best);
    const auto biased_score = [&](std::int64_t e) { return biased_ ? key(e) : selection_score(e); };
    return second < 0 ? biased_score(best) : biased_score(best) + biased_score(second);
  }

  float group_key(std::int64_t group) const {
    return config_.num_groups <= kCachedKeys ? group_keys_[group] : compute_group_key(group);
  }

  // The topk_group-th group in order: every group that it beats is dropped, which is to say that
  // no score of theirs, however negative the others, can win.
  Ranked last_kept_group() const {
    std::optional<Ranked> last;
    for (std::int64_t i = 0; i < config_.topk_group; ++i) {
      std::optional<Ranked> next;
      for (std::int64_t g = 0; g < config_.num_groups; ++g) {
        const Ranked mine{group_key(g), g};
        if (last && !beats(*last, mine)) continue;
        if (!next || beats(mine, *next)) next = mine;
      }
      last = next;
    }
    return *last;
  }

  template <typename Expert>
  void normalise_over(std::int64_t count, Expert&& expert) {
    max_ = -std::numeric_limits<float>::infinity();
    for (std::int64_t i = 0; i < count; ++i) {
      const float x = logit(expert(i));
      if (x > max_) max_ = x;
    }
    sum_ = 0.0F;
    for (std::int64_t i = 0; i < count; ++i) sum_ += std::exp(logit(expert(i)) - max_);
  }

  float divide_by(float sum) const {
    switch (config_.renormalise) {
      case Renormalise::sum_epsilon:
        return sum + config_.epsilon;
      case Renormalise::max_sum_epsilon:
        return sum < config_.epsilon ? config_.epsilon : sum;
      default:
        return sum;
    }
  }

  const RoutingConfig& config_;
  std::int64_t num_experts_;
  std::int64_t group_size_;
  bool drops_groups_;
  bool biased_;
  const std::byte* logits_;
  DType dtype_;
  float max_ = 0.0F;  // of the softmax
  float sum_ = 1.0F;
  std::array<float, kCachedKeys> keys_;  // not initialised: written before it is read
  std::array<float, kCachedKeys> group_keys_;
};

void* row_of(const MatrixView& view, std::int64_t row) {
  return static_cast<std::byte*>(view.data) + row * view.row_stride * bytes_per_element(view.dtype);
}

// The named functions: the score function that the name says, and no groups that it leaves out.
RoutingConfig named(const RoutingConfig& config, const char* function, ScoreFunction score) {
  RoutingConfig result = config;
  if (config.score_function.value_or(score) != score) {
    refuse("score_function: expected " + std::string(to_string(score)) + " or none in " + function +
           ", got " + to_string(*config.score_function) + "; call route()");
  }
  if (config.num_groups != 1) {
    refuse("num_groups: expected 1 in " + std::string(function) + ", got " +
           std::to_string(config.num_groups) + "; call grouped_topk()");
  }
  result.score_function = score;
  return result;
}

}  // namespace
}  // namespace routing

void route(const RoutingConfig& config, ConstMatrixView logits, MatrixView topk_weights,
           MatrixView topk_ids) {
  routing::check_routing(config, logits, topk_weights, topk_ids);
  for (std::int64_t token = 0; token < logits.rows; ++token) {
    void* ids = routing::row_of(topk_ids, token);
    routing::Row row(config, logits, token);
    row.choose(ids, topk_ids.dtype);
    row.weigh(ids, topk_ids.dtype, routing::row_of(topk_weights, token), topk_weights.dtype);
  }
}

void topk_softmax(const RoutingConfig& config, ConstMatrixView logits, MatrixView topk_weights,
                  MatrixView topk_ids) {
  const bool of_chosen = config.score_function == ScoreFunction::softmax_of_chosen;
  const auto score = of_chosen ? ScoreFunction::softmax_of_chosen : ScoreFunction::softmax;
  route(routing::named(config, "topk_softmax", score), logits, topk_weights, topk_ids);
}

void topk_sigmoid(const RoutingConfig& config, ConstMatrixView logits, MatrixView topk_weights,
                  MatrixView topk_ids) {
  route(routing::named(config, "topk_sigmoid", ScoreFunction::sigmoid), logits, topk_weights,
        topk_ids);
}

void topk_softplus_sqrt(const RoutingConfig& config, ConstMatrixView logits,
                        MatrixView topk_weights, MatrixView topk_ids) {
  route(routing::named(config, "topk_softplus_sqrt", ScoreFunction::softplus_sqrt), logits,
        topk_weights, topk_ids);
}

void grouped_topk(const RoutingConfig& config, ConstMatrixView logits, MatrixView topk_weights,
                  MatrixView topk_ids) {
  RoutingConfig grouped = config;
  grouped.score_function = config.score_function.value_or(ScoreFunction::sigmoid);
  route(grouped, logits, topk_weights, topk_ids);
}

const char* to_string(ScoreFunction function) noexcept {
  switch (function) {
    case ScoreFunction::softmax:
      return "softmax";
    case ScoreFunction::softmax_of_chosen:
      return "softmax_of_chosen";
    case ScoreFunction::sigmoid:
      return "sigmoid";
    case ScoreFunction::softplus_sqrt:
      return "softplus_sqrt";
  }
  return "unknown";
}

const char* to_string(Renormalise rule) noexcept {
  switch (rule) {
    case Renormalise::none:
      return "none";
    case Renormalise::sum:
      return "sum";
    case Renormalise::sum_epsilon:
      return "sum_epsilon";
    case Renormalise::max_sum_epsilon:
      return "max_sum_epsilon";
  }
  return "unknown";
}

const char* to_string(GroupScore score) noexcept {
  switch (score) {
    case GroupScore::sum_of_two_best:
      return "sum_of_two_best";
    case GroupScore::best:
      return "best";
  }
  return "unknown";
}

}  // namespace fusedmoe
