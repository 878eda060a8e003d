// The schedule of the grouped GEMMs: every way of cutting the work into threads, blocks of rows,
// groups of panels and pieces of K gives the oracle's values and the same bits.
#include <algorithm>

#include "formats/format.h"
#include "fusedmoe/fusedmoe.h"
#include "kernel_inputs.h"
#include "reference/random_layer.h"
#include "reference/reference_moe.h"
#include "reference/tolerance.h"
#include "support/format_cases.h"
#include "support/guarded_buffer.h"

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

// Some tokens of an input and of its output.
struct Rows {
  ConstMatrixView hidden, topk_weights, topk_ids, output;

  Rows(const RandomInput& input, std::int64_t first, std::int64_t count)
      : hidden(part(input.hidden(), first, count)),
        topk_weights(part(input.topk_weights(), first, count)),
        topk_ids(part(input.topk_ids(), first, count)),
        output(part(ConstMatrixView(input.output()), first, count)) {}

 private:
  static ConstMatrixView part(ConstMatrixView view, std::int64_t first, std::int64_t count) {
    view.data = static_cast<const std::byte*>(view.data) +
                first * view.row_stride * bytes_per_element(view.dtype);
    view.rows = count;
    return view;
  }
};

struct Shape {
  const char* name;
  std::int64_t hidden, inter, experts, top_k, tokens;
  Activation kind = Activation::silu;
};

