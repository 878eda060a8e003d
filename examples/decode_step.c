/* The C99 twin of decode_step.cpp: a stack of MoE layers, one workspace for all of them, steps with
 * any number of tokens, and a weight update between two steps. Checks itself: the shared workspace
 * gives the same bits as scratch that every call allocates. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fusedmoe/fusedmoe_c.h"

enum { kLayers = 4, kHidden = 256, kIntermediate = 96, kExperts = 8, kTopK = 2, kMaxTokens = 16 };

static uint16_t w13[kLayers]
                   [kExperts * 2 * kIntermediate * kHidden]; /* bf16: upper half of float */
static uint16_t w2[kLayers][kExperts * kHidden * kIntermediate];
static float logits[kLayers][kMaxTokens * kExperts];
static fusedmoe_plan* plans[kLayers];

static void check(fusedmoe_status status, const char* what) {
  if (status == FUSEDMOE_OK) return;
  fprintf(stderr, "decode_step: %s: %s: %s\n", what, fusedmoe_status_name(status),
          fusedmoe_last_error());
  exit(1);
}

static float random_value(float scale) {
  static uint32_t state = 1;
  state = state * 1664525U + 1013904223U;
  return scale * ((float)(state >> 8) / 8388608.0F - 1.0F);
}

static void fill_bf16(uint16_t* values, size_t count, float scale) {
  size_t i;
  for (i = 0; i < count; ++i) {
    const float value = random_value(scale);
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    values[i] = (uint16_t)(bits >> 16);
  }
}

/* Builds the plan of a layer, or reads its weights again. */
static void load(int layer) {
  fusedmoe_weight_tensor w13_tensor;
  fusedmoe_weight_tensor w2_tensor;
  fusedmoe_expert_weights weights;
  fusedmoe_moe_config config;
  fusedmoe_weight_tensor_init(&w13_tensor); /* [experts, 2 * intermediate_size, hidden_size] */
  w13_tensor.data = w13[layer];
  w13_tensor.experts = kExperts;
  w13_tensor.outputs = 2 * kIntermediate;
  w13_tensor.inputs = kHidden;
  fusedmoe_weight_tensor_init(&w2_tensor); /* [experts, hidden_size, intermediate_size] */
  w2_tensor.data = w2[layer];
  w2_tensor.experts = kExperts;
  w2_tensor.outputs = kHidden;
  w2_tensor.inputs = kIntermediate;
  fusedmoe_expert_weights_init(&weights);
  weights.w13 = &w13_tensor;
  weights.w2 = &w2_tensor;
  if (plans[layer] != NULL) {
    check(fusedmoe_plan_refresh(plans[layer], &weights, FUSEDMOE_REFRESH_WAIT), "refresh");
    return;
  }
  fusedmoe_moe_config_init(&config);
  config.hidden_size = kHidden;
  config.intermediate_size = kIntermediate;
  config.num_experts = kExperts;
  config.top_k = kTopK;
  check(fusedmoe_plan_create(&config, &weights, NULL, &plans[layer]), "create");
}

