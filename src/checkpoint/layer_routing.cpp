#include "checkpoint/layer_routing.h"

namespace fusedmoe::checkpoint {

std::optional<RoutingConfig> routing_config(const MoeLayer& layer) {
  const RouterSpec& spec = layer.router;
  RoutingConfig config;
  switch (spec.kind) {
    case RouterKind::softmax_topk:
    case RouterKind::softmax_bias:
      config.score_function = ScoreFunction::softmax;
      break;
    case RouterKind::softmax_grouped:
      config.score_function = ScoreFunction::softmax;
      config.group_score = GroupScore::best;
      break;
    case RouterKind::topk_softmax:
      config.score_function = ScoreFunction::softmax_of_chosen;
      break;
    case RouterKind::topk_sigmoid:
    case RouterKind::sigmoid_bias:
    case RouterKind::sigmoid_bias_grouped:
      config.score_function = ScoreFunction::sigmoid;
      break;
    case RouterKind::softmax_p_norm:
    case RouterKind::sparsemixer:
      return std::nullopt;
  }
  config.top_k = layer.config.top_k;
  config.selection_bias = layer.router_selection_bias;
  if (spec.renormalize) {
    config.renormalise = spec.epsilon_rule == EpsilonRule::none  ? Renormalise::sum
                         : spec.epsilon_rule == EpsilonRule::add ? Renormalise::sum_epsilon
                                                                 : Renormalise::max_sum_epsilon;
    if (spec.epsilon > 0) config.epsilon = static_cast<float>(spec.epsilon);
  }
  config.num_groups = spec.n_group;
  config.topk_group = spec.topk_group;
  config.scaling_factor = static_cast<float>(spec.scaling);
  return config;
}

}  // namespace fusedmoe::checkpoint
