// The families that have no golden case, and the other layouts of those that have: names, sizes,
// layers, router and layout, on checkpoints made here.
#include "checkpoint/families.h"

#include <gtest/gtest.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint/expert_names.h"
#include "checkpoint/safetensors.h"
#include "test_files.h"

namespace fusedmoe::checkpoint {
namespace {

// hidden_size 6, intermediate_size 4, 3 experts.
std::vector<NewTensor> expert_tensors(const std::string& block, const std::string& gate,
                                      const std::string& up, const std::string& down) {
  std::vector<NewTensor> tensors;
  for (int e = 0; e < 3; ++e) {
    const std::string root = block + "experts." + std::to_string(e) + ".";
    tensors.push_back({root + gate + ".weight", {4, 6}});
    tensors.push_back({root + up + ".weight", {4, 6}});
    tensors.push_back({root + down + ".weight", {6, 4}});
  }
  return tensors;
}

std::vector<NewTensor> operator+(std::vector<NewTensor> a, const std::vector<NewTensor>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

struct FamilyCase {
  std::string name;
  std::string config;  // besides model_type, hidden_size, dtype, hidden_act
  std::vector<NewTensor> tensors;
  std::int64_t layer = 0;
  RouterKind router = RouterKind::softmax_topk;
  bool renormalize = false;
  EpsilonRule epsilon_rule = EpsilonRule::none;
  bool selection_bias = false;
};

std::vector<NewTensor> proj(const std::string& block) {
  return expert_tensors(block, "gate_proj", "up_proj", "down_proj");
}

std::vector<FamilyCase> family_cases() {
  const std::string mixtral = "model.layers.0.block_sparse_moe.";
  const std::string mlp0 = "model.layers.0.mlp.";
  const std::string mlp1 = "model.layers.1.mlp.";
  // Beside the experts: a shared expert and a dense layer, which are none.
  const std::vector<NewTensor> others = {{mlp1 + "shared_experts.gate_proj.weight", {4, 6}},
                                         {mlp0 + "gate_proj.weight", {8, 6}},
                                         {"mtp.layers.0.mlp.experts.0.gate_proj.weight", {4, 6}}};
  return {
      {.name = "phimoe",
       .config = R"("num_local_experts":3,"num_experts_per_tok":2,"intermediate_size":4,
                    "num_hidden_layers":1)",
       .tensors = expert_tensors(mixtral, "w1", "w3", "w2") +
                  std::vector<NewTensor>{{mixtral + "gate.weight", {3, 6}}},
       .router = RouterKind::sparsemixer},
      {.name = "minimax_m2",
       .config = R"("num_local_experts":3,"num_experts_per_tok":2,"intermediate_size":4,
                    "num_hidden_layers":1,"scoring_func":"sigmoid")",
       .tensors = expert_tensors(mixtral, "w1", "w3", "w2") +
                  std::vector<NewTensor>{{mixtral + "gate.weight", {3, 6}, "F32"},
                                         {mixtral + "e_score_correction_bias", {3}, "F32"}},
       .router = RouterKind::sigmoid_bias,
       .renormalize = true,
       .selection_bias = true},
      {.name = "deepseek_v2",
       .config = R"("n_routed_experts":3,"num_experts_per_tok":2,"moe_intermediate_size":4,
                    "intermediate_size":8,"num_hidden_layers":2,"first_k_dense_replace":1,
                    "topk_method":"group_limited_greedy","n_group":3,"topk_group":2,
                    "norm_topk_prob":false,"routed_scaling_factor":16.0)",
       .tensors = proj(mlp1) + std::vector<NewTensor>{{mlp1 + "gate.weight", {3, 6}}} + others,
       .layer = 1,
       .router = RouterKind::softmax_grouped,
       .epsilon_rule = EpsilonRule::add},
      {.name = "kimi_k2",
       .config = R"("n_routed_experts":3,"num_experts_per_tok":2,"moe_intermediate_size":4,
                    "intermediate_size":8,"num_hidden_layers":2,"first_k_dense_replace":1,
                    "topk_method":"noaux_tc","n_group":1,"topk_group":1,"norm_topk_prob":true,
                    "routed_scaling_factor":2.827,"scoring_func":"sigmoid")",
       .tensors = proj(mlp1) +
                  std::vector<NewTensor>{{mlp1 + "gate.weight", {3, 6}},
                                         {mlp1 + "gate.e_score_correction_bias", {3}, "F32"}} +
                  others,
       .layer = 1,
       .router = RouterKind::sigmoid_bias_grouped,
       .renormalize = true,
       .epsilon_rule = EpsilonRule::add,
       .selection_bias = true},
      {.name = "ernie4_5_moe",
       .config = R"("moe_num_experts":3,"moe_k":2,"moe_intermediate_size":4,"intermediate_size":8,
                    "num_hidden_layers":2,"moe_layer_start_index":1,"moe_layer_interval":1)",
       .tensors =
           proj(mlp1) +
           std::vector<NewTensor>{{mlp1 + "gate.weight", {3, 6}, "F32"},
                                  {mlp1 + "moe_statics.e_score_correction_bias", {1, 3}, "F32"}} +
           others,
       .layer = 1,
       .router = RouterKind::softmax_bias,
       .renormalize = true,
       .epsilon_rule = EpsilonRule::max,
       .selection_bias = true},
      {.name = "hunyuan_v1_moe",
       .config = R"("num_experts":3,"moe_topk":[2],"moe_intermediate_size":[4],
                    "intermediate_size":8,"num_hidden_layers":1)",
       .tensors =
           proj(mlp0) + std::vector<NewTensor>{{mlp0 + "gate.wg.weight", {3, 6}},
                                               {mlp0 + "shared_mlp.gate_proj.weight", {8, 6}}},
       .renormalize = true},
      {.name = "jamba",
       .config = R"("num_experts":3,"num_experts_per_tok":2,"intermediate_size":4,
                    "num_hidden_layers":2,"expert_layer_period":2,"expert_layer_offset":1)",
       .tensors = proj("model.layers.1.feed_forward.") +
                  std::vector<NewTensor>{{"model.layers.1.feed_forward.router.weight", {3, 6}},
                                         {"model.layers.0.feed_forward.gate_proj.weight", {4, 6}}},
       .layer = 1},
      {.name = "qwen3_next",
       .config = R"("num_experts":3,"num_experts_per_tok":2,"moe_intermediate_size":4,
                    "intermediate_size":8,"num_hidden_layers":1,"norm_topk_prob":true)",
       .tensors = proj(mlp0) + std::vector<NewTensor>{{mlp0 + "gate.weight", {3, 6}}} + others,
       .renormalize = true},
      {.name = "qwen3_5_moe",  // split per expert
       .config = R"("text_config":{"num_experts":3,"num_experts_per_tok":2,"hidden_size":6,
                    "moe_intermediate_size":4,"num_hidden_layers":1,"dtype":"bfloat16"})",
       .tensors = proj("model.language_model.layers.0.mlp.") +
                  std::vector<NewTensor>{{"model.language_model.layers.0.mlp.gate.weight", {3, 6}}},
       .renormalize = true},
  };
}

