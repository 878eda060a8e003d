// The table of kernels: whole, without two lines for one thing, and with numbers that fit together.
#include <set>

#include "formats/format.h"
#include "kernel_inputs.h"

namespace fusedmoe::cpu {
namespace {

TEST(KernelTable, EveryIsaHasAKernelForEveryFormatAndEveryDtype) {
  for (const CpuIsa isa : all_isas()) {
    for (const FormatInfo& format : all_formats()) {
      for (const DType dtype : kDtypes) {
        const GemmKernel* kernel = find_gemm(isa, format.format, dtype);
        ASSERT_NE(kernel, nullptr) << to_string(isa) << " " << format.name;
        EXPECT_LE(kernel->isa, isa);
        EXPECT_EQ(kernel->format, format.format);
        // What it multiplies is what a row holds, or holds all of it.
        EXPECT_TRUE(kernel->dtype == dtype || kernel->dtype == DType::f32) << kernel->name;
        // The best: no other line of a set in between would do.
        for (const GemmKernel& other : gemm_kernels()) {
          if (other.format != format.format || other.isa > isa) continue;
          if (other.dtype != dtype && other.dtype != DType::f32) continue;
          EXPECT_LE(other.isa, kernel->isa) << other.name;
        }
        // Mode a8: integers, or none.
        const GemmKernel* integers = find_gemm(isa, format.format, dtype, ComputeMode::a8);
        const bool has = format.format == WeightFormat::int8 || format.format == WeightFormat::int4;
        ASSERT_EQ(integers != nullptr, has) << to_string(isa) << " " << format.name;
        if (integers == nullptr) continue;
        EXPECT_EQ(integers->dtype, DType::i8);
        EXPECT_LE(integers->isa, isa);
      }
    }
    const RowKernels& rows = row_kernels(isa);
    EXPECT_LE(rows.isa, isa);
    EXPECT_NE(rows.activate, nullptr);
    EXPECT_NE(rows.combine, nullptr);
  }
}

// The choices that the sets are there for, by name.
TEST(KernelTable, KnownChoices) {
  const auto chosen = [](CpuIsa isa, WeightFormat format, DType dtype) -> std::string {
    return find_gemm(isa, format, dtype)->name;
  };
  const auto bf16 = WeightFormat::bf16;
  EXPECT_EQ(chosen(CpuIsa::scalar, bf16, DType::bf16), "gemm_scalar_bf16");
  EXPECT_EQ(chosen(CpuIsa::avx2_fma, bf16, DType::bf16), "gemm_avx2_fma_bf16");
  EXPECT_EQ(chosen(CpuIsa::avx512, bf16, DType::bf16), "gemm_avx512_bf16");
  EXPECT_EQ(chosen(CpuIsa::avx512_bf16, bf16, DType::bf16), "gemm_avx512_bf16_bf16");
  EXPECT_EQ(chosen(CpuIsa::amx_bf16, bf16, DType::bf16), "gemm_amx_bf16_bf16");
  EXPECT_EQ(chosen(CpuIsa::avx512_vnni, bf16, DType::bf16), "gemm_avx512_bf16");
  EXPECT_EQ(chosen(CpuIsa::avx512_bf16, WeightFormat::mxfp4, DType::bf16),
            "gemm_avx512_bf16_mxfp4");
  EXPECT_EQ(chosen(CpuIsa::avx2_fma, WeightFormat::int4, DType::bf16), "gemm_avx2_fma_int4");
  const auto a8 = [](CpuIsa isa, WeightFormat format) -> std::string {
    return find_gemm(isa, format, DType::bf16, ComputeMode::a8)->name;
  };
  EXPECT_EQ(a8(CpuIsa::avx512, WeightFormat::int8), "gemm_a8_scalar_int8");
  EXPECT_EQ(a8(CpuIsa::avx512_vnni, WeightFormat::int8), "gemm_a8_avx512_vnni_int8");
  EXPECT_EQ(a8(CpuIsa::avx512_bf16, WeightFormat::int4), "gemm_a8_avx512_vnni_int4");
  // A bf16 product would round rows of f16 and f32.
  for (const CpuIsa isa : {CpuIsa::avx512_bf16, CpuIsa::amx_bf16}) {
    EXPECT_EQ(chosen(isa, bf16, DType::f16), "gemm_avx512_bf16");
    EXPECT_EQ(chosen(isa, bf16, DType::f32), "gemm_avx512_bf16");
    EXPECT_EQ(chosen(isa, WeightFormat::f16, DType::bf16), "gemm_avx512_f16");
    EXPECT_EQ(chosen(isa, WeightFormat::f32, DType::bf16), "gemm_avx512_f32");
    EXPECT_EQ(row_kernels(isa).isa, CpuIsa::avx512);
  }
}

TEST(KernelTable, EveryKernelHasItsLineOfInputs) {
  std::set<void (*)(const LoadRows&)> used;
  for (const GemmKernel& kernel : gemm_kernels()) {
    int lines = 0;
    for (const GemmInputs& inputs : gemm_inputs()) {
      lines += inputs.isa == kernel.isa && inputs.dtype == kernel.dtype ? 1 : 0;
    }
    ASSERT_EQ(lines, 1) << kernel.name;
    EXPECT_EQ(inputs_of(kernel).isa, kernel.isa);
    EXPECT_EQ(inputs_of(kernel).dtype, kernel.dtype);
    used.insert(inputs_of(kernel).load_rows);
    EXPECT_NE(kernel.run, nullptr);
    EXPECT_STRNE(kernel.recipe, "");
    const std::string name = kernel.name;
    EXPECT_EQ(name.rfind("gemm_", 0), 0U) << name;
    const std::string end = std::string("_") + to_string(kernel.format);
    ASSERT_GT(name.size(), end.size());
    EXPECT_EQ(name.substr(name.size() - end.size()), end) << name;
    EXPECT_EQ(name.rfind("gemm_a8_", 0) == 0, kernel.dtype == DType::i8) << name;
  }
  EXPECT_EQ(used.size(), gemm_inputs().size()) << "a line of inputs that no kernel multiplies";
}

TEST(KernelTable, NumbersOfInputsFitTogether) {
  for (const GemmInputs& inputs : gemm_inputs()) {
    SCOPED_TRACE(to_string(inputs.isa));
    EXPECT_GE(inputs.panel.k_group, 1);
    EXPECT_EQ(inputs.panel.k_multiple % inputs.panel.k_group, 0);
    // Segments start at multiples of 4, and 128 codes of four bits are four k.
    EXPECT_EQ(inputs.panel.k_multiple % 4, 0);
    EXPECT_EQ(4 % inputs.panel.k_group, 0);
    EXPECT_TRUE(inputs.panel.lanes == 16 || inputs.panel.lanes == 32 || inputs.panel.lanes == 64);
    EXPECT_GE(inputs.row_multiple, 1);
    EXPECT_EQ(inputs.max_rows % inputs.row_multiple, 0);
    EXPECT_LE(inputs.max_rows, 256);  // grouped_gemm.cpp has tables of so many
    EXPECT_GE(inputs.rows_per_pass, 1);
    EXPECT_LE(inputs.rows_per_pass, inputs.max_rows);
    // The shortest piece of K of the most rows has room.
    EXPECT_GE(inputs.bytes_at_once, inputs.bytes(inputs.max_rows, inputs.panel.k_multiple));
    EXPECT_NE(inputs.load_rows, nullptr);
    EXPECT_EQ(inputs.panel.padded(1), inputs.panel.k_multiple);
    EXPECT_EQ(inputs.panel.padded(inputs.panel.k_multiple), inputs.panel.k_multiple);
    EXPECT_EQ(inputs.padded_rows(inputs.max_rows), inputs.max_rows);
  }
}

TEST(KernelTable, NamesAndFunctionsAreUnique) {
  std::set<std::string> names;
  std::set<GemmFunction> functions;
  for (const GemmKernel& kernel : gemm_kernels()) {
    EXPECT_TRUE(names.insert(kernel.name).second) << kernel.name;
    EXPECT_TRUE(functions.insert(kernel.run).second) << kernel.name;
  }
  std::set<std::pair<CpuIsa, DType>> lines;
  std::set<void (*)(const LoadRows&)> loads;
  for (const GemmInputs& inputs : gemm_inputs()) {
    EXPECT_TRUE(lines.insert({inputs.isa, inputs.dtype}).second);
    EXPECT_TRUE(loads.insert(inputs.load_rows).second);
  }
  std::set<CpuIsa> row_isas;
  std::set<void (*)(const ActivateTile&)> activates;
  std::set<void (*)(const CombineTile&)> combines;
  for (const CpuIsa isa : all_isas()) {
    row_isas.insert(row_kernels(isa).isa);
    activates.insert(row_kernels(isa).activate);
    combines.insert(row_kernels(isa).combine);
  }
  EXPECT_EQ(activates.size(), row_isas.size());
  EXPECT_EQ(combines.size(), row_isas.size());
}

}  // namespace
}  // namespace fusedmoe::cpu