// Each crosses a limit of the schedule, for every instruction set: an expert's rows go in blocks of
// GemmInputs::max_rows (48, 96 or 256), accumulators in groups of 16 panels, and a block's loaded
// rows fill bytes_at_once (400 or 1056 KiB), or else K goes in pieces; of borrowed weights, by
// 1024.
constexpr Shape kShapes[] = {
    {"OnePanel", 5, 3, 2, 1, 9},
    {"MoreThreadsThanPanels", 61, 17, 3, 2, 70},
    {"ManyRowBlocks", 70, 40, 2, 2, 371},    // over 256 rows an expert
    {"ManyPanelGroups", 600, 300, 2, 1, 7},  // over 16 panels in both GEMMs
    {"ManyPiecesOfBorrowedK", 2101, 270, 1, 1, 5},
    {"LongKFewRows", 33801, 19, 1, 1, 8},  // eight rows are longer than their buffer
    {"LongIntermediate", 33, 33801, 1, 1, 8, Activation::relu2},  // the same in gemm2
    {"NoGate", 95, 77, 5, 3, 31, Activation::relu2},
};
constexpr int kMostThreads = 19;
#if defined(FUSEDMOE_TEST_ADDRESS_SANITIZER)
constexpr int kThreads[] = {3, kMostThreads};  // minutes otherwise
#else
constexpr int kThreads[] = {1, 2, 3, 7, kMostThreads};
#endif

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
        for (const int threads : kThreads) {
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

// The shapes above are of no use when the limits move away from them.
TEST(ScheduleShapes, CrossEveryLimitOfEveryInstructionSet) {
  for (const GemmInputs& inputs : gemm_inputs()) {
    if (inputs.dtype == DType::i8) continue;  // mode a8 is not what these shapes run
    SCOPED_TRACE(to_string(inputs.isa));
    const auto some = [&](const auto& crosses) {
      return std::any_of(std::begin(kShapes), std::end(kShapes), crosses);
    };
    EXPECT_TRUE(some([&](const Shape& s) {  // its skips leave at least nine rows of ten
      return s.tokens * s.top_k * 9 / 10 > inputs.max_rows * s.experts;
    }));
    EXPECT_TRUE(some(
        [&](const Shape& s) { return inputs.bytes(s.tokens, s.hidden) > inputs.bytes_at_once; }));
    EXPECT_TRUE(some(
        [&](const Shape& s) { return inputs.bytes(s.tokens, s.inter) > inputs.bytes_at_once; }));
  }
}

class ScheduleFormats : public testing::TestWithParam<test::FormatCase> {};

// Segments and records with several pieces of K, of packed and of borrowed weights, in several
// blocks of rows: K of both GEMMs is longer than what a block of rows has room for.
TEST_P(ScheduleFormats, PiecesOfKAndBlocksOfRowsAreTheSameLayer) {
  const test::FormatCase& c = GetParam();
  constexpr std::int64_t kTokens = 97;
  for (const bool first : {true, false}) {
    for (const DType dtype : {DType::bf16, DType::f32}) {
      const MoeConfig config{
          .hidden_size = c.k(first ? 2301 : 17),
          .intermediate_size = c.k(first ? 17 : 2301),
          .num_experts = 1,
          .top_k = 1,
          .activation = {first || c.w13_parts != ScaleParts::one ? Activation::silu
                                                                 : Activation::relu2},
          .dtype = dtype};
      const RandomWeights weights(config, 1, c.options(), 5);
      RandomInput input(config, {.num_tokens = kTokens}, 6);
      const std::vector<double> expected = reference_moe(config, weights.view(), input.hidden(),
                                                         input.topk_weights(), input.topk_ids());
      const Errors limit = tolerance(c.format, dtype, dtype, ComputeMode::a16);
      for (const CpuIsa isa : all_isas()) {
        if (!is_available(isa)) continue;
        const GemmKernel* kernel = find_gemm(isa, c.format, dtype);
        if (kernel->isa != isa || isa == CpuIsa::scalar) continue;
        ASSERT_GT(inputs_of(*kernel).bytes(inputs_of(*kernel).max_rows, 2301),
                  inputs_of(*kernel).bytes_at_once);
        std::vector<std::byte> whole;
        for (const fusedmoe::WeightStorage storage :
             {fusedmoe::WeightStorage::own, fusedmoe::WeightStorage::borrowed}) {
          PlanOptions options;
          options.isa = to_string(isa);
          options.max_threads = 3;
          options.weight_storage = storage;
          const FusedMoe plan = FusedMoe::create(config, weights.view(), options);
          const std::int64_t bytes = plan.workspace_size(kTokens).bytes;
          const test::GuardedBuffer workspace(bytes, test::Side::back);
          for (const int threads : {1, 3}) {
            const std::vector<std::byte> got = apply(plan, input, threads, workspace.span());
            if (whole.empty()) {
              whole = got;
              const Errors errors = compare(input.output(), expected);
              EXPECT_TRUE(within(errors, limit)) << errors.rel_l2 << " " << errors.max_error;
            }
            ASSERT_EQ(got, whole) << to_string(isa) << ", " << threads << " threads";
          }
          const auto few = static_cast<std::size_t>(plan.workspace_size(5).bytes);
          ASSERT_EQ(apply(plan, input, 2, workspace.span().last(few)), whole)
              << to_string(isa) << ", five tokens at once";
        }
      }
    }
  }
}

std::vector<test::FormatCase> scheduled_formats() {
  std::vector<test::FormatCase> all;
  for (const test::FormatCase& c : test::all_format_cases()) {
    const bool usual = std::any_of(test::format_cases().begin(), test::format_cases().end(),
                                   [&](const test::FormatCase& u) { return u.name == c.name; });
    // The most records, and sums of inputs, that a block of rows may have.
    if (usual || c.scales.group_size == 4) all.push_back(c);
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Formats, ScheduleFormats, testing::ValuesIn(scheduled_formats()),
                         test::format_case_name);

// Several pieces of K and several groups of panels and several blocks of rows at once, of packed
// weights: as many rows as an instruction set takes, and a few more. The oracle sees the first
// tokens and the last, the bits of all others are those of calls with few tokens.
TEST(ScheduleLimits, PiecesGroupsAndBlocksTogether) {
  for (const CpuIsa isa : all_isas()) {
    if (!is_available(isa)) continue;
    const GemmKernel& kernel = *find_gemm(isa, WeightFormat::bf16, DType::bf16);
    if (kernel.isa != isa) continue;
    const GemmInputs& inputs = inputs_of(kernel);
    const MoeConfig config{.hidden_size = 2201,
                           .intermediate_size = 261,
                           .num_experts = 1,
                           .top_k = 1,
                           .dtype = DType::bf16};
    // Two even blocks, of which each has more than half of max_rows: two pieces of K.
    const std::int64_t tokens = 2 * inputs.max_rows - 1;
    ASSERT_GT(inputs.bytes(tokens / 2, config.hidden_size), inputs.bytes_at_once);
    const RandomWeights weights(config, 1, {.w13_bias = true}, 5);
    RandomInput input(config, {.num_tokens = tokens}, 6);
    PlanOptions options;
    options.isa = to_string(isa);
    options.max_threads = 3;
    const FusedMoe plan = FusedMoe::create(config, weights.view(), options);
    WorkspaceBuffer workspace(Device::cpu(), plan.workspace_size(tokens));
    const std::vector<std::byte> all = apply(plan, input, 3, workspace.span());
    for (const std::int64_t first : {std::int64_t{0}, tokens - 2}) {
      const Rows rows(input, first, 2);
      const std::vector<double> expected =
          reference_moe(config, weights.view(), rows.hidden, rows.topk_weights, rows.topk_ids);
      const Errors errors = compare(rows.output, expected);
      EXPECT_TRUE(
          within(errors, tolerance(WeightFormat::bf16, DType::bf16, DType::bf16, ComputeMode::a16)))
          << to_string(isa) << " " << errors.rel_l2 << " " << errors.max_error;
    }
    const auto few = static_cast<std::size_t>(plan.workspace_size(7).bytes);
    EXPECT_EQ(apply(plan, input, 2, workspace.span().first(few)), all) << to_string(isa);
  }
}

// The longest K that a block's loaded rows have room for, and a little more: what the padding of K
// to its multiple takes counts. Bits are those of a few rows, which are far from the limit.
TEST(ScheduleLimits, KAtTheEndOfTheScratch) {
  for (const CpuIsa isa : all_isas()) {
    const GemmKernel& kernel = *find_gemm(isa, WeightFormat::bf16, DType::bf16);
    if (!is_available(isa) || kernel.isa != isa) continue;
    const GemmInputs& inputs = inputs_of(kernel);
    for (int rows = inputs.row_multiple; rows <= inputs.max_rows; rows += inputs.row_multiple) {
      const std::int64_t room = inputs.bytes_at_once / rows - inputs.row_bytes(0);
      const std::int64_t most = room / bytes_per_element(inputs.dtype);
      // Where the last multiple of K is cut off; without multiples, some.
      const bool cut = most % inputs.panel.k_multiple != 0;
      if (most > 6000 || rows % (cut ? 20 : 32) != 0) continue;
      for (const std::int64_t hidden : {most, most + 1}) {
        const MoeConfig config{.hidden_size = hidden,
                               .intermediate_size = 5,
                               .num_experts = 1,
                               .top_k = 1,
                               .dtype = DType::bf16};
        const RandomWeights weights(config, 1, {}, 5);
        RandomInput input(config, {.num_tokens = rows}, 6);
        PlanOptions options;
        options.isa = to_string(isa);
        options.max_threads = 1;
        const FusedMoe plan = FusedMoe::create(config, weights.view(), options);
        WorkspaceBuffer workspace(Device::cpu(), plan.workspace_size(rows));
        const std::vector<std::byte> all = apply(plan, input, 1, workspace.span());
        const auto few = static_cast<std::size_t>(plan.workspace_size(7).bytes);
        EXPECT_EQ(apply(plan, input, 1, workspace.span().first(few)), all)
            << to_string(isa) << ", " << rows << " rows of " << hidden;
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu
