/* The C ABI: everything that the C++ headers offer, for C99, C++ and foreign function interfaces.
 * The contracts (shapes, overlap, threads, chunking) are those of fused_moe.h and workspace.h.
 *
 * Status. Every function that can fail returns a fusedmoe_status: FUSEDMOE_OK or the code of the
 * error, whose text fusedmoe_last_error() holds for the calling thread. No exception leaves a
 * function, and none that a callback throws passes through. A null pointer, an enum value or a
 * struct_size that is wrong is refused by name with FUSEDMOE_ERROR_INVALID_ARGUMENT. After an
 * error, out-parameters hold what they held before, but for handles, which become null.
 *
 * Structs. `struct_size` comes first in every struct and is its sizeof as the caller compiled it;
 * the *_init functions set it and the defaults. A smaller struct (an older caller) is accepted, and
 * the fields that it lacks take their defaults; so is a larger one (a newer caller) whose unknown
 * tail is all zero bytes. A struct never embeds another one but points to it, so that each can
 * grow; such a pointer may be null where the comment names a default. Fields called `reserved` are
 * 0. What a struct points to is read during the call only, unless a comment says otherwise.
 *
 * Text out. (text, text_bytes, text_needed): the text is cut to text_bytes and always ends in a NUL
 * byte; *text_needed becomes what the whole needs, the NUL byte included. text may be null when
 * text_bytes is 0, and text_needed may be null. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "fusedmoe/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status ---------------------------------------------------------------------------------- */

typedef int32_t fusedmoe_status;

enum {
  FUSEDMOE_OK = 0,
  FUSEDMOE_ERROR_INVALID_ARGUMENT = 1, /* nothing was written */
  FUSEDMOE_ERROR_UNSUPPORTED = 2,
  FUSEDMOE_ERROR_STALE_WEIGHTS = 3, /* call fusedmoe_plan_refresh() */
  FUSEDMOE_ERROR_WORKSPACE_TOO_SMALL = 4,
  FUSEDMOE_ERROR_BUSY = 5,
  FUSEDMOE_ERROR_OUT_OF_MEMORY = 6,
  FUSEDMOE_ERROR_DEVICE = 7,
  FUSEDMOE_ERROR_IO = 8,
  FUSEDMOE_ERROR_INTERNAL = 9
};

/* The text of the last error on this thread, "" when there was none; at most 1023 bytes, longer
 * texts are cut. Never null; valid until the next failing call on this thread. A call that
 * succeeds leaves it as it is. */
FUSEDMOE_EXPORT const char* fusedmoe_last_error(void);

/* "ok", "invalid_argument" and so on; "unknown" for any other value. */
FUSEDMOE_EXPORT const char* fusedmoe_status_name(fusedmoe_status status);

/* The version of the library, "major.minor.patch". */
FUSEDMOE_EXPORT const char* fusedmoe_version(void);

/* ---- enums: int32_t in structs and parameters ------------------------------------------------ */

/* Element types of activations, ids and routing (DType). */
enum {
  FUSEDMOE_DTYPE_UNSET = -1, /* only where a comment allows it */
  FUSEDMOE_DTYPE_F32 = 0,
  FUSEDMOE_DTYPE_F16 = 1,
  FUSEDMOE_DTYPE_BF16 = 2,
  FUSEDMOE_DTYPE_I32 = 3,
  FUSEDMOE_DTYPE_I64 = 4,
  FUSEDMOE_DTYPE_F64 = 5,
  FUSEDMOE_DTYPE_I8 = 6,
  FUSEDMOE_DTYPE_I16 = 7,
  FUSEDMOE_DTYPE_U8 = 8
};

/* Formulas in config.h (Activation). */
enum {
  FUSEDMOE_ACTIVATION_SILU = 0,
  FUSEDMOE_ACTIVATION_GELU = 1,
  FUSEDMOE_ACTIVATION_GELU_TANH = 2,
  FUSEDMOE_ACTIVATION_SWIGLUOAI = 3,
  FUSEDMOE_ACTIVATION_SWIGLUSTEP = 4,
  FUSEDMOE_ACTIVATION_SITU = 5,
  FUSEDMOE_ACTIVATION_RELU2 = 6
};

/* How gate and up rows lie in w13 (GateUpLayout). */
enum { FUSEDMOE_GATE_UP_HALVES = 0, FUSEDMOE_GATE_UP_INTERLEAVED = 1 };

/* Which of the two comes first (GateUpOrder). */
enum { FUSEDMOE_GATE_UP_GATE_FIRST = 0, FUSEDMOE_GATE_UP_UP_FIRST = 1 };

/* DeviceKind. */
enum { FUSEDMOE_DEVICE_CPU = 0, FUSEDMOE_DEVICE_CUDA = 1, FUSEDMOE_DEVICE_XPU = 2 };

