// The table of kernels: whole, and without two lines for one thing.
#include <set>

#include "formats/format.h"
#include "kernel_inputs.h"

namespace fusedmoe::cpu {
namespace {

TEST(KernelTable, EveryIsaHasAKernelForEveryFormatThatIsBuilt) {
  std::size_t built = 0;
  for (const CpuIsa isa : all_isas()) {
    for (const FormatInfo& format : all_formats()) {
      const GemmKernel* kernel = find_gemm(isa, format.format);
      if (!format.built) {
        EXPECT_EQ(kernel, nullptr) << format.name;
        continue;
      }
      ++built;
      ASSERT_NE(kernel, nullptr) << to_string(isa) << " " << format.name;
      EXPECT_EQ(kernel->isa, isa);
      EXPECT_EQ(kernel->format, format.format);
      EXPECT_NE(kernel->run, nullptr);
      EXPECT_STRNE(kernel->recipe, "");
      const std::string name = kernel->name;
      EXPECT_EQ(name.rfind("gemm_", 0), 0U) << name;
      EXPECT_NE(name.find(format.name), std::string::npos) << name;
    }
    const RowKernels& rows = row_kernels(isa);
    EXPECT_EQ(rows.isa, isa);
    EXPECT_NE(rows.load_rows, nullptr);
    EXPECT_NE(rows.activate, nullptr);
    EXPECT_NE(rows.combine, nullptr);
  }
  EXPECT_EQ(gemm_kernels().size(), built);
}

TEST(KernelTable, NamesAndFunctionsAreUnique) {
  std::set<std::string> names;
  std::set<GemmFunction> functions;
  for (const GemmKernel& kernel : gemm_kernels()) {
    EXPECT_TRUE(names.insert(kernel.name).second) << kernel.name;
    EXPECT_TRUE(functions.insert(kernel.run).second) << kernel.name;
  }
  std::set<void (*)(const ActivateTile&)> activates;
  for (const CpuIsa isa : all_isas()) activates.insert(row_kernels(isa).activate);
  EXPECT_EQ(activates.size(), all_isas().size());
}

}  // namespace
}  // namespace fusedmoe::cpu
