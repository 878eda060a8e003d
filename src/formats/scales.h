// Where the scale of a weight lies: the one place that resolves scale layouts, parts and types.
#pragma once

#include <cstdint>

#include "fusedmoe/weights.h"

namespace fusedmoe {

std::int64_t bytes_per_scale(ScaleType type) noexcept;

// Scales of one expert, as a matrix along N and K: 1 x 1 per tensor (2 x 1 with parts), N x 1 per
// channel. 0 x 0 without scales.
struct ScaleShape {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t count() const noexcept { return rows * columns; }
};
ScaleShape scale_shape(const WeightTensor& tensor) noexcept;
// Global scales of one expert: 0, 1 or 2.
std::int64_t globals_per_expert(const WeightTensor& tensor) noexcept;

// Along K: how many inputs share a scale.
std::int64_t inputs_per_scale(const WeightTensor& tensor) noexcept;
// The matrix, of those that were quantised apart, that holds output n: 0 or 1.
std::int64_t part_of(const WeightTensor& tensor, std::int64_t n) noexcept;
// Row and column of the scale that belongs to (n, k).
std::int64_t scale_row(const WeightTensor& tensor, std::int64_t n) noexcept;
std::int64_t scale_column(const WeightTensor& tensor, std::int64_t k) noexcept;
// Index into scales (and zero points) of an expert's scale at (row, column) of scale_shape.
std::int64_t scale_index(const WeightTensor& tensor, std::int64_t expert, std::int64_t row,
                         std::int64_t column) noexcept;

// The number that `index` of `data` stands for.
float load_scale(const void* data, ScaleType type, std::int64_t index) noexcept;
// Rounds to the type; for tests and tools.
void store_scale(void* data, ScaleType type, std::int64_t index, double value) noexcept;

// What an element's code at (expert, n, k) is multiplied by: scale times global scale.
double scale_at(const WeightTensor& tensor, std::int64_t expert, std::int64_t n,
                std::int64_t k) noexcept;
// The global scale that belongs to output n; 1 without one.
float global_scale_at(const WeightTensor& tensor, std::int64_t expert, std::int64_t n) noexcept;
// The zero point there; `otherwise` when the tensor has none.
int zero_point_at(const WeightTensor& tensor, std::int64_t expert, std::int64_t n, std::int64_t k,
                  int otherwise) noexcept;

}  // namespace fusedmoe
