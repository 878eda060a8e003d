/* The C99 twin of consumer.cpp: expert 0 yields silu(1) * 2 = 1.46212, expert 1 2.92423. */
#include <fusedmoe/fusedmoe_c.h>
#include <stdio.h>
#include <string.h>

enum { kHidden = 32, kIntermediate = 16, kExperts = 2, kTokens = 2 };

static uint16_t w13[kExperts][2][kIntermediate * kHidden];
static uint16_t w2[kExperts][kHidden * kIntermediate];
static uint16_t hidden[kTokens * kHidden];
static uint16_t output[kTokens * kHidden];

static float from_bf16(uint16_t value) {
  const uint32_t bits = (uint32_t)value << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

static int failed(const char* what) {
  fprintf(stderr, "consumer: %s: %s\n", what, fusedmoe_last_error());
  return 1;
}

int main(void) {
  const float topk_weights[kTokens] = {1.0F, 1.0F};
  const int32_t topk_ids[kTokens] = {0, 1};
  fusedmoe_moe_config config;
  fusedmoe_weight_tensor w13_tensor;
  fusedmoe_weight_tensor w2_tensor;
  fusedmoe_expert_weights weights;
  fusedmoe_plan* plan = NULL;
  fusedmoe_workspace_buffer* buffer = NULL;
  fusedmoe_workspace workspace;
  fusedmoe_matrix output_matrix;
  fusedmoe_const_matrix inputs[3];
  int64_t bytes = 0;
  int64_t alignment = 0;
  int i;

  for (i = 0; i < kIntermediate * kHidden; ++i) {
    w13[0][0][i] = w13[1][0][i] = 0x3D00; /* gate: 1 / 32 */
    w13[0][1][i] = w13[1][1][i] = 0x3D80; /* up: 1 / 16 */
    w2[0][i] = 0x3D80;                    /* 1 / 16 */
    w2[1][i] = 0x3E00;                    /* 1 / 8 */
  }
  for (i = 0; i < kTokens * kHidden; ++i) hidden[i] = 0x3F80; /* 1 */

  fusedmoe_moe_config_init(&config);
  config.hidden_size = kHidden;
  config.intermediate_size = kIntermediate;
  config.num_experts = kExperts;
  config.top_k = 1;
  fusedmoe_weight_tensor_init(&w13_tensor);
  w13_tensor.data = w13;
  w13_tensor.experts = kExperts;
  w13_tensor.outputs = 2 * kIntermediate;
  w13_tensor.inputs = kHidden;
  fusedmoe_weight_tensor_init(&w2_tensor);
  w2_tensor.data = w2;
  w2_tensor.experts = kExperts;
  w2_tensor.outputs = kHidden;
  w2_tensor.inputs = kIntermediate;
  fusedmoe_expert_weights_init(&weights);
  weights.w13 = &w13_tensor;
  weights.w2 = &w2_tensor;

  if (fusedmoe_plan_create(&config, &weights, NULL, &plan)) return failed("create");
  if (fusedmoe_plan_workspace_size(plan, kTokens, &bytes, &alignment)) return failed("size");
  if (fusedmoe_workspace_buffer_create(NULL, bytes, alignment, &buffer)) return failed("buffer");
  fusedmoe_workspace_init(&workspace);
  if (fusedmoe_workspace_buffer_view(buffer, &workspace)) return failed("view");
  output_matrix = fusedmoe_matrix_of(output, FUSEDMOE_DTYPE_BF16, kTokens, kHidden);
  inputs[0] = fusedmoe_const_matrix_of(hidden, FUSEDMOE_DTYPE_BF16, kTokens, kHidden);
  inputs[1] = fusedmoe_const_matrix_of(topk_weights, FUSEDMOE_DTYPE_F32, kTokens, 1);
  inputs[2] = fusedmoe_const_matrix_of(topk_ids, FUSEDMOE_DTYPE_I32, kTokens, 1);
  if (fusedmoe_plan_apply(plan, &output_matrix, &inputs[0], &inputs[1], &inputs[2], &workspace,
                          NULL)) {
    return failed("apply");
  }
  fusedmoe_workspace_buffer_destroy(buffer);
  fusedmoe_plan_destroy(plan);

  for (i = 0; i < kTokens * kHidden; ++i) {
    const float expected = i < kHidden ? 1.46212F : 2.92423F;
    const float got = from_bf16(output[i]);
    if (!(got > 0.99F * expected && got < 1.01F * expected)) {
      fprintf(stderr, "consumer: output[%d]: expected %g, got %g\n", i, expected, got);
      return 1;
    }
  }
  printf("consumer: fusedmoe %s, values as expected\n", fusedmoe_version());
  return 0;
}
