// What routing refuses, by name and with the numbers, before it writes anything.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fusedmoe/error.h"
#include "fusedmoe/routing.h"
#include "routing_oracle.h"

namespace fusedmoe {
namespace {

class RoutingRefusal : public testing::Test {
 protected:
  void expect(const std::string& text) {
    expect_of(text, [this] { route(config_, logits_, weights_, ids_); });
  }
  void expect_of(const std::string& text, const std::function<void()>& call) {
    try {
      call();
      ADD_FAILURE() << "accepted: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_EQ(std::string(error.what()).substr(0, text.size()), text);
      EXPECT_NE(std::string(error.what()).find("; "), std::string::npos) << "no remedy";
    }
    EXPECT_TRUE(weight_memory_.untouched());
    EXPECT_TRUE(id_memory_.untouched());
  }

  TestMatrix logit_memory_ = random_matrix(DType::bf16, 17, 12, -3.0F, 3.0F, 1);
  TestMatrix bias_memory_ = random_matrix(DType::f32, 1, 12, -1.0F, 1.0F, 2);
  TestMatrix weight_memory_ = TestMatrix(DType::f32, 17, 8);
  TestMatrix id_memory_ = TestMatrix(DType::i64, 17, 8);
  RoutingConfig config_ = {.score_function = ScoreFunction::sigmoid, .top_k = 8};
  ConstMatrixView logits_ = logit_memory_.view();
  MatrixView weights_ = weight_memory_.view();
  MatrixView ids_ = id_memory_.view();
};

TEST_F(RoutingRefusal, DtypesAndShapes) {
  ids_.dtype = DType::i16;
  expect("topk_ids: expected int32 or int64 [num_tokens=17, top_k=8], got int16 [17, 8]; cast it");
  ids_ = id_memory_.view();
  ids_.rows = 16;
  expect("topk_ids: expected int32 or int64 [num_tokens=17, top_k=8], got int64 [16, 8]; pass");
  ids_ = id_memory_.view();
  ids_.columns = 7;
  expect("topk_ids: expected int32 or int64 [num_tokens=17, top_k=8], got int64 [17, 7]; pass");
  ids_ = id_memory_.view();
  ids_.row_stride = 7;
  expect("topk_ids: expected int32 or int64 [num_tokens=17, top_k=8], got int64 [17, 8] with row");
  ids_ = id_memory_.view();
  ids_.row_stride = INT64_MAX / 8;
  expect("topk_ids: expected int32 or int64 [num_tokens=17, top_k=8], got int64 [17, 8] with row");
  ids_ = id_memory_.view();
  ids_.data = nullptr;
  expect("topk_ids: expected int32 or int64 [num_tokens=17, top_k=8], got int64 [17, 8] at a null");
  ids_ = id_memory_.view();
  weights_.dtype = DType::f64;
  expect("topk_weights: expected float32, float16 or bfloat16 [num_tokens=17, top_k=8], got flo");
  weights_ = weight_memory_.view();
  logits_.dtype = DType::i32;
  expect("logits: expected float32, float16 or bfloat16 [num_tokens=17, num_experts=12], got int");
  logits_ = logit_memory_.view();
  logits_.data = nullptr;
  expect("logits: expected float32, float16 or bfloat16 [num_tokens=17, num_experts=12], got bfl");
  logits_ = logit_memory_.view();
  logits_.rows = -1;
  expect("num_tokens: expected >= 0, got -1");
  logits_ = logit_memory_.view();
  logits_.columns = 0;
  expect("num_experts: expected > 0, got 0");
}

TEST_F(RoutingRefusal, SelectionBias) {
  config_.selection_bias = {bias_memory_.view().data, DType::f64, 1, 12};
  expect("selection_bias: expected float32, float16 or bfloat16 [1, num_experts=12], got float64");
  config_.selection_bias = {bias_memory_.view().data, DType::f32, 1, 11};
  expect("selection_bias: expected float32, float16 or bfloat16 [1, num_experts=12], got float32");
  config_.selection_bias = {nullptr, DType::f32, 1, 12};
  expect("selection_bias: expected float32, float16 or bfloat16 [1, num_experts=12], got float32");
}

TEST_F(RoutingRefusal, Settings) {
  const RoutingConfig sound = config_;
  const auto refuse = [&](const std::string& text, const auto& change) {
    config_ = sound;
    change(config_);
    expect(text);
  };
  refuse("score_function: expected one of", [](auto& c) { c.score_function.reset(); });
  refuse("score_function: no such value",
         [](auto& c) { c.score_function = static_cast<ScoreFunction>(9); });
  refuse("renormalise: no such value",
         [](auto& c) { c.renormalise = static_cast<Renormalise>(9); });
  refuse("group_score: no such value", [](auto& c) { c.group_score = static_cast<GroupScore>(9); });
  refuse("top_k: expected 1..num_experts=12, got 0", [](auto& c) { c.top_k = 0; });
  refuse("top_k: expected 1..num_experts=12, got -1", [](auto& c) { c.top_k = -1; });
  refuse("top_k: expected 1..num_experts=12, got 13", [](auto& c) { c.top_k = 13; });
  refuse("num_groups: expected a divisor of num_experts=12, got 5",
         [](auto& c) { c.num_groups = 5; });
  refuse("num_groups: expected a divisor of num_experts=12, got 0",
         [](auto& c) { c.num_groups = 0; });
  refuse("topk_group: expected 1..num_groups=4, got 5", [](auto& c) {
    c.num_groups = 4;
    c.topk_group = 5;
  });
  refuse("topk_group: expected enough groups for top_k=8, got 2 of num_groups=4, which hold 6",
         [](auto& c) {
           c.num_groups = 4;
           c.topk_group = 2;
         });
  refuse("scaling_factor: expected finite and > 0, got 0", [](auto& c) { c.scaling_factor = 0; });
  refuse("scaling_factor: expected finite and > 0, got nan",
         [](auto& c) { c.scaling_factor = NAN; });
  refuse("epsilon: expected finite and > 0", [](auto& c) {
    c.renormalise = Renormalise::sum_epsilon;
    c.epsilon = 0.0F;
  });
}

TEST_F(RoutingRefusal, Overlap) {
  weights_.data = ids_.data;
  expect("topk_weights: expected memory of its own, got memory that overlaps topk_ids");
  weights_.data = const_cast<void*>(logits_.data);
  expect("topk_weights: expected memory of its own, got memory that overlaps logits");
  weights_ = weight_memory_.view();
  config_.selection_bias = bias_memory_.view();
  ids_.data = const_cast<void*>(config_.selection_bias.data);
  expect("topk_ids: expected memory of its own, got memory that overlaps selection_bias");
}

TEST_F(RoutingRefusal, ColumnsOfOneBufferDoNotOverlap) {
  std::vector<std::int32_t> both(17 * 16, -1);
  weights_ = {both.data(), DType::f32, 17, 8, 16};
  ids_ = {both.data() + 8, DType::i32, 17, 8, 16};
  EXPECT_NO_THROW(route(config_, logits_, weights_, ids_));
  TestMatrix weights(DType::f32, 17, 8);
  TestMatrix ids(DType::i32, 17, 8);
  route(config_, logits_, weights.view(), ids.view());
  for (std::int64_t r = 0; r < 17; ++r) {
    for (std::int64_t k = 0; k < 8; ++k) {
      EXPECT_EQ(both[static_cast<std::size_t>(r * 16 + 8 + k)], ids.id(r, k));
    }
  }
  ids_ = {both.data() + 7, DType::i32, 17, 8, 16};
  expect("topk_weights: expected memory of its own, got memory that overlaps topk_ids");
  ids_ = {both.data() + 9, DType::i32, 16, 8, 16};
  logits_.rows = weights_.rows = 16;
  expect("topk_weights: expected memory of its own, got memory that overlaps topk_ids");
}

TEST_F(RoutingRefusal, NamedFunctionsRefuseWhatTheirNameExcludes) {
  config_.score_function = ScoreFunction::softmax;
  expect_of("score_function: expected sigmoid or none in topk_sigmoid, got softmax",
            [this] { topk_sigmoid(config_, logits_, weights_, ids_); });
  config_.score_function = ScoreFunction::sigmoid;
  expect_of("score_function: expected softmax or none in topk_softmax, got sigmoid",
            [this] { topk_softmax(config_, logits_, weights_, ids_); });
  config_.num_groups = 4;
  config_.topk_group = 4;
  expect_of("num_groups: expected 1 in topk_sigmoid, got 4; call grouped_topk()",
            [this] { topk_sigmoid(config_, logits_, weights_, ids_); });
}

}  // namespace
}  // namespace fusedmoe
