// Views of matrices that the caller owns: the arguments of FusedMoe::apply and of routing.
#pragma once

#include <cstdint>

#include "fusedmoe/export.h"

namespace fusedmoe {

// Element types of activations, ids and routing. Formats of weights are in weights.h. The integer
// types beyond i32 and i64, and f64, exist so that a message can say what came.
enum class DType : std::uint8_t { f32 = 0, f16, bf16, i32, i64, f64, i8, i16, u8 };

FUSEDMOE_EXPORT const char* to_string(DType dtype) noexcept;
FUSEDMOE_EXPORT std::int64_t bytes_per_element(DType dtype) noexcept;

// [rows, columns]; the last dimension is contiguous, rows are row_stride elements apart.
struct ConstMatrixView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t row_stride = 0;  // in elements, at least `columns`

  ConstMatrixView() = default;
  ConstMatrixView(const void* address, DType type, std::int64_t num_rows, std::int64_t num_columns)
      : ConstMatrixView(address, type, num_rows, num_columns, num_columns) {}
  ConstMatrixView(const void* address, DType type, std::int64_t num_rows, std::int64_t num_columns,
                  std::int64_t stride)
      : data(address), dtype(type), rows(num_rows), columns(num_columns), row_stride(stride) {}
};

struct MatrixView {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t row_stride = 0;  // in elements, at least `columns`

  MatrixView() = default;
  MatrixView(void* address, DType type, std::int64_t num_rows, std::int64_t num_columns)
      : MatrixView(address, type, num_rows, num_columns, num_columns) {}
  MatrixView(void* address, DType type, std::int64_t num_rows, std::int64_t num_columns,
             std::int64_t stride)
      : data(address), dtype(type), rows(num_rows), columns(num_columns), row_stride(stride) {}

  operator ConstMatrixView() const {  // NOLINT(google-explicit-constructor): as T* to const T*
    return {data, dtype, rows, columns, row_stride};
  }
};

}  // namespace fusedmoe
