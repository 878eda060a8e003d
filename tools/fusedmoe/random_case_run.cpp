// Runs a random case both ways and judges it: within tolerance of the oracle, the same bits, and
// nothing written that is not the output.
#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <string>

#include "case_runner.h"
#include "formats/format.h"
#include "formats/scales.h"
#include "fusedmoe/error.h"
#include "fusedmoe/fused_moe.h"
#include "random_case.h"
#include "reference/reference_moe.h"
#include "verify_layer.h"

namespace fusedmoe::tool {
namespace {

// Copies of everything that a call may read, to see afterwards that nothing wrote there.
class Snapshot {
 public:
  void add(const std::string& name, std::span<const std::byte> bytes) {
    if (!bytes.empty()) entries_.push_back({name, bytes, {bytes.begin(), bytes.end()}});
  }
  void add(const ExpertWeights& weights) {
    add("w13", weights.w13);
    if (!weights.w13_up.empty()) add("w13_up", weights.w13_up);
    add("w2", weights.w2);
    for (const auto& [name, bias] :
         {std::pair{"w13_bias", &weights.w13_bias}, std::pair{"w2_bias", &weights.w2_bias}}) {
      add(name,
          tool::bytes_of(ConstMatrixView(bias->data, bias->dtype, bias->experts, bias->size)));
    }
  }
  void add(const std::string& name, const WeightTensor& tensor) {
    const std::int64_t elements = tensor.experts * expert_stride_of(tensor);
    const std::int64_t scales = tensor.experts * scale_shape(tensor).count();
    const std::int64_t globals = tensor.experts * globals_per_expert(tensor);
    const auto part = [&](const char* what, const void* data, std::int64_t bytes) {
      if (data == nullptr) return;
      add(name + what, {static_cast<const std::byte*>(data), static_cast<std::size_t>(bytes)});
    };
    part("", tensor.data, format_info(tensor.format).bytes(elements));
    part(".scales", tensor.scales.data, scales * bytes_per_scale(tensor.scales.type));
    part(".scales.zero_points", tensor.scales.zero_points, scales);
    part(".scales.global", tensor.scales.global,
         globals * static_cast<std::int64_t>(sizeof(float)));
  }
  // The name of what changed; empty when nothing did.
  std::string changed() const {
    for (const Entry& entry : entries_) {
      if (!std::ranges::equal(entry.now, entry.before)) return entry.name;
    }
    return {};
  }

