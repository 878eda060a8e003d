#include "bench_floor.h"

#include <algorithm>
#include <cmath>

namespace fusedmoe::tool {
namespace {

// Rows of w13 per intermediate channel.
std::int64_t projections(const ModelShape& shape) {
  return is_gated(shape.config.activation.kind) ? 2 : 1;
}

std::int64_t weights_per_expert(const ModelShape& shape) {
  return (projections(shape) + 1) * shape.config.hidden_size * shape.config.intermediate_size;
}

}  // namespace

std::int64_t expert_bytes(const ModelShape& shape, const FormatSpec& format) {
  const MoeConfig& config = shape.config;
  std::int64_t bytes = stored_bytes(format, w13_of(format, config, 1)) +
                       stored_bytes(format, w2_of(format, config, 1));
  if (shape.bias) {
    bytes += static_cast<std::int64_t>(sizeof(float)) *
             (projections(shape) * config.intermediate_size + config.hidden_size);
  }
  return bytes;
}

std::int64_t layer_bytes(const ModelShape& shape, const FormatSpec& format) {
  return shape.num_local_experts() * expert_bytes(shape, format);
}

Work count_work(const ModelShape& shape, const FormatSpec& format,
                std::span<const std::int32_t> topk_ids, std::span<const std::int32_t> expert_map) {
  const MoeConfig& config = shape.config;
  std::vector<bool> active(expert_map.size());
  Work work;
  for (const std::int32_t id : topk_ids) {
    if (id < 0 || expert_map[id] < 0) continue;
    work.rows += 1;
    if (!active[id]) work.active_experts += 1;
    active[id] = true;
  }
  const auto num_tokens = static_cast<double>(topk_ids.size()) / static_cast<double>(config.top_k);
  const std::int64_t token_bytes =
      config.hidden_size * (bytes_per_element(config.dtype) +
                            bytes_per_element(config.output_dtype.value_or(config.dtype)));
  work.bytes = work.active_experts * static_cast<double>(expert_bytes(shape, format)) +
               num_tokens * static_cast<double>(token_bytes);
  work.operations = 2.0 * work.rows * static_cast<double>(weights_per_expert(shape));
  return work;
}

double expected_active_experts(const ModelShape& shape, std::int64_t num_tokens) {
  const double chosen =
      static_cast<double>(shape.config.top_k) / static_cast<double>(shape.config.num_experts);
  return static_cast<double>(shape.num_local_experts()) *
         (1.0 - std::pow(1.0 - chosen, static_cast<double>(num_tokens)));
}

Work mean_of(std::span<const Work> works) {
  Work mean;
  for (const Work& work : works) {
    mean.active_experts += work.active_experts;
    mean.rows += work.rows;
    mean.bytes += work.bytes;
    mean.operations += work.operations;
  }
  const auto count = static_cast<double>(std::max<std::size_t>(works.size(), 1));
  return {mean.active_experts / count, mean.rows / count, mean.bytes / count,
          mean.operations / count};
}

double floor_us(const Work& work, const Ceilings& ceilings) {
  // 1e9 per second is 1e3 per microsecond.
  return std::max(work.bytes / (ceilings.bandwidth_gbs * 1e3),
                  work.operations / (ceilings.peak_gflops * 1e3));
}

Spread spread_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  const double median =
      values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
  return {median, values.front(), values.back()};
}

}  // namespace fusedmoe::tool
