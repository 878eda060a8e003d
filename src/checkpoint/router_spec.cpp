// Implementation of router_spec.h.
#include "checkpoint/router_spec.h"

#include <optional>
#include <string_view>

#include "checkpoint/text.h"

namespace fusedmoe::checkpoint {
namespace {

// Refuses a value other than the one that the family's rule stands for.
void expect_text(const ConfigReader& config, std::string_view key, std::string_view expected) {
  const std::optional<std::string> value = config.text({key});
  if (value && *value != expected) {
    config.fail_unsupported(std::string(key) + " is " + quote(*value) + "; supported here is " +
                            quote(expected));
  }
}

void read_groups(const ConfigReader& config, RouterSpec& router, std::int64_t num_experts,
                 std::int64_t top_k) {
  router.n_group = config.require_integer({"n_group"}, 1, num_experts);
  router.topk_group = config.require_integer({"topk_group"}, 1, router.n_group);
  if (num_experts % router.n_group != 0) {
    config.fail("n_group", "is " + std::to_string(router.n_group) + "; expected a divisor of " +
                               std::to_string(num_experts) + " experts");
  }
  const std::int64_t open = num_experts / router.n_group * router.topk_group;
  if (top_k > open) {
    config.fail("topk_group", "leaves " + std::to_string(open) + " experts to choose " +
                                  std::to_string(top_k) + " from");
  }
}

}  // namespace

RouterSpec read_router_spec(const ConfigReader& config, RouterRule rule, const MoeConfig& moe) {
  RouterSpec router;
  const auto norm_topk = [&](bool otherwise) {
    return config.boolean({"norm_topk_prob"}).value_or(otherwise);
  };
  switch (rule) {
    case RouterRule::softmax_renormalized:
      router.renormalize = norm_topk(true);
      break;
    case RouterRule::softmax_norm_topk: {
      const std::optional<bool> normalize = config.boolean({"norm_topk_prob"});
      if (!normalize) config.fail("norm_topk_prob", "is missing; expected true or false");
      router.renormalize = *normalize;
      break;
    }
    case RouterRule::softmax_plain:
      break;
    case RouterRule::softmax_of_chosen:
      router.kind = RouterKind::topk_softmax;
      break;
    case RouterRule::softmax_bias:
      router.kind = RouterKind::softmax_bias;
      router.renormalize = true;
      router.epsilon_rule = EpsilonRule::max;
      router.epsilon = config.positive_number({"moe_norm_min"}).value_or(1e-12);
      break;
    case RouterRule::softmax_groups:
      expect_text(config, "scoring_func", "softmax");
      router.kind = RouterKind::softmax_grouped;
      router.renormalize = norm_topk(false);
      router.epsilon_rule = EpsilonRule::add;
      router.epsilon = 1e-20;
      router.scaling = config.require_positive_number({"routed_scaling_factor"});
      // greedy is the same with one group.
      if (config.require_text({"topk_method"}) != "greedy") {
        expect_text(config, "topk_method", "group_limited_greedy");
        read_groups(config, router, moe.num_experts, moe.top_k);
      }
      break;
    case RouterRule::sigmoid_bias:
      expect_text(config, "scoring_func", "sigmoid");
      router.kind = RouterKind::sigmoid_bias;
      router.renormalize = true;
      break;
    case RouterRule::sigmoid_bias_groups:
      expect_text(config, "scoring_func", "sigmoid");
      expect_text(config, "topk_method", "noaux_tc");
      router.kind = RouterKind::sigmoid_bias_grouped;
      router.renormalize = norm_topk(true);
      router.epsilon_rule = EpsilonRule::add;
      router.epsilon = 1e-20;
      router.scaling = config.require_positive_number({"routed_scaling_factor"});
      read_groups(config, router, moe.num_experts, moe.top_k);
      break;
    case RouterRule::sigmoid_of_chosen:
      router.kind = RouterKind::topk_sigmoid;
      break;
    case RouterRule::sparsemixer:
      router.kind = RouterKind::sparsemixer;
      break;
    case RouterRule::softmax_p_norm: {
      // The 1-norm of softmax's output is its sum.
      const std::optional<double> p = config.positive_number({"moe_normalize_expert_weights"});
      if (p.value_or(1.0) != 1.0) router.kind = RouterKind::softmax_p_norm;
      router.renormalize = p.has_value();
      break;
    }
  }
  return router;
}

const char* to_string(RouterKind kind) noexcept {
  switch (kind) {
    case RouterKind::softmax_topk:
      return "softmax_topk";
    case RouterKind::topk_softmax:
      return "topk_softmax";
    case RouterKind::topk_sigmoid:
      return "topk_sigmoid";
    case RouterKind::softmax_bias:
      return "softmax_bias";
    case RouterKind::softmax_grouped:
      return "softmax_grouped";
    case RouterKind::sigmoid_bias:
      return "sigmoid_bias";
    case RouterKind::sigmoid_bias_grouped:
      return "sigmoid_bias_grouped";
    case RouterKind::softmax_p_norm:
      return "softmax_p_norm";
    case RouterKind::sparsemixer:
      return "sparsemixer";
  }
  return "?";
}

}  // namespace fusedmoe::checkpoint