/* The constructors of ExpertMap. */
enum {
  FUSEDMOE_EXPERT_MAP_IDENTITY = 0,
  FUSEDMOE_EXPERT_MAP_LINEAR = 1,
  FUSEDMOE_EXPERT_MAP_ROUND_ROBIN = 2,
  FUSEDMOE_EXPERT_MAP_EXPLICIT = 3
};

/* ComputeMode. */
enum { FUSEDMOE_MODE_A16 = 0, FUSEDMOE_MODE_A8 = 1 };

/* WeightStorage. */
enum {
  FUSEDMOE_STORAGE_OWN = 0,
  FUSEDMOE_STORAGE_BORROWED = 1,
  FUSEDMOE_STORAGE_CALLER = 2,
  FUSEDMOE_STORAGE_ADOPT = 3
};

/* StalePolicy. */
enum { FUSEDMOE_STALE_RAISE = 0, FUSEDMOE_STALE_REFRESH = 1 };

/* RefreshWait. */
enum { FUSEDMOE_REFRESH_WAIT = 0, FUSEDMOE_REFRESH_NO_WAIT = 1 };

/* How weights are stored (WeightFormat). */
enum {
  FUSEDMOE_FORMAT_F32 = 0,
  FUSEDMOE_FORMAT_F16 = 1,
  FUSEDMOE_FORMAT_BF16 = 2,
  FUSEDMOE_FORMAT_FP8_E4M3 = 3,
  FUSEDMOE_FORMAT_FP8_E5M2 = 4,
  FUSEDMOE_FORMAT_MXFP8 = 5,
  FUSEDMOE_FORMAT_MXFP4 = 6,
  FUSEDMOE_FORMAT_NVFP4 = 7,
  FUSEDMOE_FORMAT_INT8 = 8,
  FUSEDMOE_FORMAT_INT4 = 9,
  FUSEDMOE_FORMAT_Q4_K = 10,
  FUSEDMOE_FORMAT_Q5_K = 11,
  FUSEDMOE_FORMAT_Q6_K = 12
};

/* Order of a weight's dimensions (WeightLayout). */
enum { FUSEDMOE_WEIGHT_LAYOUT_NK = 0, FUSEDMOE_WEIGHT_LAYOUT_KN = 1 };

/* What one scale covers (ScaleLayout). */
enum {
  FUSEDMOE_SCALE_LAYOUT_NONE = 0,
  FUSEDMOE_SCALE_LAYOUT_TENSOR = 1,
  FUSEDMOE_SCALE_LAYOUT_CHANNEL = 2,
  FUSEDMOE_SCALE_LAYOUT_GROUP = 3,
  FUSEDMOE_SCALE_LAYOUT_BLOCK = 4
};

/* Gate and up in one w13, quantised apart: scales per tensor and global scales are [E, 2], block
 * scales have ceil(N / 2 / block_n) rows for each (ScaleParts). */
enum {
  FUSEDMOE_SCALE_PARTS_ONE = 0,
  FUSEDMOE_SCALE_PARTS_HALVES = 1,     /* the first N / 2 rows, then the others */
  FUSEDMOE_SCALE_PARTS_INTERLEAVED = 2 /* even rows, odd rows; not for block */
};

/* ScaleType. */
enum {
  FUSEDMOE_SCALE_F32 = 0,
  FUSEDMOE_SCALE_F16 = 1,
  FUSEDMOE_SCALE_BF16 = 2,
  FUSEDMOE_SCALE_E8M0 = 3,
  FUSEDMOE_SCALE_E4M3 = 4
};

/* From a logit to an expert's score (ScoreFunction). */
enum {
  FUSEDMOE_SCORE_UNSET = -1, /* only where a comment allows it */
  FUSEDMOE_SCORE_SOFTMAX = 0,
  FUSEDMOE_SCORE_SOFTMAX_OF_CHOSEN = 1,
  FUSEDMOE_SCORE_SIGMOID = 2,
  FUSEDMOE_SCORE_SOFTPLUS_SQRT = 3
};

/* What a token's weights are divided by (Renormalise). */
enum {
  FUSEDMOE_RENORMALISE_NONE = 0,
  FUSEDMOE_RENORMALISE_SUM = 1,
  FUSEDMOE_RENORMALISE_SUM_EPSILON = 2,
  FUSEDMOE_RENORMALISE_MAX_SUM_EPSILON = 3
};

/* What makes a group of experts good (GroupScore). */
enum { FUSEDMOE_GROUP_SCORE_SUM_OF_TWO_BEST = 0, FUSEDMOE_GROUP_SCORE_BEST = 1 };