/* One step: every layer routes the tokens and applies its experts in place. */
static void step(uint16_t* hidden, int64_t num_tokens, const fusedmoe_workspace* workspace) {
  float topk_weights[kMaxTokens * kTopK];
  int32_t topk_ids[kMaxTokens * kTopK];
  const fusedmoe_matrix output =
      fusedmoe_matrix_of(hidden, FUSEDMOE_DTYPE_BF16, num_tokens, kHidden);
  const fusedmoe_const_matrix input =
      fusedmoe_const_matrix_of(hidden, FUSEDMOE_DTYPE_BF16, num_tokens, kHidden);
  const fusedmoe_matrix weights_out =
      fusedmoe_matrix_of(topk_weights, FUSEDMOE_DTYPE_F32, num_tokens, kTopK);
  const fusedmoe_const_matrix weights_in =
      fusedmoe_const_matrix_of(topk_weights, FUSEDMOE_DTYPE_F32, num_tokens, kTopK);
  const fusedmoe_matrix ids_out =
      fusedmoe_matrix_of(topk_ids, FUSEDMOE_DTYPE_I32, num_tokens, kTopK);
  const fusedmoe_const_matrix ids_in =
      fusedmoe_const_matrix_of(topk_ids, FUSEDMOE_DTYPE_I32, num_tokens, kTopK);
  fusedmoe_routing_config routing;
  int layer;
  fusedmoe_routing_config_init(&routing);
  routing.top_k = kTopK;
  routing.renormalise = FUSEDMOE_RENORMALISE_SUM;
  for (layer = 0; layer < kLayers; ++layer) {
    /* A model's own router would compute the logits from hidden. */
    const fusedmoe_const_matrix layer_logits =
        fusedmoe_const_matrix_of(logits[layer], FUSEDMOE_DTYPE_F32, num_tokens, kExperts);
    check(fusedmoe_topk_softmax(&routing, &layer_logits, &weights_out, &ids_out), "routing");
    check(fusedmoe_plan_apply(plans[layer], &output, &input, &weights_in, &ids_in, workspace, NULL),
          "apply");
  }
}

int main(void) {
  static const int64_t kSteps[] = {16, 1, 1, 5, 0, 1}; /* a prompt, then decoding */
  static uint16_t shared[kMaxTokens * kHidden];
  static uint16_t allocated[kMaxTokens * kHidden];
  fusedmoe_workspace_buffer* buffer = NULL;
  fusedmoe_workspace workspace;
  int64_t bytes = 0;
  int64_t alignment = 0;
  uint64_t version = 0;
  size_t i;
  int layer;
  for (layer = 0; layer < kLayers; ++layer) {
    fill_bf16(w13[layer], sizeof w13[layer] / sizeof w13[layer][0], 0.2F);
    fill_bf16(w2[layer], sizeof w2[layer] / sizeof w2[layer][0], 0.2F);
    load(layer);
  }
  /* Sized once for the largest step; once locked, growth would be an error. */
  check(fusedmoe_plan_workspace_size(plans[0], kMaxTokens, &bytes, &alignment), "size");
  check(fusedmoe_workspace_buffer_create(NULL, bytes, alignment, &buffer), "workspace");
  check(fusedmoe_workspace_buffer_lock(buffer), "lock");
  fusedmoe_workspace_init(&workspace);
  check(fusedmoe_workspace_buffer_view(buffer, &workspace), "view");

  for (i = 0; i < sizeof kSteps / sizeof kSteps[0]; ++i) {
    int same;
    if (i == 3) { /* new weights for one layer, packed over the old ones */
      fill_bf16(w2[2], sizeof w2[2] / sizeof w2[2][0], 0.2F);
      load(2);
    }
    fill_bf16(shared, sizeof shared / sizeof shared[0], 1.0F);
    memcpy(allocated, shared, sizeof shared);
    for (layer = 0; layer < kLayers; ++layer) {
      int j;
      for (j = 0; j < kMaxTokens * kExperts; ++j) logits[layer][j] = random_value(4.0F);
    }
    step(shared, kSteps[i], &workspace);
    step(allocated, kSteps[i], NULL); /* no workspace: each call allocates */
    same = memcmp(shared, allocated, sizeof shared) == 0;
    printf("step %d: %2d tokens through %d layers, %s\n", (int)i, (int)kSteps[i], (int)kLayers,
           same ? "bits equal to per-call scratch" : "BITS DIFFER");
    if (!same) return 1;
  }
  check(fusedmoe_plan_weights_version(plans[2], &version), "version");
  printf("one workspace of %lld bytes for %d layers; layer 2 has weights version %llu\n",
         (long long)bytes, (int)kLayers, (unsigned long long)version);
  for (layer = 0; layer < kLayers; ++layer) fusedmoe_plan_destroy(plans[layer]);
  fusedmoe_workspace_buffer_destroy(buffer);
  return 0;
}
