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

const PeakLoop* loop_of(const std::string& isa) {
  const auto loops = peak_loops();
  const auto found = std::find_if(loops.begin(), loops.end(),
                                  [&](const PeakLoop& loop) { return loop.isa == isa; });
  return found == loops.end() ? nullptr : &*found;
}

TEST(PeakLoops, EveryInstructionSetHasOne) {
#if !defined(__x86_64__)
  GTEST_SKIP() << "only the portable loop is built here";
#endif
  for (const cpu::CpuIsa isa : cpu::all_isas()) {
    const PeakLoop* loop = loop_of(cpu::to_string(isa));
    ASSERT_NE(loop, nullptr) << cpu::to_string(isa);
    EXPECT_NE(loop->run, nullptr);
#ifndef FUSEDMOE_AMX_MODEL
    EXPECT_TRUE(loop->available || !cpu::is_available(isa)) << loop->instruction;
#endif
  }
  EXPECT_EQ(peak_loops().size(), cpu::all_isas().size());
}

// A kernel's operands are what its set's loop multiplies, or wider: then the loop of f32 serves.
TEST(PeakLoops, MultiplyWhatTheKernelsMultiply) {
  for (const cpu::GemmKernel& kernel : cpu::gemm_kernels()) {
    const PeakLoop* loop = loop_of(cpu::to_string(kernel.isa));
    ASSERT_NE(loop, nullptr) << kernel.name;
    EXPECT_EQ(loop->format == WeightFormat::f32, kernel.dtype == DType::f32) << kernel.name;
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