/* Names of values as messages print them, for example "bfloat16"; "unknown" outside the enum. */
FUSEDMOE_EXPORT const char* fusedmoe_dtype_name(int32_t dtype);
FUSEDMOE_EXPORT const char* fusedmoe_activation_name(int32_t activation);
FUSEDMOE_EXPORT const char* fusedmoe_gate_up_layout_name(int32_t layout);
FUSEDMOE_EXPORT const char* fusedmoe_gate_up_order_name(int32_t order);
FUSEDMOE_EXPORT const char* fusedmoe_weight_format_name(int32_t format);
FUSEDMOE_EXPORT const char* fusedmoe_weight_layout_name(int32_t layout);
FUSEDMOE_EXPORT const char* fusedmoe_score_function_name(int32_t function);
FUSEDMOE_EXPORT const char* fusedmoe_renormalise_name(int32_t rule);
FUSEDMOE_EXPORT const char* fusedmoe_group_score_name(int32_t score);
/* Bytes per element of a dtype; 0 outside the enum. */
FUSEDMOE_EXPORT int64_t fusedmoe_dtype_bytes(int32_t dtype);
/* 1 when w13 holds gate and up, 0 when it holds one projection or outside the enum. */
FUSEDMOE_EXPORT int32_t fusedmoe_activation_is_gated(int32_t activation);

/* ---- the layer ------------------------------------------------------------------------------- */

typedef struct fusedmoe_activation_config {
  size_t struct_size; /* up to alpha is mandatory */
  int32_t kind;       /* FUSEDMOE_ACTIVATION_* */
  float alpha;        /* swigluoai; default 1.702 */
  float limit;        /* swigluoai, swiglustep; > 0, infinity is none; default 7 */
  float beta;         /* situ: required there, finite and > 0; default 0 */
  float linear_beta;  /* situ: 0 (default) leaves u as it is */
  int32_t reserved;
} fusedmoe_activation_config;

/* The logical layer. Sizes are counts of elements; any positive value is legal. */
typedef struct fusedmoe_moe_config {
  size_t struct_size; /* up to top_k is mandatory */
  int64_t hidden_size;
  int64_t intermediate_size;
  int64_t num_experts;                          /* global, also under expert parallelism */
  int64_t top_k;                                /* experts per token, at most num_experts */
  const fusedmoe_activation_config* activation; /* null (default) = silu */
  int32_t dtype;                                /* of hidden: f32, f16 or bf16 (default) */
  int32_t output_dtype;                         /* FUSEDMOE_DTYPE_UNSET (default) = dtype */
  int32_t gate_up_layout;                       /* FUSEDMOE_GATE_UP_*; default halves */
  int32_t gate_up_order;                        /* default gate first */
  float clamp_limit;                            /* before silu and the gelus; 0 (default) = none */
  int32_t apply_router_weight_on_input;         /* 0 (default) or 1 */
} fusedmoe_moe_config;

typedef struct fusedmoe_device {
  size_t struct_size;   /* up to index is mandatory */
  int32_t kind;         /* FUSEDMOE_DEVICE_* */
  int32_t index;        /* default 0 */
  const char* platform; /* xpu: a platform asked for by name; null (default) = any */
} fusedmoe_device;

/* Global expert id -> local expert id. */
typedef struct fusedmoe_expert_map {
  size_t struct_size; /* up to reserved is mandatory */
  int32_t kind;       /* FUSEDMOE_EXPERT_MAP_* */
  int32_t rank;       /* linear and round_robin: 0 <= rank < size */
  int32_t size;       /* default 1 */
  int32_t reserved;
  const int32_t* map; /* explicit: [map_size], local id or -1 */
  int64_t map_size;   /* explicit: entries, = num_experts */
} fusedmoe_expert_map;

/* An engine's own threads (ThreadRunner). run calls body(argument, i) once for each i in
 * [0, count), on any threads, and returns when all have returned. It is called on the thread that
 * calls the plan: on several at once when several do. */
typedef struct fusedmoe_thread_runner {
  size_t struct_size; /* up to gang is mandatory */
  void (*run)(void* self, int count, void (*body)(void* argument, int index), void* argument);
  void* self;
  int32_t num_threads; /* how many bodies it can keep busy; default 1 */
  int32_t gang;        /* 1: all bodies of a run are executed at once; default 0 */
} fusedmoe_thread_runner;

/* How a plan runs the layer. A null pointer to it means all defaults. */
typedef struct fusedmoe_plan_options {
  size_t struct_size;
  const fusedmoe_device* device;         /* null (default) = CPU */
  const fusedmoe_expert_map* expert_map; /* null (default) = every expert is local */
  const char* isa;                       /* the best instruction set to use; null = no limit */
  int32_t mode;                          /* FUSEDMOE_MODE_*; default a16 */
  int32_t batch_invariant;               /* 0, 1, or -1 (default) = the device's default */
  int32_t max_threads;                   /* 0 (default) = those of runner, or without one the
                                            affinity mask and cgroup limit */
  int32_t weight_storage;                /* FUSEDMOE_STORAGE_*; default own */
  void* storage;                         /* caller and adopt: outlives the plan; default null */
  int64_t storage_bytes;                 /* at least fusedmoe_packed_weights_size() */
  int32_t on_stale;                      /* FUSEDMOE_STALE_*; default raise */
  int32_t counters;                      /* 0 (default) or 1: see fusedmoe_plan_counters() */
  const fusedmoe_thread_runner* runner;  /* CPU: an engine's threads, for create, refresh, and apply
                                            where its context brings none; the plan then starts
                                            none. Copied, but self outlives the plan; null (default)
                                            = the library's own threads */
} fusedmoe_plan_options;

/* ---- weights --------------------------------------------------------------------------------- */

typedef struct fusedmoe_weight_scales {
  size_t struct_size;      /* up to layout is mandatory */
  const void* data;        /* shape by layout; null when a source states shapes only */
  int32_t type;            /* FUSEDMOE_SCALE_F32, ... */
  int32_t layout;          /* FUSEDMOE_SCALE_LAYOUT_* */
  int64_t group_size;      /* elements along K, for group */
  int64_t block_n;         /* elements along N, for block */
  int64_t block_k;         /* elements along K, for block */
  int32_t transposed;      /* group and block, 1: [E, along K, along N] */
  int32_t parts;           /* FUSEDMOE_SCALE_PARTS_* */
  const void* zero_points; /* int4: u8, shape of the scales; null (default) = 8 */
  const float* global;     /* nvfp4: [E], or [E, 2] when there are two parts */
} fusedmoe_weight_scales;

/* One stack of matrices: [experts, outputs, inputs] (nk) or [experts, inputs, outputs] (kn). */
typedef struct fusedmoe_weight_tensor {
  size_t struct_size; /* up to inputs is mandatory */
  const void* data;   /* any alignment */
  int32_t format;     /* FUSEDMOE_FORMAT_*; default bf16 */
  int32_t layout;     /* FUSEDMOE_WEIGHT_LAYOUT_*; default nk */
  int64_t experts;
  int64_t outputs;                      /* N */
  int64_t inputs;                       /* K */
  int64_t row_stride;                   /* elements between rows as stored; 0 (default) = dense */
  int64_t expert_stride;                /* elements between experts; 0 (default) = dense */
  const fusedmoe_weight_scales* scales; /* null (default) = none */
} fusedmoe_weight_tensor;

/* [experts, size], dense; f32 (default), f16 or bf16. */
typedef struct fusedmoe_bias_tensor {
  size_t struct_size; /* all of it is mandatory */
  const void* data;
  int32_t dtype;
  int32_t reserved;
  int64_t experts;
  int64_t size;
} fusedmoe_bias_tensor;

typedef struct fusedmoe_expert_weights fusedmoe_expert_weights;

/* Yields one local expert: sets the fields of *expert, which arrives initialised with the
 * struct_size of the struct that carried the callback; its tensors hold one expert (experts = 1).
 * What they point to lives until the next call. Called in ascending order, once per local expert,
 * on the thread that calls create or refresh. Returns FUSEDMOE_OK, or an error code after writing
 * a text to message ([message_bytes], may be left empty); create or refresh then fails with that
 * code and a text that ends in the message. */
typedef fusedmoe_status (*fusedmoe_weights_source)(void* self, int64_t local_expert,
                                                   fusedmoe_expert_weights* expert, char* message,
                                                   size_t message_bytes);

/* The weights of all local experts, in order of their local id. The memory that data pointers name
 * is the caller's, and lives as long as the call that takes them; with borrowed storage or
 * FUSEDMOE_STALE_REFRESH it lives as long as the plan, and then so do source and self. */
struct fusedmoe_expert_weights {
  size_t struct_size;                   /* up to w2 is mandatory */
  const fusedmoe_weight_tensor* w13;    /* [E, 2I, H]; [E, I, H] without a gate or with w13_up */
  const fusedmoe_weight_tensor* w2;     /* [E, H, I] */
  const fusedmoe_weight_tensor* w13_up; /* [E, I, H]; null (default) = up rows are in w13 */
  const fusedmoe_bias_tensor* w13_bias; /* [E, 2I], order as the rows of w13; null = none */
  const fusedmoe_bias_tensor* w2_bias;  /* [E, H]; null = none */
  const float* w13_input_scales;        /* static activation scales: not used in a16 */
  const float* w2_input_scales;         /* likewise */
  fusedmoe_weights_source source;       /* null (default) = the tensors hold the data; else they
                                           state shapes, formats and layouts, with null data */
  void* self;                           /* handed to source */
  const uint64_t* version;              /* 8-byte aligned counter, or null (default). Its owner
                                           bumps it, atomically, after changing the memory;
                                           apply reads it, so it lives as long as the plan */
};

/* Adds 1 to the counter, atomically and after all earlier writes of this thread (C99 has no
 * atomics). Refuses null and a counter that is not 8-byte aligned. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_version_bump(uint64_t* counter);

/* ---- arguments of apply ---------------------------------------------------------------------- */

/* [rows, columns]; the last dimension is contiguous. */
typedef struct fusedmoe_matrix {
  size_t struct_size; /* up to columns is mandatory */
  void* data;
  int32_t dtype; /* FUSEDMOE_DTYPE_* */
  int32_t reserved;
  int64_t rows;
  int64_t columns;
  int64_t row_stride; /* in elements, at least columns; 0 (default) = columns */
} fusedmoe_matrix;