 private:
  struct Entry {
    std::string name;
    std::span<const std::byte> now;
    std::vector<std::byte> before;
  };
  std::vector<Entry> entries_;
};

// A plan and the memory that it was packed into, when that is the caller's.
struct Plan {
  GuardedMemory storage;
  std::optional<FusedMoe> moe;
};

Plan build(const RandomCase& drawn, const CaseRun& run, const RandomWeights& weights) {
  PlanOptions options;
  options.device = drawn.device;
  options.isa = drawn.isa;
  options.mode = drawn.mode;
  options.expert_map = drawn.expert_map;
  options.max_threads = run.threads;
  const bool from_source = run.storage == StorageKind::source;
  const ExpertWeights given = from_source ? weights.as_source() : weights.view();
  Plan plan;
  if (run.storage == StorageKind::borrowed) options.weight_storage = WeightStorage::borrowed;
  if (run.storage == StorageKind::caller || run.storage == StorageKind::adopt) {
    const WorkspaceSize size = FusedMoe::packed_weights_size(drawn.config, given, options);
    plan.storage = GuardedMemory(size.bytes, size.alignment);
    options.weight_storage = WeightStorage::caller;
    options.storage = plan.storage.span();
  }
  plan.moe = FusedMoe::create(drawn.config, given, options);
  if (run.storage == StorageKind::adopt) {
    plan.moe.reset();  // the first plan is gone: all it knew is in the storage
    options.weight_storage = WeightStorage::adopt;
    plan.moe = FusedMoe::create(drawn.config, given, options);
  }
  return plan;
}

struct Outcome {
  std::vector<std::byte> bits;
  std::string problem;
};

// expected: of the oracle; errors are taken from this run when `judge` is given.
Outcome execute(const RandomCase& drawn, const CaseRun& run, const RandomWeights& weights,
                const RandomInput& input, std::span<const double> expected, CaseResult* judge) {
  const MoeConfig& config = drawn.config;
  const std::int64_t tokens = drawn.input.num_tokens;
  Plan plan = build(drawn, run, weights);
  CheckedMatrix hidden(input.hidden(), drawn.hidden_offset);
  CheckedMatrix apart(config.output_dtype.value_or(config.dtype), tokens, config.hidden_size,
                      drawn.input.output_padding, drawn.output_offset);
  CheckedMatrix& output = run.in_place ? hidden : apart;
  const std::vector<std::byte> hidden_before = hidden.bytes();
  Scratch scratch(*plan.moe, run.workspace, tokens, run.tokens_between);
  const CaseRunner runner(run.runner, run.runner_threads, drawn.seed % 2 == 0);
  ApplyContext context;
  context.runner = runner.get();
  context.expert_map = drawn.call_map;
  plan.moe->apply(output.view(), hidden.view(), input.topk_weights(), input.topk_ids(),
                  scratch.dirty(), context);
  plan.moe->check_faults();

  Outcome outcome;
  outcome.bits = output.bytes();
  if (judge != nullptr) judge->errors = compare(output.view(), expected);
  if (!run.in_place && hidden.bytes() != hidden_before) outcome.problem = "hidden was written";
  if (!hidden.surroundings_untouched()) outcome.problem = "bytes beside hidden were written";
  if (!apart.surroundings_untouched()) outcome.problem = "bytes beside the output were written";
  if (!scratch.guards_untouched()) outcome.problem = "bytes beside the workspace were written";
  if (!plan.storage.guards_untouched()) outcome.problem = "bytes beside the storage were written";
  return outcome;
}

std::string beyond(const Errors& errors, const Errors& limit) {
  return fmt::format("rel_l2 {:.3g} and max_error {:.3g}, at most {:.3g} and {:.3g} are allowed",
                     errors.rel_l2, errors.max_error, limit.rel_l2, limit.max_error);
}

// Below this many independent roundings a result may be much smaller than its terms, by chance.
constexpr std::int64_t kFewTerms = 1000;

// About how many values are rounded on the way to the output: of the intermediate, or of the
// output itself.
std::int64_t num_terms(const RandomCase& drawn, const RandomInput& input,
                       const std::vector<std::int32_t>& map) {
  const ConstMatrixView ids = input.topk_ids();
  std::int64_t rows = 0;
  for (std::int64_t t = 0; t < ids.rows; ++t) {
    for (std::int64_t k = 0; k < ids.columns; ++k) {
      const std::int64_t index = t * ids.row_stride + k;
      const std::int64_t id = ids.dtype == DType::i32
                                  ? static_cast<const std::int32_t*>(ids.data)[index]
                                  : static_cast<const std::int64_t*>(ids.data)[index];
      if (id >= 0 && map[static_cast<std::size_t>(id)] >= 0) ++rows;
    }
  }
  return rows * std::min(drawn.config.intermediate_size, drawn.config.hidden_size);
}

void judge(const RandomCase& drawn, CaseResult& result) {
  const MoeConfig& config = drawn.config;
  const WeightFormat formats[] = {drawn.weights.w13_format, drawn.weights.w2_format};
  result.limit = tolerance_of(config, formats, drawn.mode);
  const RandomWeights weights(config, drawn.num_local, drawn.weights, drawn.seed + 1);
  const RandomInput input(config, drawn.input, drawn.seed + 2);
  const std::vector<std::int32_t> map =
      drawn.call_map.empty() ? drawn.expert_map.resolve(config.num_experts) : drawn.call_map;
  Snapshot snapshot;
  snapshot.add(weights.view());
  snapshot.add("topk_weights", tool::bytes_of(input.topk_weights()));
  snapshot.add("topk_ids", tool::bytes_of(input.topk_ids()));
  const std::vector<double> expected = reference_moe(config, weights.view(), input.hidden(),
                                                     input.topk_weights(), input.topk_ids(), map);

  Outcome outcomes[2];
  for (int i = 0; i < 2; ++i) {
    outcomes[i] = execute(drawn, drawn.runs[static_cast<std::size_t>(i)], weights, input, expected,
                          i == 0 ? &result : nullptr);
    if (result.problem.empty()) result.problem = outcomes[i].problem;
  }
  if (result.problem.empty() && !within(result.errors, result.limit) &&
      num_terms(drawn, input, map) > kFewTerms) {
    result.problem = beyond(result.errors, result.limit);
  } else if (result.problem.empty() && !within(result.errors, result.limit)) {
    // A tiny layer may cancel almost to zero; then the size of what cancelled is the measure. The
    // table counts on roundings that average out: a handful of them may all go one way.
    result.limit.rel_l2 *= 2;
    result.limit.max_error *= 2;
    const std::vector<double> scale = reference_scale(config, weights.view(), input.hidden(),
                                                      input.topk_weights(), input.topk_ids(), map);
    CheckedMatrix output(config.output_dtype.value_or(config.dtype), drawn.input.num_tokens,
                         config.hidden_size);
    std::ranges::copy(outcomes[0].bits, static_cast<std::byte*>(output.view().data));
    result.errors = compare(output.view(), expected, scale);
    if (!within(result.errors, result.limit)) result.problem = beyond(result.errors, result.limit);
  }
  if (result.problem.empty() && outcomes[0].bits != outcomes[1].bits) {
    result.problem = "the two runs give different bits";
  }
  const std::string changed = snapshot.changed();
  if (result.problem.empty() && !changed.empty()) result.problem = changed + " was written";
}

}  // namespace

CaseResult run_case(const RandomCase& drawn) {
  CaseResult result;
  try {
    judge(drawn, result);
  } catch (const Error& error) {
    result.problem = std::string("threw ") + to_string(error.code()) + ": " + error.what();
  }
  return result;
}

}  // namespace fusedmoe::tool