class FamilyTest : public testing::TestWithParam<FamilyCase> {};

TEST_P(FamilyTest, IsRead) {
  const FamilyCase& due = GetParam();
  const TempFolder folder;
  folder.write("config.json", "{\"model_type\":\"" + due.name +
                                  R"(","hidden_size":6,"dtype":"bfloat16","hidden_act":"silu",)" +
                                  due.config + "}");
  folder.write("model.safetensors", make_safetensors(due.tensors));
  EXPECT_EQ(inspect_checkpoint(folder.path()).problems, std::vector<std::string>());
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  EXPECT_EQ(checkpoint.family(), due.name);
  ASSERT_EQ(checkpoint.layers().size(), 1U);
  const MoeLayer& layer = checkpoint.layers().front();
  EXPECT_EQ(layer.index, due.layer);
  EXPECT_EQ(layer.config.hidden_size, 6);
  EXPECT_EQ(layer.config.intermediate_size, 4);
  EXPECT_EQ(layer.config.num_experts, 3);
  EXPECT_EQ(layer.config.top_k, 2);
  EXPECT_EQ(layer.router.kind, due.router);
  EXPECT_EQ(layer.router.renormalize, due.renormalize);
  EXPECT_EQ(layer.router.epsilon_rule, due.epsilon_rule);
  EXPECT_EQ(layer.router_selection_bias.data != nullptr, due.selection_bias);
  EXPECT_EQ(layer.router_weight.rows, 3);
  EXPECT_EQ(layer.bytes, 3 * 3 * 24 * 2);

  // The stated shapes, and one expert at a time in the right places.
  ASSERT_TRUE(layer.weights.source);
  EXPECT_EQ(layer.weights.w13.data, nullptr);
  EXPECT_EQ(layer.weights.w13.experts, 3);
  EXPECT_EQ(layer.weights.w13.outputs, 4);
  EXPECT_EQ(layer.weights.w13_up.outputs, 4);
  EXPECT_EQ(layer.weights.w2.outputs, 6);
  SafetensorsFile file(folder.path() / "model.safetensors");
  const std::byte* const start = file.tensors().front().data;
  const auto* const mapped = static_cast<const std::byte*>(layer.weights.source(0).w13.data);
  for (int e = 0; e < 3; ++e) {
    const ExpertWeights expert = layer.weights.source(e);
    const WeightTensor* const views[] = {&expert.w13, &expert.w13_up, &expert.w2};
    for (int m = 0; m < 3; ++m) {
      EXPECT_EQ(views[m]->experts, 1);
      const Tensor* const tensor = file.find(due.tensors[e * 3 + m].name);
      EXPECT_EQ(static_cast<const std::byte*>(views[m]->data) - mapped, tensor->data - start);
    }
  }
  expect_error(ErrorCode::invalid_argument, {"expert", "0 to 2"}, [&] { layer.weights.source(3); });
  expect_error(ErrorCode::invalid_argument, {"-1"}, [&] { layer.weights.source(-1); });
}

INSTANTIATE_TEST_SUITE_P(Made, FamilyTest, testing::ValuesIn(family_cases()),
                         [](const auto& made) { return made.param.name; });

TEST(Families, SizesByLayer) {
  const ModelConfig model = parse_model_config(
      R"({"model_type":"hunyuan_v1_moe","hidden_size":6,"dtype":"bfloat16","hidden_act":"silu",
          "num_hidden_layers":2,"num_experts":4,"moe_topk":[1,3],"moe_intermediate_size":[4,5]})",
      "config.json");
  EXPECT_EQ(model.layers[1].moe.top_k, 3);
  EXPECT_EQ(model.layers[1].moe.intermediate_size, 5);
  expect_error(ErrorCode::io, {"moe_topk", "one for each of the 2 layers"}, [] {
    parse_model_config(
        R"({"model_type":"hunyuan_v1_moe","hidden_size":6,"dtype":"bfloat16","hidden_act":"silu",
            "num_hidden_layers":2,"num_experts":4,"moe_topk":[1],"moe_intermediate_size":4})",
        "config.json");
  });
}

// Sizes that do not tell [E, N, K] from [E, K, N]: the layout is the family's own.
TEST(Families, AmbiguousSizes) {
  struct Case {
    const char* family;
    const char* section;
    std::string block;
    WeightLayout layout;
    GateUpLayout gate_up;
  };
  const Case cases[] = {
      {"gpt_oss", "", "model.layers.0.mlp.", WeightLayout::kn, GateUpLayout::interleaved},
      {"llama4", "text_config", "language_model.model.layers.0.feed_forward.", WeightLayout::kn,
       GateUpLayout::halves},
      {"qwen3_5_moe", "text_config", "model.language_model.layers.0.mlp.", WeightLayout::nk,
       GateUpLayout::halves},
  };
  for (const Case& c : cases) {
    for (const std::int64_t intermediate : {32, 64}) {
      SCOPED_TRACE(std::string(c.family) + " " + std::to_string(intermediate));
      const std::string size = std::to_string(intermediate);
      const std::string sizes =
          R"("hidden_size":64,"intermediate_size":)" + size + R"(,"moe_intermediate_size":)" +
          size + R"(,"num_local_experts":2,"num_experts_per_tok":1,"num_hidden_layers":1,)" +
          R"("hidden_act":"silu","dtype":"bfloat16")";
      const bool kn = c.layout == WeightLayout::kn;
      std::vector<std::int64_t> w13 = {2, 2 * intermediate, 64};
      std::vector<std::int64_t> w2 = {2, 64, intermediate};
      if (kn) std::swap(w13[1], w13[2]);
      if (kn) std::swap(w2[1], w2[2]);
      std::vector<NewTensor> tensors = {{c.block + "experts.gate_up_proj", w13},
                                        {c.block + "experts.down_proj", w2},
                                        {c.block + "gate.weight", {2, 64}},
                                        {c.block + "router.weight", {2, 64}},
                                        {c.block + "router.bias", {2}}};
      if (c.gate_up == GateUpLayout::interleaved) {
        tensors.push_back({c.block + "experts.gate_up_proj_bias", {2, 2 * intermediate}});
        tensors.push_back({c.block + "experts.down_proj_bias", {2, 64}});
      }
      const TempFolder folder;
      const std::string section = c.section;
      folder.write("config.json",
                   std::string("{\"model_type\":\"") + c.family + "\"," +
                       (section.empty() ? sizes : "\"" + section + "\":{" + sizes + "}") + "}");
      folder.write("model.safetensors", make_safetensors(tensors));
      const Checkpoint checkpoint = Checkpoint::open(folder.path());
      const MoeLayer& layer = checkpoint.layers().front();
      EXPECT_EQ(layer.weights.w13.layout, c.layout);
      EXPECT_EQ(layer.weights.w2.layout, c.layout);
      EXPECT_EQ(layer.config.gate_up_layout, c.gate_up);
      EXPECT_EQ(layer.weights.w13.outputs, 2 * intermediate);
      EXPECT_EQ(layer.weights.w13.inputs, 64);
      EXPECT_EQ(layer.weights.w2.outputs, 64);
      EXPECT_EQ(layer.weights.w2.inputs, intermediate);
    }
  }
}