typedef struct fusedmoe_const_matrix {
  size_t struct_size; /* up to columns is mandatory */
  const void* data;
  int32_t dtype; /* FUSEDMOE_DTYPE_* */
  int32_t reserved;
  int64_t rows;
  int64_t columns;
  int64_t row_stride; /* in elements, at least columns; 0 (default) = columns */
} fusedmoe_const_matrix;

/* A view of scratch: one span (workspace2 alone) or two. */
typedef struct fusedmoe_workspace {
  size_t struct_size; /* up to workspace2_bytes is mandatory */
  void* workspace2;
  int64_t workspace2_bytes;
  void* workspace13; /* null (default) when there is one span */
  int64_t workspace13_bytes;
} fusedmoe_workspace;

/* What one call brings with it. A null pointer to it means all defaults. */
typedef struct fusedmoe_apply_context {
  size_t struct_size;
  const fusedmoe_thread_runner* runner; /* CPU; null (default) = the plan's: that of its options, or
                                           the library's own threads */
  void* queue;                          /* a GPU's stream or queue; default null */
  const int32_t* expert_map;            /* [expert_map_size], local id or -1; null (default) =
                                           the plan's. As many local experts as the plan */
  int64_t expert_map_size;              /* entries, = num_experts */
} fusedmoe_apply_context;

/* Which experts a token chooses, and with which weights; routing.h says how families fill it in. */
typedef struct fusedmoe_routing_config {
  size_t struct_size; /* up to top_k is mandatory */
  int64_t top_k;      /* 1 .. num_experts */
  /* [1, num_experts], f32, f16 or bf16; added to the scores while choosing; null (default) = none
   */
  const fusedmoe_const_matrix* selection_bias;
  int32_t score_function; /* FUSEDMOE_SCORE_*; UNSET (default) where the function implies it */
  int32_t renormalise;    /* FUSEDMOE_RENORMALISE_*; default none */
  float epsilon;          /* of the rules with one; finite and > 0; default 1e-20 */
  float scaling_factor;   /* multiplies the weights, last; finite and > 0; default 1 */
  int64_t num_groups;     /* divides num_experts; default 1 */
  int64_t topk_group;     /* groups that stay; default 1 */
  int32_t group_score;    /* FUSEDMOE_GROUP_SCORE_*; default sum of the two best */
  int32_t reserved;
} fusedmoe_routing_config;

/* ---- initialisers: struct_size and defaults -------------------------------------------------- */
/* Inline, so that struct_size and the bytes written are those of the caller's header. */

static inline void fusedmoe_activation_config_init(fusedmoe_activation_config* activation) {
  memset(activation, 0, sizeof *activation);
  activation->struct_size = sizeof *activation;
  activation->alpha = 1.702F;
  activation->limit = 7.0F;
}

static inline void fusedmoe_moe_config_init(fusedmoe_moe_config* config) {
  memset(config, 0, sizeof *config);
  config->struct_size = sizeof *config;
  config->dtype = FUSEDMOE_DTYPE_BF16;
  config->output_dtype = FUSEDMOE_DTYPE_UNSET;
}

static inline void fusedmoe_device_init(fusedmoe_device* device) {
  memset(device, 0, sizeof *device);
  device->struct_size = sizeof *device;
}

static inline void fusedmoe_expert_map_init(fusedmoe_expert_map* map) {
  memset(map, 0, sizeof *map);
  map->struct_size = sizeof *map;
  map->size = 1;
}

static inline void fusedmoe_plan_options_init(fusedmoe_plan_options* options) {
  memset(options, 0, sizeof *options);
  options->struct_size = sizeof *options;
  options->batch_invariant = -1;
}

static inline void fusedmoe_weight_scales_init(fusedmoe_weight_scales* scales) {
  memset(scales, 0, sizeof *scales);
  scales->struct_size = sizeof *scales;
}

static inline void fusedmoe_weight_tensor_init(fusedmoe_weight_tensor* tensor) {
  memset(tensor, 0, sizeof *tensor);
  tensor->struct_size = sizeof *tensor;
  tensor->format = FUSEDMOE_FORMAT_BF16;
}

static inline void fusedmoe_bias_tensor_init(fusedmoe_bias_tensor* bias) {
  memset(bias, 0, sizeof *bias);
  bias->struct_size = sizeof *bias;
}

static inline void fusedmoe_expert_weights_init(fusedmoe_expert_weights* weights) {
  memset(weights, 0, sizeof *weights);
  weights->struct_size = sizeof *weights;
}

static inline void fusedmoe_matrix_init(fusedmoe_matrix* matrix) {
  memset(matrix, 0, sizeof *matrix);
  matrix->struct_size = sizeof *matrix;
}

static inline void fusedmoe_const_matrix_init(fusedmoe_const_matrix* matrix) {
  memset(matrix, 0, sizeof *matrix);
  matrix->struct_size = sizeof *matrix;
}

