// The schedule of the grouped GEMMs: every way of cutting the work into threads, blocks of rows,
// groups of panels and pieces of K gives the oracle's values and the same bits.
#include <functional>

#include "formats/format.h"
#include "fusedmoe/fusedmoe.h"
#include "kernel_inputs.h"
#include "reference/random_layer.h"
#include "reference/reference_moe.h"
#include "reference/tolerance.h"

namespace fusedmoe::cpu {
namespace {

// Runs the bodies one after the other: any number of "threads" on one, without barriers.
void run_in_order(void*, int count, void (*body)(void*, int), void* argument) {
  for (int i = count - 1; i >= 0; --i) body(argument, i);
}

std::vector<std::byte> apply(const FusedMoe& plan, RandomInput& input, int threads,
                             std::span<std::byte> workspace) {
  const ThreadRunner runner{&run_in_order, nullptr, threads, false};
  std::fill(workspace.begin(), workspace.end(), std::byte{0xff});
  input.dirty_output();
  plan.apply(input.output(), input.hidden(), input.topk_weights(), input.topk_ids(), workspace,
             {.runner = &runner});
  return input.output_bytes();
}

struct Shape {
  const char* name;
  std::int64_t hidden, inter, experts, top_k, tokens;
  Activation kind = Activation::silu;
};

// Each crosses a limit of the schedule.
constexpr Shape kShapes[] = {
    {"OnePanel", 5, 3, 2, 1, 9},
    {"MoreThreadsThanPanels", 61, 17, 3, 2, 70},
    {"ManyRowBlocks", 70, 40, 2, 2, 203},      // over 48 rows an expert, several times
    {"ManyPanelGroups", 600, 300, 2, 1, 7},    // over 16 panels in both GEMMs
    {"ManyPiecesOfK", 1601, 270, 1, 1, 48},    // over 1365 inputs with 48 rows, over 16 panels
    {"LongKFewRows", 17001, 19, 1, 1, 4},      // four rows are longer than their buffer
    {"LongIntermediate", 33, 17001, 1, 1, 4},  // the same in gemm2
    {"NoGate", 95, 77, 5, 3, 31, Activation::relu2},
};
constexpr int kMostThreads = 19;

class Schedule : public testing::TestWithParam<Shape> {};

TEST_P(Schedule, EveryCutOfTheWorkIsTheSameLayer) {
  const Shape& shape = GetParam();
  for (const DType dtype : {DType::bf16, DType::f32}) {
    const MoeConfig config{.hidden_size = shape.hidden,
                           .intermediate_size = shape.inter,
                           .num_experts = shape.experts,
                           .top_k = shape.top_k,
                           .activation = {shape.kind},
                           .dtype = dtype};
    const RandomWeights weights(config, shape.experts, {.w13_bias = true, .w2_bias = true}, 5);
    RandomInput input(config,
                      {.num_tokens = shape.tokens,
                       .hidden_padding = 3,
                       .output_padding = 5,
                       .skip_share = shape.experts > 1 ? 0.1 : 0.0,
                       .hot_share = 0.4},
                      6);
    const std::vector<double> expected = reference_moe(config, weights.view(), input.hidden(),
                                                       input.topk_weights(), input.topk_ids());
    const Errors limit = tolerance(WeightFormat::bf16, dtype, dtype, ComputeMode::a16);
    for (const CpuIsa isa : all_isas()) {
      if (!is_available(isa)) continue;
      std::vector<std::byte> first;
      for (const fusedmoe::WeightStorage storage :
           {fusedmoe::WeightStorage::own, fusedmoe::WeightStorage::borrowed}) {
        PlanOptions options;
        options.isa = to_string(isa);
        options.max_threads = kMostThreads;
        options.weight_storage = storage;
        const FusedMoe plan = FusedMoe::create(config, weights.view(), options);
        WorkspaceBuffer workspace(Device::cpu(), plan.workspace_size(shape.tokens));
        for (const int threads : {1, 2, 3, 7, kMostThreads}) {
          for (const std::int64_t at_once : {shape.tokens, shape.tokens / 2 + 1}) {
            const auto bytes = static_cast<std::size_t>(plan.workspace_size(at_once).bytes);
            const std::vector<std::byte> got =
                apply(plan, input, threads, workspace.span().first(bytes));
            if (first.empty()) {
              first = got;
              const Errors errors = compare(input.output(), expected);
              EXPECT_TRUE(within(errors, limit)) << errors.rel_l2 << " " << errors.max_error;
            }
            ASSERT_EQ(got, first) << to_string(isa) << ", " << threads << " threads, " << at_once
                                  << " tokens at once, "
                                  << (storage == fusedmoe::WeightStorage::own ? "packed"
                                                                              : "borrowed");
            ASSERT_TRUE(input.output_padding_untouched());
          }
        }
      }
    }
  }
}

std::string shape_name(const testing::TestParamInfo<Shape>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(Cuts, Schedule, testing::ValuesIn(kShapes), shape_name);

}  // namespace
}  // namespace fusedmoe::cpu