TEST(ExpertNames, AreMatched) {
  const Family& mixtral = *find_family("mixtral");
  const std::string block = "model.layers.12.block_sparse_moe.";
  const auto match = match_expert_name(mixtral, nullptr, block + "experts.7.w3.weight");
  ASSERT_TRUE(match);
  EXPECT_TRUE(match->known);
  EXPECT_EQ(match->layer, 12);
  EXPECT_EQ(match->expert, 7);
  EXPECT_EQ(mixtral.patterns[match->pattern].tensors[match->tensor].matrix, Matrix::up);
  EXPECT_EQ(expert_tensor_name(mixtral, 12, mixtral.patterns[0].tensors[1], ".weight", 7),
            block + "experts.7.w3.weight");
  for (const char* const name :
       {"experts.7.w4.weight", "experts.7.w3.bias", "experts.07.w3.weight", "experts..w3.weight",
        "experts.-1.w3.weight", "experts.7.w3.weight.x", "experts.7.w3.weight_scale",
        "experts.x"}) {
    const auto unknown = match_expert_name(mixtral, nullptr, block + name);
    ASSERT_TRUE(unknown) << name;
    EXPECT_FALSE(unknown->known) << name;
  }
  for (const char* const name :
       {"model.layers.12.block_sparse_moe.gate.weight", "model.layers.12.self_attn.q_proj.weight",
        "model.layers.x.block_sparse_moe.experts.7.w3.weight", "model.layers.", "",
        "lm_head.weight", "xmodel.layers.12.block_sparse_moe.experts.7.w3.weight"}) {
    EXPECT_FALSE(match_expert_name(mixtral, nullptr, name)) << name;
  }
  const auto huge =
      match_expert_name(mixtral, nullptr, block + "experts.99999999999999999999999.w1.weight");
  ASSERT_TRUE(huge);
  EXPECT_TRUE(huge->known);
  EXPECT_GT(huge->expert, std::int64_t{1} << 62);
}

TEST(Families, EveryRowIsWhole) {
  for (const Family& family : families()) {
    SCOPED_TRACE(family.name);
    EXPECT_EQ(find_family(family.name), &family);
    EXPECT_NE(family.prefix.find("{L}"), std::string_view::npos);
    EXPECT_FALSE(family.patterns.empty());
    EXPECT_FALSE(family.router_weight.empty());
    EXPECT_FALSE(family.intermediate_size.empty());
    for (const ExpertPattern& pattern : family.patterns) {
      for (const TensorPattern& tensor : pattern.tensors) {
        EXPECT_EQ(tensor.name.find("{E}") != std::string_view::npos,
                  pattern.style == ExpertStyle::per_expert);
        const auto match =
            match_expert_name(family, nullptr, expert_tensor_name(family, 3, tensor, ".weight", 5));
        ASSERT_TRUE(match);
        EXPECT_TRUE(match->known);
        EXPECT_EQ(match->layer, 3);
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe::checkpoint