static inline void fusedmoe_workspace_init(fusedmoe_workspace* workspace) {
  memset(workspace, 0, sizeof *workspace);
  workspace->struct_size = sizeof *workspace;
}

static inline void fusedmoe_thread_runner_init(fusedmoe_thread_runner* runner) {
  memset(runner, 0, sizeof *runner);
  runner->struct_size = sizeof *runner;
  runner->num_threads = 1;
}

static inline void fusedmoe_apply_context_init(fusedmoe_apply_context* context) {
  memset(context, 0, sizeof *context);
  context->struct_size = sizeof *context;
}

static inline void fusedmoe_routing_config_init(fusedmoe_routing_config* config) {
  memset(config, 0, sizeof *config);
  config->struct_size = sizeof *config;
  config->score_function = FUSEDMOE_SCORE_UNSET;
  config->epsilon = 1e-20F;
  config->scaling_factor = 1.0F;
  config->num_groups = 1;
  config->topk_group = 1;
}

/* A dense matrix in one expression. */
static inline fusedmoe_matrix fusedmoe_matrix_of(void* data, int32_t dtype, int64_t rows,
                                                 int64_t columns) {
  fusedmoe_matrix matrix;
  fusedmoe_matrix_init(&matrix);
  matrix.data = data;
  matrix.dtype = dtype;
  matrix.rows = rows;
  matrix.columns = columns;
  return matrix;
}

static inline fusedmoe_const_matrix fusedmoe_const_matrix_of(const void* data, int32_t dtype,
                                                             int64_t rows, int64_t columns) {
  fusedmoe_const_matrix matrix;
  fusedmoe_const_matrix_init(&matrix);
  matrix.data = data;
  matrix.dtype = dtype;
  matrix.rows = rows;
  matrix.columns = columns;
  return matrix;
}

/* ---- devices and expert maps ----------------------------------------------------------------- */

/* How many backends the library knows, whether they can be used here or not. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_num_devices(int64_t* count);

/* Backend `index` of [0, count): *available becomes 1 when plans can be built there; reason says
 * why not, or what it is. Both texts as described at the top. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_device_info(int64_t index, int32_t* available, char* name,
                                                     size_t name_bytes, size_t* name_needed,
                                                     char* reason, size_t reason_bytes,
                                                     size_t* reason_needed);

/* "cpu", "cuda:1", "xpu:pocl". */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_device_to_text(const fusedmoe_device* device, char* text,
                                                        size_t text_bytes, size_t* text_needed);

/* The reverse. device->platform becomes null, or points to the copy of the name in platform
 * ([platform_bytes]; a buffer that is too small is refused). */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_device_parse(const char* text, fusedmoe_device* device,
                                                      char* platform, size_t platform_bytes);

/* The whole table: table ([num_experts]) becomes the local id or -1 of each global id. Refuses a
 * map of another length, a local id out of range, or two global ids on one local id. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_expert_map_resolve(const fusedmoe_expert_map* map,
                                                            int64_t num_experts, int32_t* table);

/* ---- plan ------------------------------------------------------------------------------------ */

/* A plan may be shared: any number of threads may apply it at once, each with its own workspace. */
typedef struct fusedmoe_plan fusedmoe_plan;

/* Whether create would accept these: *supported becomes 1 or 0, and reason says why not. Whatever
 * is wrong with config, weights or options is an answer, not an error. Reads shapes and formats,
 * never weights. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_supports(const fusedmoe_moe_config* config,
                                                  const fusedmoe_expert_weights* weights,
                                                  const fusedmoe_plan_options* options,
                                                  int32_t* supported, char* reason,
                                                  size_t reason_bytes, size_t* reason_needed);

/* Bytes (and their alignment, may be null) that options->storage must hold for caller and adopt. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_packed_weights_size(const fusedmoe_moe_config* config,
                                                             const fusedmoe_expert_weights* weights,
                                                             const fusedmoe_plan_options* options,
                                                             int64_t* bytes, int64_t* alignment);

/* Builds a plan; *plan is to be given to fusedmoe_plan_destroy(). Fails with invalid_argument or
 * unsupported and the reason that fusedmoe_supports() gives, out_of_memory, or what a source
 * returns. Safe from any thread. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_plan_create(const fusedmoe_moe_config* config,
                                                     const fusedmoe_expert_weights* weights,
                                                     const fusedmoe_plan_options* options,
                                                     fusedmoe_plan** plan);

/* No call may be running on the plan. Null is allowed. */
FUSEDMOE_EXPORT void fusedmoe_plan_destroy(fusedmoe_plan* plan);

