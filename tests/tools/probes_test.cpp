// The table of peak loops: no instruction set of the kernels is without the limit that bench holds
// it against.
#include "probes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "backends/cpu/cpu_isa.h"
#include "backends/cpu/kernels/kernels.h"

namespace fusedmoe::tool {
namespace {

const PeakLoop* loop_of(const std::string& isa, DType operands) {
  const auto loops = peak_loops();
  const auto found = std::find_if(loops.begin(), loops.end(), [&](const PeakLoop& loop) {
    return loop.isa == isa && loop.operands == operands;
  });
  return found == loops.end() ? nullptr : &*found;
}

TEST(PeakLoops, EveryInstructionSetHasOne) {
#if !defined(__x86_64__)
  GTEST_SKIP() << "only the portable loop is built here";
#endif
  for (const cpu::CpuIsa isa : cpu::all_isas()) {
    int found = 0;
    for (const PeakLoop& loop : peak_loops()) {
      if (std::string(loop.isa) != cpu::to_string(isa)) continue;
      ++found;
      EXPECT_NE(loop.run, nullptr);
#ifndef FUSEDMOE_AMX_MODEL
      EXPECT_TRUE(loop.available || !cpu::is_available(isa)) << loop.instruction;
#endif
    }
    EXPECT_GT(found, 0) << cpu::to_string(isa);
  }
}

// Scalar kernels of integers run at the rate of floats, or below.
TEST(PeakLoops, MultiplyWhatTheKernelsMultiply) {
  for (const cpu::GemmKernel& kernel : cpu::gemm_kernels()) {
    const DType operands = kernel.isa == cpu::CpuIsa::scalar ? DType::f32 : kernel.dtype;
    EXPECT_NE(loop_of(cpu::to_string(kernel.isa), operands), nullptr) << kernel.name;
  }
}

TEST(PeakLoops, RunWhereTheyAreAvailable) {
  std::set<std::string> names;
  for (const PeakLoop& loop : peak_loops()) {
    EXPECT_TRUE(names.insert(loop.instruction).second);
    if (!loop.available) continue;
    EXPECT_GT(loop.run(1), 0.0) << loop.instruction;
  }
}

}  // namespace
}  // namespace fusedmoe::tool