/* Scratch in bytes for one call on num_tokens: exact, a pure host function, non-decreasing.
 * alignment (of the first byte, a power of two) may be null here and below. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_plan_workspace_size(const fusedmoe_plan* plan,
                                                             int64_t num_tokens, int64_t* bytes,
                                                             int64_t* alignment);
/* workspace_size(n) = fixed + per_token * n, exactly; bytes. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_plan_workspace_formula(const fusedmoe_plan* plan,
                                                                int64_t* fixed, int64_t* per_token,
                                                                int64_t* alignment);
/* Enough for any number of tokens: apply then works through them in chunks. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_plan_min_workspace_size(const fusedmoe_plan* plan,
                                                                 int64_t* bytes,
                                                                 int64_t* alignment);
/* The same scratch as two spans. alignment holds for both. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_plan_workspace_sizes_13_2(const fusedmoe_plan* plan,
                                                                   int64_t num_tokens,
                                                                   int64_t* workspace13_bytes,
                                                                   int64_t* workspace2_bytes,
                                                                   int64_t* alignment);

/* output[t] = sum over k of topk_weights[t, k] * expert(topk_ids[t, k])(hidden[t]).
 *
 *   output        [num_tokens, hidden_size], config.output_dtype; may be exactly `hidden`
 *   hidden        [num_tokens, hidden_size], config.dtype
 *   topk_weights  [num_tokens, top_k], f32, f16 or bf16
 *   topk_ids      [num_tokens, top_k], i32 or i64, global expert ids; -1 skips the slot
 *   workspace     one or two spans; null = apply allocates for this call alone
 *   context       null = defaults
 *
 * Fails with invalid_argument (nothing was written), workspace_too_small, busy (the workspace is in
 * use) or stale_weights. num_tokens = 0 succeeds and reads nothing. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_plan_apply(
    const fusedmoe_plan* plan, const fusedmoe_matrix* output, const fusedmoe_const_matrix* hidden,
    const fusedmoe_const_matrix* topk_weights, const fusedmoe_const_matrix* topk_ids,
    const fusedmoe_workspace* workspace, const fusedmoe_apply_context* context);

/* Reads all weights again, into the same memory. Shapes and formats are those of create. wait:
 * FUSEDMOE_REFRESH_WAIT, or NO_WAIT to fail with busy while an apply is running. A refresh that
 * fails while writing leaves the plan stale; a refused argument changes nothing. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_plan_refresh(fusedmoe_plan* plan,
                                                      const fusedmoe_expert_weights* weights,
                                                      int32_t wait);
/* The same for some experts: weights hold one expert per entry of local_experts ([count]), in that
 * order. local_experts may be null when count is 0. */
FUSEDMOE_EXPORT fusedmoe_status
fusedmoe_plan_refresh_experts(fusedmoe_plan* plan, const int64_t* local_experts, int64_t count,
                              const fusedmoe_expert_weights* weights, int32_t wait);
/* Gives the memory of own packed weights back (sleep). Until a refresh, apply fails with
 * stale_weights. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_plan_release_weights(fusedmoe_plan* plan, int32_t wait);
/* Starts at 1 and counts successful refreshes. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_plan_weights_version(const fusedmoe_plan* plan,
                                                              uint64_t* version);

/* What was chosen and why, one line per stage. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_plan_describe(const fusedmoe_plan* plan, char* text,
                                                       size_t text_bytes, size_t* text_needed);
/* Since the plan was built or its counters were reset; all zero unless options.counters was 1.
 * rows_per_expert ([capacity]) takes as many of the num_local_experts counts as it holds. Every
 * out-parameter may be null. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_plan_counters(const fusedmoe_plan* plan, uint64_t* calls,
                                                       uint64_t* tokens, uint64_t* rows_per_expert,
                                                       int64_t capacity);
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_plan_reset_counters(fusedmoe_plan* plan);
/* Faults that a device found without stopping: fails with FUSEDMOE_ERROR_DEVICE. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_plan_check_faults(const fusedmoe_plan* plan);

/* What the plan was built with. The caller sets struct_size; at most that many bytes are written.
 * config->activation and device->platform point into the plan. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_plan_config(const fusedmoe_plan* plan,
                                                     fusedmoe_moe_config* config);
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_plan_device(const fusedmoe_plan* plan,
                                                     fusedmoe_device* device);
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_plan_num_local_experts(const fusedmoe_plan* plan,
                                                                int64_t* count);
/* Bytes of packed weights, 0 when borrowed. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_plan_weight_bytes(const fusedmoe_plan* plan,
                                                           int64_t* bytes);
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_plan_num_threads(const fusedmoe_plan* plan,
                                                          int32_t* count);

/* ---- owning workspaces ----------------------------------------------------------------------- */

/* Owning scratch on a device. Not for concurrent use of its own functions. */
typedef struct fusedmoe_workspace_buffer fusedmoe_workspace_buffer;

/* device: null = CPU. bytes may be 0; alignment is a power of two. */
FUSEDMOE_EXPORT fusedmoe_status
fusedmoe_workspace_buffer_create(const fusedmoe_device* device, int64_t bytes, int64_t alignment,
                                 fusedmoe_workspace_buffer** buffer);
/* Null is allowed. */
FUSEDMOE_EXPORT void fusedmoe_workspace_buffer_destroy(fusedmoe_workspace_buffer* buffer);
/* Grows to at least bytes; never shrinks, contents are not kept. Fails with workspace_too_small
 * once locked, with out_of_memory when there is none. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_workspace_buffer_reserve(fusedmoe_workspace_buffer* buffer,
                                                                  int64_t bytes, int64_t alignment);
/* From now on growth fails. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_workspace_buffer_lock(fusedmoe_workspace_buffer* buffer);
/* *locked becomes 0 or 1. */
FUSEDMOE_EXPORT fusedmoe_status
fusedmoe_workspace_buffer_locked(const fusedmoe_workspace_buffer* buffer, int32_t* locked);
/* The view that apply takes, valid until the buffer grows or is destroyed. The caller sets
 * struct_size. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_workspace_buffer_view(
    const fusedmoe_workspace_buffer* buffer, fusedmoe_workspace* workspace);
/* The caller sets struct_size; device->platform points into the buffer. */
FUSEDMOE_EXPORT fusedmoe_status
fusedmoe_workspace_buffer_device(const fusedmoe_workspace_buffer* buffer, fusedmoe_device* device);

/* One buffer per lane (micro-batch, stream), each as large as the largest plan that registered.
 * Safe from any thread. */
typedef struct fusedmoe_workspace_pool fusedmoe_workspace_pool;

/* device: null = CPU. num_lanes > 0. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_workspace_pool_create(const fusedmoe_device* device,
                                                               int32_t num_lanes,
                                                               fusedmoe_workspace_pool** pool);
/* Null is allowed. */
FUSEDMOE_EXPORT void fusedmoe_workspace_pool_destroy(fusedmoe_workspace_pool* pool);
/* Makes every lane large enough for plan at max_tokens; fails with workspace_too_small once
 * locked. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_workspace_pool_register_plan(fusedmoe_workspace_pool* pool,
                                                                      const fusedmoe_plan* plan,
                                                                      int64_t max_tokens);
/* Allocates what is registered and refuses growth from now on. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_workspace_pool_lock(fusedmoe_workspace_pool* pool);
/* Lane `index` of [0, num_lanes); allocates it when it is not there yet. The caller sets
 * struct_size. One call of apply at a time per lane. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_workspace_pool_lane(fusedmoe_workspace_pool* pool,
                                                             int32_t index,
                                                             fusedmoe_workspace* workspace);
FUSEDMOE_EXPORT fusedmoe_status
fusedmoe_workspace_pool_num_lanes(const fusedmoe_workspace_pool* pool, int32_t* num_lanes);
FUSEDMOE_EXPORT fusedmoe_status
fusedmoe_workspace_pool_bytes_per_lane(const fusedmoe_workspace_pool* pool, int64_t* bytes);

/* ---- routing --------------------------------------------------------------------------------- */

/* Router logits -> topk_weights and topk_ids, on the CPU and the calling thread.
 *
 *   logits        [num_tokens, num_experts], f32, f16 or bf16
 *   topk_weights  [num_tokens, top_k], f32, f16 or bf16, rounded once
 *   topk_ids      [num_tokens, top_k], i32 or i64
 *
 * A row's experts are in descending order, ties go to the lower id, and ids are always in range and
 * distinct. Outputs overlap neither inputs nor each other. Fails with invalid_argument before
 * anything is written. num_tokens = 0 succeeds and reads nothing. route needs score_function. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_route(const fusedmoe_routing_config* config,
                                               const fusedmoe_const_matrix* logits,
                                               const fusedmoe_matrix* topk_weights,
                                               const fusedmoe_matrix* topk_ids);
/* Softmax over all experts, or over the chosen ones when score_function says so; no groups. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_topk_softmax(const fusedmoe_routing_config* config,
                                                      const fusedmoe_const_matrix* logits,
                                                      const fusedmoe_matrix* topk_weights,
                                                      const fusedmoe_matrix* topk_ids);
/* Sigmoid scores; no groups. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_topk_sigmoid(const fusedmoe_routing_config* config,
                                                      const fusedmoe_const_matrix* logits,
                                                      const fusedmoe_matrix* topk_weights,
                                                      const fusedmoe_matrix* topk_ids);
/* sqrt(softplus(logit)) scores; no groups. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_topk_softplus_sqrt(const fusedmoe_routing_config* config,
                                                            const fusedmoe_const_matrix* logits,
                                                            const fusedmoe_matrix* topk_weights,
                                                            const fusedmoe_matrix* topk_ids);
/* With groups; sigmoid unless score_function says otherwise. */
FUSEDMOE_EXPORT fusedmoe_status fusedmoe_grouped_topk(const fusedmoe_routing_config* config,
                                                      const fusedmoe_const_matrix* logits,
                                                      const fusedmoe_matrix* topk_weights,
                                                      const fusedmoe_matrix* topk_ids);

#ifdef __cplusplus
} /* extern "C" */
#endif
